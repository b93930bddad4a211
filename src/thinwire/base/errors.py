"""The exceptions, and the one warning, that a user of Thinwire is meant to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class ThinwireError(Exception):
    """What was asked for is not possible. The message is one line: what is wrong, and what to do instead.

    Attributes:
        status: what the ``thinwire`` program ends with.
    """

    status = 2


class LostRank(ThinwireError):
    """Another rank has ended, or has not come within the group's timeout: this one cannot go on.

    gloo says so here. With NCCL, torch's watchdog ends the process by itself.

    Attributes:
        rank: this one's number in the job. lost: those of whom one at least is lost; all it may be, where the network
            does not tell.
        verb: the collective that failed. seconds: it had waited. cause: in the network's own words.
        step: the optimizer step under way, from 1, skipped ones included; None: outside of one.
        what: was exchanged; "" where that is not known.
    """

    def __init__(self, rank: int, lost: Sequence[int], verb: str, seconds: float, cause: str) -> None:
        super().__init__(rank, tuple(lost), verb, seconds, cause)
        self.rank, self.lost, self.verb, self.seconds, self.cause = rank, tuple(lost), verb, seconds, cause
        self.step: int | None = None
        self.what = ""

    def __str__(self) -> str:
        when = "" if self.step is None else f", step {self.step}"
        whom = f"rank {self.lost[0]}" if len(self.lost) == 1 else f"one of ranks {_listed(self.lost)}"
        what = f"{self.what or 'a collective'} ({self.verb})"
        return f"rank {self.rank}{when}: waited {self.seconds:.1f} s for {whom} in {what}: {self.cause}"


class DamagedMessage(ThinwireError):
    """What another rank sent is not what has arrived here: its checksum does not fit.

    Attributes:
        rank: this one's number in the job. sender: the other's. verb: the collective.
        step, what: as :class:`LostRank` has them.
    """

    def __init__(self, rank: int, sender: int, verb: str) -> None:
        super().__init__(rank, sender, verb)
        self.rank, self.sender, self.verb = rank, sender, verb
        self.step: int | None = None
        self.what = ""

    def __str__(self) -> str:
        when = "" if self.step is None else f", step {self.step}"
        return (
            f"rank {self.rank}{when}: what rank {self.sender} sent in {self.what or 'a collective'} ({self.verb}) "
            "arrived damaged, as its checksum shows: go back to a checkpoint, and look at the memory and the link of "
            "these two"
        )


class ThinwireWarning(UserWarning):
    """A setting works but has little effect. The message is one line, like an error's."""


@contextmanager
def doing(step: int, what: Callable[[], str]) -> Iterator[None]:
    """Tell a rank that is lost inside, or a damaged message, in which step it was, and ``what`` was exchanged."""
    try:
        yield
    except (LostRank, DamagedMessage) as error:
        if not error.what:
            error.step, error.what = step, what()
        raise


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    more = f" and {len(ranks) - most} others" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more

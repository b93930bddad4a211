"""The exceptions and the warning that users of Thinwire see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager


class ThinwireError(Exception):
    """A request cannot be met. The message is one line: what is wrong, and what to do instead.

    Attributes:
        status: the exit status of the ``thinwire`` program.
    """

    status = 2


class Unanswered(ThinwireError):
    """Nobody has answered. No input is at fault: the replica may succeed when it is started again."""

    status = 1


class Unsavable(ThinwireError):
    """A checkpoint cannot hold what an optimizer keeps."""


class FailedExchange(ThinwireError):
    """An exchange with other ranks has failed.

    Attributes:
        rank: this rank's number in the job. verb: the collective that failed.
        step: the optimizer step under way, from 1, skipped ones included; None: outside of one.
        exchanged: "the exchange of gradients of ..."; "" if unknown.
    """

    rank: int
    verb: str
    step: int | None = None
    exchanged = ""

    @property
    def _collective(self) -> str:
        return f"{self.exchanged or 'a collective'} ({self.verb})"

    @property
    def _location(self) -> str:
        return f"rank {self.rank}" + ("" if self.step is None else f", step {self.step}")


class LostRank(FailedExchange):
    """Another rank has ended, or has not come within the group's timeout: this one cannot go on.

    gloo reports it so. With NCCL, torch's watchdog ends the process.

    Attributes:
        lost: the ranks of which at least one is lost; all candidates if the network does not tell.
        seconds: how long the collective had waited. cause: the network's own words.
    """

    def __init__(self, rank: int, lost: Sequence[int], verb: str, seconds: float, cause: str) -> None:
        super().__init__(rank, tuple(lost), verb, seconds, cause)
        self.rank, self.lost, self.verb, self.seconds, self.cause = rank, tuple(lost), verb, seconds, cause

    def __str__(self) -> str:
        one = f"rank {self.lost[0]}" if self.lost else "another rank"
        awaited = f"one of ranks {_listed(self.lost)}" if self.lost[1:] else one
        return f"{self._location}: waited {self.seconds:.1f} s for {awaited} in {self._collective}: {self.cause}"


class DamagedMessage(FailedExchange):
    """A message of another rank has arrived damaged: its checksum does not fit.

    Attributes:
        sender: the other rank's number in the job.
    """

    def __init__(self, rank: int, sender: int, verb: str) -> None:
        super().__init__(rank, sender, verb)
        self.rank, self.sender, self.verb = rank, sender, verb

    def __str__(self) -> str:
        return (
            f"{self._location}: the checksum shows that what rank {self.sender} sent in {self._collective} arrived "
            "damaged: go back to a checkpoint, and check the memory and the link of these two"
        )


class ThinwireWarning(UserWarning):
    """A setting works but has little effect. The message is one line, like an error's."""


@contextmanager
def name_exchange(step: int | None, describe: Callable[[], str]) -> Iterator[None]:
    """Note ``step``, if in one, and by ``describe`` what was exchanged, on a ``FailedExchange`` raised inside."""
    try:
        yield
    except FailedExchange as error:
        if not error.exchanged:
            error.step, error.exchanged = step, describe()
        raise


def refuse_any(reasons: Mapping[str, object]) -> None:
    """Raise ThinwireError with the first of ``reasons``, {message: does it apply?}, that applies."""
    for reason, applies in reasons.items():
        if applies:
            raise ThinwireError(reason)


def first_line(error: object) -> str:
    """Return the first line of what ``error`` says; the name of its class if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def in_words(error: object) -> str:
    """Return the class of ``error`` and what it says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _listed(ranks: Sequence[int], limit: int = 8) -> str:
    suffix = f" and {len(ranks) - limit} others" if len(ranks) > limit else ""
    return ", ".join(map(str, ranks[:limit])) + suffix

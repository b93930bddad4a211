"""Replicas that come and go: who takes part in a step, and whether it counts, is asked here and nowhere else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from thinwire.network.membership import Membership

Give = Callable[[], dict[str, Any]]
"""Returns what a replica that joins needs: weights, moments, and what all replicas hold alike."""
Take = Callable[[dict[str, Any]], None]
"""Is handed that on the replica that joins."""


class Members(ABC):
    """The replicas of a run, of which this process is in one. A step is *attempted*, and counts or leaves no trace.

    Every replica asks once per attempt, right before the exchange. ``thinwire.adapters.torchft`` has the members of a
    torchft manager; tests have threads.
    """

    @abstractmethod
    def ask(self) -> Membership:
        """Return who takes part in the attempt that now begins. Collective among all replicas that are there.

        If this replica is behind the others, ``take`` of ``offer`` is called first. After an attempt that failed on any
        replica, ``Membership.number`` is another one, even if the same replicas take part.

        Raises:
            FailedExchange: a replica was lost meanwhile; the attempt has failed.
        """

    @abstractmethod
    def vote(self, counts: bool) -> bool:
        """Return whether the step counts for all ranks of this replica, given what this rank says. Other replicas vote
        for themselves: one may count a step that another one does not, and the other is then behind."""

    @abstractmethod
    def fall_behind(self) -> None:
        """Count as behind all others when this replica asks again, whatever steps it has counted."""

    @abstractmethod
    def offer(self, give: Give, take: Take) -> None:
        """Let a replica that is behind get ``give()`` of one that is not, through its own ``take``."""

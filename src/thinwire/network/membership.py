"""Who takes part in an exchange, as a value: what depends on it is derived from it, and cached by it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Membership:
    """This is rank ``rank`` of ``size``; rank r is on node ``nodes[r]``.

    Two memberships are equal if what is derived from them is: ``number`` and ``names`` do not count.

    Attributes:
        number: of the membership in the run; a later one has a larger number, on all ranks the same.
        names: of the replicas in rank order, where they come and go; a process that starts again has another name.
    """

    rank: int
    nodes: tuple[int, ...]
    number: int = field(default=0, compare=False)
    names: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def apart(cls, rank: int, size: int, number: int = 0, names: Sequence[str] = ()) -> Membership:
        """Make the membership of ``size`` ranks of which each has a node of its own."""
        return cls(rank, tuple(range(size)), number, tuple(names))

    @property
    def size(self) -> int:
        """The number of ranks, N."""
        return len(self.nodes)

    @property
    def one_node(self) -> bool:
        return len(set(self.nodes)) == 1

    def link(self, peer: int) -> str:
        """Name the link from this rank to ``peer``."""
        return "intra" if self.nodes[peer] == self.nodes[self.rank] else "inter"

    @functools.cached_property
    def peers(self) -> Counter[str]:
        """The number of other ranks by the link to them."""
        return Counter(self.link(peer) for peer in range(self.size) if peer != self.rank)

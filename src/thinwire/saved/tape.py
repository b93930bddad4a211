"""A replica's tape, for those that are about to join: its state after some step, and what it has heard since.

A replica that joins fetches the state while the others go on, and then takes their steps again, alone, from what all of
them received alike in each: the messages of a step are small, and its state is not.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

UNUSED_S = 60.0
"""Seconds after which a tape that nobody reads is dropped."""


@dataclass
class Entry:
    """A step that counted, as all replicas heard it.

    Attributes:
        membership: this rank, the nodes, the number and the names. step, skipped: steps taken, and skipped, before it.
        heard: what the verbs of the exchange returned on all ranks alike. groups: the settings of each optimizer's
            groups (lr, ...). clips: the calls of ``wire.clip_grad_norm_``. delivers: was it to deliver all that waits?
    """

    membership: tuple[int, tuple[int, ...], int, tuple[str, ...]]
    step: int
    skipped: int
    heard: list[Tensor | None] = field(default_factory=list)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    clips: list[tuple[float, float]] = field(default_factory=list)
    delivers: bool = False

    @property
    def whole(self) -> bool:
        """Has all arrived that was heard in it?"""
        return all(value is not None for value in self.heard)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.heard if value is not None)


class Tape:
    """The tape of one replica. The thread that trains adds to it; others read it.

    Attributes:
        clock: votes that have counted in this process. refuses: was there no state for who wanted it last?
    """

    def __init__(self) -> None:
        self.clock, self.refuses = 0, False
        self._snapshot: dict[str, Any] | None = None  # of ``Turnover.give``, with the clock
        self._limit = 0  # bytes of entries from which on a new one would be smaller
        self._entries: list[Entry] = []
        self._wanted: int | None = None
        self._used = 0.0
        self._changed = threading.Condition()

    @property
    def runs(self) -> bool:
        """Is what is heard in the next step to be kept?"""
        return self._snapshot is not None or self._wanted is not None

    # The thread that trains.

    def add(self, entry: Entry | None, give: Callable[[], Mapping[str, Any] | None]) -> None:
        """Note a vote that counted, and what was heard in it. ``give`` returns the state that somebody wants, if any.
        """
        with self._changed:
            self.clock += 1
            if self._snapshot is not None:
                self._entries += [] if entry is None else [entry]
                size = sum(later.nbytes for later in self._entries)
                if entry is None or size > self._limit or time.monotonic() - self._used > UNUSED_S:
                    self.cut()
            if self._wanted is not None and self.clock >= self._wanted:
                self._wanted = None
                state = give() if self._snapshot is None else None
                self.refuses = self._snapshot is None and state is None
                if state is not None:
                    self._snapshot, self._entries = {**state, "clock": self.clock}, []
                    self._limit = sum(x.nbytes for x in tree_leaves(self._snapshot) if isinstance(x, Tensor))
            self._changed.notify_all()

    def cut(self) -> None:
        """Drop all, as this replica's state is another one now."""
        with self._changed:
            self._snapshot, self._entries = None, []

    # Those that read.

    def touch(self) -> None:
        """Note that somebody reads."""
        self._used = time.monotonic()

    def want(self, clock: int) -> None:
        """Ask for the state after ``clock`` votes, or as soon as there may be one."""
        with self._changed:
            self.touch()
            if self._snapshot is None and not self.refuses:
                self._wanted = clock if self._wanted is None else min(self._wanted, clock)

    def snapshot(self, clock: int, patience: float) -> dict[str, Any] | None:
        """Return the state after ``clock`` votes, or another; None: there is none within ``patience`` seconds."""
        self.want(clock)
        with self._changed:
            self._changed.wait_for(lambda: self._snapshot is not None or self.refuses, patience)
            self.touch()
            return self._snapshot

    def since(self, begun: int, first: int) -> list[Entry] | None:
        """Return the entries from number ``first`` on of those after the state of clock ``begun``; None: it is gone."""
        with self._changed:
            self.touch()
            if self._snapshot is None or self._snapshot["clock"] != begun:
                return None
            return list(itertools.takewhile(lambda entry: entry.whole, self._entries[first:]))

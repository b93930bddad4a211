"""What the ranks do together beside the training itself: files, over which one of them may stumble or take its time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from thinwire.comm import Comm
from thinwire.errors import LostRank, ThinwireError

T = TypeVar("T")

CHUNK = 1 << 24
"""Bytes of a file that travel at a time."""


class Elsewhere(ThinwireError):
    """Another rank has met trouble; the message names it."""


class Together:
    """All ranks of a job, on a group of CPU tensors whose collectives wait for a rank that is busy with files.

    Every method is collective.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def tell(self, mine: Any) -> list[Any]:
        """Everybody's ``mine`` (what JSON can say), in rank order."""
        words = bytearray(json.dumps(mine).encode())
        lengths = torch.zeros(self.size, 1, dtype=torch.int64)
        self._comm.all_gather(lengths, torch.tensor([len(words)]))
        row = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        row[: len(words)] = torch.frombuffer(words, dtype=torch.uint8)
        rows = torch.zeros(self.size, len(row), dtype=torch.uint8)
        self._comm.all_gather(rows, row)
        return [json.loads(said[:length].numpy().tobytes()) for said, length in zip(rows, lengths[:, 0], strict=True)]

    def do(self, work: Callable[[], T]) -> T:
        """``work()`` on this rank, once all ranks' has succeeded.

        Raises:
            Elsewhere: it failed on another rank. Where it failed here, what it raised (an OSError as one line). So no
                rank goes on alone, nor waits for one that is gone.
        """
        return self._agreed(work, lambda done: None)[0]

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """What ``work()`` returned on each rank (what JSON can say), in rank order. Raises as ``do``."""
        return self._agreed(work, lambda done: done)[1]

    def _agreed(self, work: Callable[[], T], shown: Callable[[T], Any]) -> tuple[T, list[Any]]:
        error: Exception | None = None
        try:
            done = work()
            mine = {"done": shown(done)}
        except LostRank:  # there is nobody to tell
            raise
        except Exception as caught:
            error = in_one_line(caught)
            kind = "" if isinstance(error, ThinwireError) else f"{type(error).__name__}: "
            mine = {"error": kind + " ".join(str(error).split())}
        said = self.tell(mine)
        if error is not None:
            raise error
        for rank, words in enumerate(said):
            if "error" in words:
                raise Elsewhere(f"rank {rank}: {words['error']}")
        return done, [words["done"] for words in said]

    def copy(self, root: int, source: Path, target: Path | None) -> None:
        """Rank ``root``'s file ``source`` becomes ``target`` on every rank that names one, whole or not at all."""
        size = self.gather(lambda: source.stat().st_size if self.rank == root else 0)[root]
        with contextlib.ExitStack() as opened:

            def begin() -> tuple[BinaryIO | None, BinaryIO | None]:
                partial = None if target is None else target.with_name(f".{target.name}.partial")
                return (
                    opened.enter_context(source.open("rb")) if self.rank == root else None,
                    opened.enter_context(partial.open("wb")) if partial is not None else None,
                )

            reading, writing = self.do(begin)
            chunk = torch.zeros(min(CHUNK, size), dtype=torch.uint8)
            for start in range(0, size, CHUNK):
                chunk = chunk[: size - start].zero_()
                if reading is not None:  # should the file have shrunk, its checksums will say so
                    reading.readinto(chunk.numpy().data)  # type: ignore[attr-defined]
                self._comm.all_reduce(chunk, "max")
                if writing is not None:
                    self.do(functools.partial(writing.write, chunk.numpy().data))
                else:
                    self.do(lambda: None)

            def end() -> None:
                if writing is not None and target is not None:
                    writing.flush()
                    os.fsync(writing.fileno())
                    os.replace(writing.name, target)

            self.do(end)


def in_one_line(error: Exception) -> Exception:
    """What the disk says as one clear line; anything else as it is."""
    if not isinstance(error, OSError):
        return error
    where = f" {error.filename}" if error.filename else " a file"
    return ThinwireError(f"cannot use{where}: {error.strerror or error}")

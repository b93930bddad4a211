"""What the ranks do together beside the training itself: files, over which one of them may stumble or take its time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import torch

from thinwire.base.errors import LostRank, ThinwireError
from thinwire.base.files import in_one_line, naming
from thinwire.network.comm import Comm

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

            def open_(path: Path, mode: str) -> BinaryIO:
                file = cast(BinaryIO, path.open(mode))
                opened.callback(_close, file)
                return file

            def begin() -> tuple[BinaryIO | None, BinaryIO | None]:
                partial = None if target is None else target.with_name(f".{target.name}.partial")
                return (
                    open_(source, "rb") if self.rank == root else None,
                    open_(partial, "wb") if partial is not None else None,
                )

            reading, writing = self.do(begin)
            chunk = torch.zeros(0, dtype=torch.uint8)

            def write() -> None:
                if writing is not None and target is not None:
                    with naming(target):
                        writing.write(chunk.numpy().data)

            def turn(start: int) -> torch.Tensor:
                """What has come is written, what comes next is read: one agreement for both."""
                write()
                following = torch.zeros(min(CHUNK, size - start), dtype=torch.uint8)
                if reading is not None:  # should the file have shrunk, its checksums will say so
                    with naming(source):
                        reading.readinto(following.numpy().data)  # type: ignore[attr-defined]
                return following

            for start in range(0, size, CHUNK):
                chunk = self.do(functools.partial(turn, start))
                self._comm.all_reduce(chunk, "max")

            def end() -> None:
                write()
                if writing is not None and target is not None:
                    with naming(target):
                        writing.flush()
                        os.fsync(writing.fileno())
                        writing.close()
                    os.replace(writing.name, target)

            self.do(end)


def _close(file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # what the disk says of a file that is not finished has been said
        file.close()

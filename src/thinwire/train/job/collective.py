"""Work that the ranks do together beside the training itself: files, over which one of them may stumble or be slow."""

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


class FailedElsewhere(ThinwireError):
    """Another rank has met trouble; the message names it."""


class Collective:
    """All ranks of a job, on a group of CPU tensors whose collectives wait for a rank that is busy with files.

    Every method is collective.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def share(self, value: Any) -> list[Any]:
        """Give the ``value`` of every rank (what JSON can say), in rank order."""
        data = bytearray(json.dumps(value).encode())
        lengths = torch.zeros(self.size, 1, dtype=torch.int64)
        self._comm.all_gather(lengths, torch.tensor([len(data)]))
        row = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        rows = torch.zeros(self.size, len(row), dtype=torch.uint8)
        self._comm.all_gather(rows, row)
        return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths[:, 0], strict=True)]

    def do(self, work: Callable[[], T]) -> T:
        """Return what ``work()`` returned on this rank, once it has succeeded on all.

        Raises:
            FailedElsewhere: it failed on another rank. Where it failed here, what it raised (an OSError as one line).
                So no rank goes on alone, nor waits for one that is gone.
        """
        return self._agree(work, lambda result: None)[0]

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """Give what ``work()`` returned on each rank (what JSON can say), in rank order. Raises as ``do``."""
        return self._agree(work, lambda result: result)[1]

    def _agree(self, work: Callable[[], T], shown: Callable[[T], Any]) -> tuple[T, list[Any]]:
        error: Exception | None = None
        try:
            result = work()
            report = {"result": shown(result)}
        except LostRank:  # there is nobody to tell
            raise
        except Exception as caught:
            error = in_one_line(caught)
            kind = "" if isinstance(error, ThinwireError) else f"{type(error).__name__}: "
            report = {"error": kind + " ".join(str(error).split())}
        reports = self.share(report)
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if "error" in report:
                raise FailedElsewhere(f"rank {rank}: {report['error']}")
        return result, [report["result"] for report in reports]

    def copy(self, root: int, source: Path, target: Path | None) -> None:
        """Rank ``root``'s file ``source`` becomes ``target`` on every rank that names one, whole or not at all."""
        size = self.gather(lambda: source.stat().st_size if self.rank == root else 0)[root]
        partial = None if target is None else target.with_name(f".{target.name}.partial")
        with contextlib.ExitStack() as stack:
            reader = self.do(lambda: _open(source, "rb", stack) if self.rank == root else None)
            writer = self.do(lambda: None if partial is None else _open(partial, "wb", stack))

            def read(length: int) -> torch.Tensor:
                chunk = torch.zeros(length, dtype=torch.uint8)
                if reader is not None:  # should the file have shrunk, its checksums will say so
                    with naming(source):
                        reader.readinto(chunk.numpy().data)  # type: ignore[attr-defined]
                return chunk

            def write(chunk: torch.Tensor) -> None:
                if writer is not None and target is not None:
                    with naming(target):
                        writer.write(chunk.numpy().data)

            def finish() -> None:
                if writer is not None and target is not None:
                    with naming(target):
                        writer.flush()
                        os.fsync(writer.fileno())
                        writer.close()
                    os.replace(writer.name, target)

            for start in range(0, size, CHUNK):
                chunk = self.do(functools.partial(read, min(CHUNK, size - start)))
                self._comm.all_reduce(chunk, "max")
                self.do(functools.partial(write, chunk))
            self.do(finish)


def _open(path: Path, mode: str, stack: contextlib.ExitStack) -> BinaryIO:
    """Open a file until the end of ``stack``, where an error of the disk has been told of already."""
    file = cast(BinaryIO, path.open(mode))

    def close() -> None:
        with contextlib.suppress(OSError):
            file.close()

    stack.callback(close)
    return file

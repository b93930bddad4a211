"""Work that the ranks do together beside training: on files, with which one of them may fail or be slow."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

from thinwire.base.errors import LostRank, ThinwireError, in_words
from thinwire.base.files import in_one_line, naming, sync
from thinwire.network.comm import Comm

T = TypeVar("T")

CHUNK = 1 << 24  # bytes of a file sent at a time


class Collective:
    """All ranks, on a group of CPU tensors that waits for a rank busy with files. All methods are collective."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def share(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, which JSON can hold, in rank order."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, 1, dtype=torch.int64, device="cpu")
        self._comm.all_gather(lengths, torch.tensor([len(data)], device="cpu"))
        row = F.pad(data, (0, int(lengths.max()) - len(data)))
        rows = torch.zeros(self.size, len(row), dtype=torch.uint8, device="cpu")
        self._comm.all_gather(rows, row)
        return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths[:, 0], strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's ``value``, which JSON can hold."""
        data = json.dumps(value if self.rank == 0 else None).encode()
        row = torch.zeros(self.share(len(data))[0], dtype=torch.uint8, device="cpu")
        if self.rank == 0:
            row.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._comm.all_reduce(row, "max")
        return json.loads(row.numpy().tobytes())

    def do(self, work: Callable[[], T]) -> T:
        """Return what ``work()`` returned on this rank, once it has succeeded on all.

        Raises:
            ThinwireError: it failed on another rank. If it failed here, its own error (an OSError as one line). So no
                rank goes on alone, or waits for one that is gone.
        """
        error, line = None, None
        try:
            result = work()
        except LostRank:  # there is nobody to tell
            raise
        except Exception as caught:
            error = in_one_line(caught)
            line = " ".join(str(error).split()) if isinstance(error, ThinwireError) else in_words(error)
        lines = self.share(line)
        if error is not None:
            raise error
        for rank, line in enumerate(lines):
            if line is not None:
                raise ThinwireError(f"rank {rank}: {line}")
        return result

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """Return what ``work()`` returned on each rank, in rank order. Raise as ``do``."""
        return self.share(self.do(work))

    def copy(self, root: int, source: Path, target: Path | None) -> None:
        """Copy rank ``root``'s file ``source`` to ``target`` on every rank that names one, whole or not at all."""
        size = self.gather(lambda: source.stat().st_size if self.rank == root else 0)[root]
        writes = target is not None
        target = target or source
        partial = target.with_name(f".{target.name}.partial")

        def read(start: int) -> torch.Tensor:
            chunk = torch.zeros(min(CHUNK, size - start), dtype=torch.uint8, device="cpu")
            if self.rank == root:  # if the file has shrunk, its checksums will say so
                with naming(source), source.open("rb") as file:
                    file.seek(start)
                    file.readinto(chunk.numpy().data)
            return chunk

        def write(chunk: torch.Tensor) -> None:
            if writes:
                with naming(target), partial.open("ab") as file:
                    file.write(chunk.numpy().data)

        def finish() -> None:
            if writes:
                sync(partial)
                partial.replace(target)

        self.do(lambda: partial.write_bytes(b"") if writes else 0)
        for start in range(0, size, CHUNK):
            chunk = self.do(functools.partial(read, start))
            self._comm.all_reduce(chunk, "max")
            self.do(functools.partial(write, chunk))
        self.do(finish)

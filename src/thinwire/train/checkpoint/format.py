"""The format of a checkpoint on the disk: its ``meta.json``, and files of tensors with a checksum each."""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinwire.base import files
from thinwire.base.errors import ThinwireError
from thinwire.base.extras import save_file
from thinwire.base.terminal import say
from thinwire.train.job.run_folder import where_set_aside

T = TypeVar("T")

FORMAT = 2
MODEL = "model.safetensors"
WIRE = "wire/"
NAME = re.compile(r"step-\d+")
FILE = re.compile(r"[\w-]+\.safetensors")


def rank_file(rank: int) -> str:
    return f"rank-{rank:04d}.safetensors"


class Damaged(ThinwireError):
    """A checkpoint, or a file of one, that cannot be read back as it was written."""


class NoCheckpoint(Damaged):
    """There is no meta.json, which a checkpoint has."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk.

    Attributes:
        meta: format, run and save (ids of the run and of this save), step, sequences, good, world_size, files {name:
            bytes}, about (a description of the run: :mod:`thinwire.train.checkpoint.run_settings`), result (at the end
            of a run: its summary and report without the last evaluation; else None).
        holders: file -> the ranks that see it whole; {} if one process alone reads the checkpoint.
    """

    path: Path
    meta: dict[str, Any]
    holders: dict[str, list[int]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.meta["step"]

    @property
    def complete_files(self) -> list[str]:
        """Names of the files that are in this folder with their full size."""
        sizes = {path.name: path.stat().st_size for path in self.path.glob("*.safetensors")}
        return [name for name, size in self.meta["files"].items() if sizes.get(name) == size]


FIELDS = {
    "run": str, "save": str, "step": int, "sequences": int, "good": bool, "world_size": int, "files": dict,
    "about": dict,
}  # fmt: skip


def _has_our_fields(meta: dict[str, Any]) -> bool:
    """Check the fields of meta.json against what we write: a tool that edited it, or a bug, may have written others."""
    if any(type(meta.get(name)) is not kind for name, kind in FIELDS.items()):
        return False
    files, facts = meta["files"], meta["about"]
    counts = [meta["step"], meta["sequences"], meta["world_size"] - 1, *files.values()]
    texts = [facts.get("mesh"), facts.get("method")]  # readers parse these two; they only compare and show the others
    return (
        all(type(count) is int and 0 <= count < 2**63 for count in counts)
        and all(isinstance(text, str) and text.split() for text in texts)
        and bool(files)
        and all(map(FILE.fullmatch, files))
    )


def read_meta(path: Path) -> Checkpoint:
    """Read the meta.json of the checkpoint in ``path``.

    Raises:
        NoCheckpoint: there is none.
        Damaged: it is damaged, or of another format.
    """
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpoint(no_meta(path)) from None
    except OSError as error:
        raise Damaged(f"cannot read {path / 'meta.json'}: {error.strerror}") from None
    except (ValueError, RecursionError):  # no JSON, or no text
        raise Damaged(f"{path / 'meta.json'} is damaged: it is not JSON") from None
    if not isinstance(meta, dict) or "format" not in meta:
        raise Damaged(f"{path / 'meta.json'} is damaged: it is not that of a checkpoint")
    if (written := meta["format"]) != FORMAT:
        maker = "an earlier" if isinstance(written, int) and written < FORMAT else "another"
        raise Damaged(f"{path} was made by {maker} version of Thinwire, in format {written}; this one reads {FORMAT}")
    if meta.pop("crc32", None) != _crc_of_meta(meta):
        raise Damaged(f"{path / 'meta.json'} is damaged: its checksum does not fit")
    if not _has_our_fields(meta):
        raise Damaged(f"{path / 'meta.json'} was not written by Thinwire: its checksum is right, its fields are not")
    return Checkpoint(path, meta)


def is_good(path: Path) -> bool:
    try:
        return read_meta(path).meta["good"]
    except Damaged:
        return False


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def checkpoint_names(path: Path) -> list[str]:
    """List the names of the checkpoints in ``path``, by step."""
    return sorted((folder.name for folder in path.glob("step-*") if NAME.fullmatch(folder.name)), key=step_of)


def read_newest(path: Path, read: Callable[[Checkpoint], T]) -> tuple[T, bool]:
    """Apply ``read`` to the checkpoint in the folder ``path``, or to the newest good one of the run in ``path``.

    Return what ``read`` returns, and whether damaged checkpoints were passed over (each with a line on standard error).

    Raises:
        NoCheckpoint: there is none, or none that is good.
        Damaged: no checkpoint can be read.
    """
    errors: list[Damaged] = []
    spoilt: list[Path] = []
    for folder in (path / "checkpoints", path):
        for name in reversed(checkpoint_names(folder)):
            try:
                checkpoint = read_meta(folder / name)
                if not checkpoint.meta["good"]:
                    spoilt.append(checkpoint.path)
                    continue
                result = read(checkpoint)
            except Damaged as error:
                errors.append(error)
                continue
            for damaged in errors:
                say(f"thinwire: {damaged}: passed over", sys.stderr)
            return result, bool(errors)
    if errors:
        raise errors[0]
    if spoilt:
        raise NoCheckpoint(
            f"{path} has no good checkpoint: steps were skipped, or the loss was not finite, when each was saved; "
            f"the newest is {spoilt[0]}"
        )
    return read(read_meta(path)), False


def no_meta(path: Path) -> str:
    inside = f"; its run's are in {path / 'checkpoints'}" if checkpoint_names(path / "checkpoints") else ""
    return f"{path} is not a checkpoint: it has no meta.json{where_set_aside(path)}{inside}"


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    files.write(path / "meta.json", json.dumps(meta | {"crc32": _crc_of_meta(meta)}, indent=2) + "\n")


def _crc_of_meta(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _crc(name: str, tensor: Tensor) -> int:
    """Compute the checksum of a CPU tensor's name, dtype, shape and bytes."""
    start = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, start)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> int:
    """Write a file of tensors with their checksums; return its size in bytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sums = {name: _crc(name, tensor) for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"crc32": json.dumps(sums)})
    files.sync(path)
    return path.stat().st_size


def read_tensors(path: Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, CPU tensor) for each name in ``path`` that begins with ``prefix``; compare each checksum.

    Raises:
        Damaged: the file is missing, truncated, foreign, or one of these tensors is not what was written.
    """
    try:
        with safe_open(path, "pt") as file:
            sums = json.loads((file.metadata() or {}).get("crc32", "null"))
            if not isinstance(sums, dict) or set(sums) != set(file.keys()):
                raise Damaged(f"{path} is damaged, or not of Thinwire: its list of checksums is wrong")
            for name in sorted(name for name in sums if name.startswith(prefix)):
                tensor = file.get_tensor(name)
                if _crc(name, tensor) != sums[name]:
                    raise Damaged(f"{path} is damaged: the checksum of {name} does not fit")
                yield name, tensor
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except OSError as error:
        raise Damaged(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError) as error:
        raise Damaged(f"{path} is damaged, or no safetensors file: {' '.join(str(error).split())[:100]}") from None


class States(Mapping[str, Tensor]):
    """The method's states of all ranks of a whole checkpoint, by key. Each lookup reads the file."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._path: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, "pt") as file:
                names = file.keys()
            self._path |= {name.removeprefix(WIRE): path for name in names if name.startswith(WIRE)}

    def __getitem__(self, key: str) -> Tensor:
        return dict(read_tensors(self._path[key], WIRE + key))[WIRE + key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._path)

    def __len__(self) -> int:
        return len(self._path)

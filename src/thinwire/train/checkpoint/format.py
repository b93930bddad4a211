"""The format of a checkpoint on the disk: its ``meta.json``, and files of tensors with a checksum each."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinwire.base import files
from thinwire.base.errors import ThinwireError
from thinwire.base.extras import save_file

T = TypeVar("T")

FORMAT = 2
MODEL = "model.safetensors"
WIRE = "wire/"
NAME = re.compile(r"step-(\d+)")
FILE = re.compile(r"[\w-]+\.safetensors")


def rank_file(rank: int) -> str:
    """Name the file of what rank ``rank`` alone has."""
    return f"rank-{rank:04d}.safetensors"


class Damaged(ThinwireError):
    """A checkpoint, or a file of one, that cannot be read back as it was written."""


class NoCheckpoint(Damaged):
    """There is no meta.json, which a checkpoint has."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that exists, by its meta.json.

    Attributes:
        meta: format, run and save (what tells two runs, and two saves, apart), step, sequences, good, world_size,
            files {name: bytes}, about (what the run is: :mod:`thinwire.train.checkpoint.run_settings`).
    """

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        return self.meta["step"]

    @property
    def complete_files(self) -> list[str]:
        """Names of its files that this folder has, and has whole."""
        sizes = {path.name: path.stat().st_size for path in self.path.glob("*.safetensors")}
        return [name for name, size in self.meta["files"].items() if sizes.get(name) == size]


def _is_count(value: Any, minimum: int = 0) -> bool:
    return type(value) is int and minimum <= value < 2**63


def _is_list_of_files(value: Any) -> bool:
    names = value if isinstance(value, dict) else {}
    return bool(names) and all(FILE.fullmatch(name) and _is_count(size) for name, size in names.items())


def _is_description(value: Any) -> bool:
    """Is this the description of a run? The entries that readers look into are text; others they compare and show."""
    if not isinstance(value, dict):
        return False
    mesh, method = value.get("mesh"), value.get("method")
    return isinstance(mesh, str) and bool(mesh.split()) and isinstance(method, str)


FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "run": (lambda value: isinstance(value, str), "text"),
    "save": (lambda value: isinstance(value, str), "text"),
    "step": (_is_count, "number of steps"),
    "sequences": (_is_count, "number of sequences"),
    "good": (lambda value: isinstance(value, bool), "yes or no"),
    "world_size": (lambda value: _is_count(value, 1), "number of ranks"),
    "files": (_is_list_of_files, "list of files and their sizes"),
    "about": (_is_description, "description of a run"),
}
"""Fields of meta.json, a check of each and its name: a tool that edited it, or a bug, may have written others."""


def read_meta(path: Path) -> Checkpoint:
    """Read the meta.json of the checkpoint in ``path``.

    Raises:
        NoCheckpoint: there is none.
        Damaged: the meta.json is damaged, or of another format.
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
    for field, (fits, kind) in FIELDS.items():
        if field not in meta or not fits(meta[field]):
            raise Damaged(f"{path / 'meta.json'} is not as Thinwire writes it: {field} is no {kind}")
    return Checkpoint(path, meta)


def is_good(path: Path) -> bool:
    try:
        return read_meta(path).meta["good"]
    except Damaged:
        return False


def step_of(name: str) -> int:
    match = NAME.fullmatch(name)
    return int(match[1]) if match else -1


def checkpoint_names(path: Path) -> list[str]:
    """List the names of the checkpoints in ``path``, by step."""
    return sorted((folder.name for folder in path.glob("step-*") if NAME.fullmatch(folder.name)), key=step_of)


def read_newest(path: Path, read: Callable[[Checkpoint], T]) -> tuple[T, list[str]]:
    """``read`` the checkpoint in the folder ``path``, or the newest good one of the run in it.

    Returns:
        what ``read`` does, and a line for each damaged checkpoint of the run, which was passed over.

    Raises:
        NoCheckpoint: there is none.
        Damaged: no checkpoint can be read.
    """
    errors: list[Damaged] = []
    for folder in (path / "checkpoints", path):
        for name in reversed(checkpoint_names(folder)):
            try:
                checkpoint = read_meta(folder / name)
                if checkpoint.meta["good"]:
                    return read(checkpoint), [str(error) for error in errors]
            except Damaged as error:
                errors.append(error)
    if errors:
        raise errors[0]
    return read(read_meta(path)), []


def no_meta(path: Path) -> str:
    return f"{path} is not a checkpoint: it has no meta.json"


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    files.write(path / "meta.json", json.dumps(meta | {"crc32": _crc_of_meta(meta)}, indent=2) + "\n")


def _crc_of_meta(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _crc(name: str, tensor: Tensor) -> int:
    """Compute the checksum of a CPU tensor's name, dtype, shape and bytes."""
    start = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, start)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sums = {name: _crc(name, tensor) for name, tensor in tensors.items()}
    try:
        save_file(tensors, path, metadata={"crc32": json.dumps(sums)})
    except SafetensorError as error:
        raise ThinwireError(f"cannot write {path}: {' '.join(str(error).split())}") from None
    files.sync(path)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Any, dict[str, int]]]:
    """Open a file of tensors, and give their checksums by name. Raises Damaged for errors inside the block, too."""
    try:
        with safe_open(path, "pt") as file:
            sums = json.loads((file.metadata() or {}).get("crc32", "null"))
            if not isinstance(sums, dict) or set(sums) != set(file.keys()):
                raise Damaged(f"{path} is damaged or foreign: its list of checksums does not fit")
            yield file, sums
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except OSError as error:
        raise Damaged(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError) as error:
        raise Damaged(f"{path} is damaged or foreign: {' '.join(str(error).split())[:100]}") from None


def read_tensors(path: Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in ``path`` whose name has this ``prefix``, on the CPU, with their checksums compared.

    Raises:
        Damaged: the file is missing, truncated, foreign, or one of these tensors is not what was written.
    """
    with _open(path) as (file, sums):
        for name in sorted(name for name in sums if name.startswith(prefix)):
            yield name, _checked(path, name, file.get_tensor(name), sums)


def _checked(path: Path, name: str, tensor: Tensor, sums: dict[str, int]) -> Tensor:
    if _crc(name, tensor) != sums[name]:
        raise Damaged(f"{path} is damaged: the checksum of {name} does not fit")
    return tensor


class States(Mapping[str, Tensor]):
    """The method's states of all ranks of a checkpoint, by key: read when they are looked up."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._path: dict[str, Path] = {}
        for path in paths:
            with _open(path) as (_, sums):
                self._path |= {name.removeprefix(WIRE): path for name in sums if name.startswith(WIRE)}

    def __getitem__(self, key: str) -> Tensor:
        path, name = self._path[key], WIRE + key
        with _open(path) as (file, sums):
            return _checked(path, name, file.get_tensor(name), sums)

    def __iter__(self) -> Iterator[str]:
        return iter(self._path)

    def __len__(self) -> int:
        return len(self._path)

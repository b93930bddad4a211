"""Checkpoints that resume a run bit for bit: safetensors, no pickle, written whole or not at all.

    DIR/checkpoints/step-000100/   meta.json   model.safetensors (DDP)   rank-0000.safetensors ...
    DIR/checkpoints/latest         the name of the newest that is good to go on from

Each rank's file holds what differs by rank: the method's state, and under FSDP2 and HSDP the shards of weights and
moments. Where ranks have folders of their own (hosts without a shared one), each folder holds meta.json, the model's
file and the files of its own ranks.

Every tensor has a checksum in its file's metadata, meta.json one of its own, and both are compared when they are read.
A folder is written under a hidden name, brought to the disk, and then renamed; it is removed in the reverse order. So a
kill at any moment leaves every visible checkpoint whole.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from thinwire.comm import local
from thinwire.errors import ThinwireError, ThinwireWarning
from thinwire.plan import bare_name
from thinwire.train import differences
from thinwire.train import folder as files
from thinwire.train.folder import Folder
from thinwire.wire import Wire

T = TypeVar("T")

FORMAT = 2
Resize = Literal["flush", "redistribute", "reset"]
MODEL = "model.safetensors"
_WIRE = "wire/"
_NAME = re.compile(r"step-(\d+)")


def rank_file(rank: int) -> str:
    """The file of what rank ``rank`` alone has."""
    return f"rank-{rank:04d}.safetensors"


class Damaged(ThinwireError):
    """A checkpoint, or a file of one, that cannot be read back as it was written."""


class NoCheckpoint(Damaged):
    """There is no meta.json, which a checkpoint has."""


@dataclass(frozen=True)
class Checkpoint:
    """One that is there, by its meta.json.

    Attributes:
        meta: format, run and save (what tells two runs, and two saves, apart), step, sequences, good, world_size,
            files {name: bytes}, about (what the run is: :mod:`thinwire.train.differences`).
    """

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        return self.meta["step"]

    @property
    def here(self) -> list[str]:
        """Those of its files that this folder has, and has whole."""
        sizes = {path.name: path.stat().st_size for path in self.path.glob("*.safetensors")}
        return [name for name, size in self.meta["files"].items() if sizes.get(name) == size]


def read_meta(path: Path) -> Checkpoint:
    """The checkpoint in ``path``.

    Raises:
        NoCheckpoint: there is none.
        Damaged: its meta.json is damaged, or of another format.
    """
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpoint(_no_meta(path)) from None
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
    return Checkpoint(path, meta)


def of(place: Path, read: Callable[[Checkpoint], T]) -> tuple[T, list[str]]:
    """``read`` of the checkpoint in the folder ``place``, or of the newest good one of the run that is there.

    Of a run's those that are damaged are passed over: with what is wrong with each, a line.

    Raises:
        NoCheckpoint: there is none.
        Damaged: nothing that is there can be read.
    """
    wrong: list[Damaged] = []
    for folder in (place / "checkpoints", place):
        for name in reversed(steps_in(folder)):
            try:
                found = read_meta(folder / name)
                if found.meta["good"]:
                    return read(found), [str(error) for error in wrong]
            except Damaged as error:
                wrong.append(error)
    if wrong:
        raise wrong[0]
    return read(read_meta(place)), []


def _no_meta(path: Path) -> str:
    return f"{path} is not a checkpoint: it has no meta.json"


def _write_meta(path: Path, meta: dict[str, Any]) -> None:
    files.write(path / "meta.json", json.dumps(meta | {"crc32": _crc_of_meta(meta)}, indent=2) + "\n")


def _crc_of_meta(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _crc(name: str, tensor: Tensor) -> int:
    """Of a CPU tensor's name, dtype, shape and bytes."""
    about = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, about)


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sums = {name: _crc(name, tensor) for name, tensor in tensors.items()}
    try:
        save_file(tensors, path, metadata={"crc32": json.dumps(sums)})
    except SafetensorError as error:
        raise ThinwireError(f"cannot write {path}: {' '.join(str(error).split())}") from None
    files.sync(path)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Any, dict[str, int]]]:
    """A file of tensors, and their checksums by name. Raises Damaged for what goes wrong in the block, too."""
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


def read_tensors(path: Path, begins: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in ``path`` whose name ``begins`` so, one by one, on the CPU, with their checksums compared.

    Raises:
        Damaged: the file is missing, truncated, foreign, or one of these tensors is not what was written.
    """
    with _open(path) as (file, sums):
        for name in sorted(name for name in sums if name.startswith(begins)):
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
                self._path |= {name.removeprefix(_WIRE): path for name in sums if name.startswith(_WIRE)}

    def __getitem__(self, key: str) -> Tensor:
        path, name = self._path[key], _WIRE + key
        with _open(path) as (file, sums):
            return _checked(path, name, file.get_tensor(name), sums)

    def __iter__(self) -> Iterator[str]:
        return iter(self._path)

    def __len__(self) -> int:
        return len(self._path)


@dataclass(frozen=True)
class Seen:
    """A checkpoint as all ranks together see it: who of them holds which of its files."""

    name: str
    meta: dict[str, Any]
    holders: dict[str, list[int]]

    @property
    def step(self) -> int:
        return self.meta["step"]


@dataclass
class Resumed:
    """A checkpoint to go on from, and what of it this rank takes: its own tensors, and those that all have alike.

    Attributes:
        resize: what becomes of what waits on the ranks of the checkpoint, where they are not those of this run; None:
            they are. Then nothing is read before ``put_back``.
    """

    checkpoint: Checkpoint
    own: dict[str, Tensor]
    common: dict[str, Tensor]
    resize: Resize | None = None

    def put_back(self, *, model: nn.Module, optimizer: torch.optim.Optimizer, wire: Wire) -> None:
        """Weights, moments and the method's state are as they were.

        Raises:
            ThinwireError: they are not those of this model.
        """
        path, named = self.checkpoint.path, _named(model)
        missing = set(named)
        with torch.no_grad():
            for name, saved in whole(self.checkpoint) if self.resize else (self.common or self.own).items():
                kind, _, key = name.partition("/")
                if kind == "wire":
                    continue
                key, _, moment = key.rpartition("/") if kind == "optimizer" else (key, "", "")
                if key not in named:
                    raise ThinwireError(f"{path} holds {key}, which this model has not")
                parameter = named[key]
                if kind == "optimizer":
                    optimizer.state[parameter][moment] = self._like(saved, parameter)
                    continue
                needed = parameter.shape if self.resize else local(parameter).shape
                if saved.shape != needed:
                    raise ThinwireError(
                        f"{path}: {key} has shape {tuple(saved.shape)}, this model needs {tuple(needed)}"
                    )
                local(parameter).copy_(local(self._like(saved, parameter)))
                missing.remove(key)
        if missing:
            raise ThinwireError(f"{path} holds no {min(missing)}, which this model has")
        if self.resize:
            ranks = range(self.checkpoint.meta["world_size"])
            wire.load_state_dict(States(path / rank_file(rank) for rank in ranks), resize=self.resize)
            return
        own = {name.removeprefix(_WIRE): value for name, value in self.own.items() if name.startswith(_WIRE)}
        wire.load_state_dict(own)

    def _like(self, saved: Tensor, parameter: nn.Parameter) -> Tensor:
        """A weight or a moment as ``parameter`` is held; a scalar (AdamW's step count) stays on the CPU."""
        if saved.dim() == 0:
            return saved
        saved = saved.to(parameter.device)
        if not isinstance(parameter, DTensor):
            return saved
        mesh, placements = parameter.device_mesh, parameter.placements
        if self.resize:  # each rank has all of it, and keeps its part
            return DTensor.from_local(saved, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
                placements=placements
            )
        return DTensor.from_local(
            saved, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )


def whole(
    checkpoint: Checkpoint, kinds: Iterable[str] = ("model/", "optimizer/")
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Weights ("model/NAME") and moments ("optimizer/NAME/KIND"), one by one, whatever engine they were sharded by.

    Shards of FSDP2 lie side by side along dim 0; of HSDP's copies the first is read.
    """
    files = [checkpoint.path / MODEL]
    if MODEL not in checkpoint.meta["files"]:
        share = int(checkpoint.meta["about"]["mesh"].split()[0])
        files = [checkpoint.path / rank_file(rank) for rank in range(share)]
    for begins in kinds:
        for parts in zip(*(read_tensors(path, begins) for path in files), strict=True):
            (name, first), *rest = parts
            if any(other != name for other, _ in rest):
                raise Damaged(f"{checkpoint.path}: the ranks' files do not hold the same tensors")
            yield name, torch.cat([first, *(part for _, part in rest)]) if rest and first.dim() else first


class Checkpoints:
    """The checkpoints of one run, in ``folder``/checkpoints. The methods are collective.

    Attributes:
        run: tells this run's checkpoints from those of others in the same folder.
        latest: the name of the newest good one that this run has written, or goes on from; "" while there is none.
    """

    def __init__(
        self, folder: Folder, about: dict[str, Any], *, keep: int, anyway: bool = False, resize: Resize | None = None
    ) -> None:
        """``about``: what the run is. ``anyway``, ``resize``: which differences are let pass when it goes on."""
        self.folder, self.together, self.keep = folder, folder.together, keep
        self.about, self.anyway, self.resize = about, anyway, resize
        self.path = folder.path / "checkpoints"
        self.run = self.together.tell(uuid.uuid4().hex)[0]
        self.latest = ""

    def save(
        self, step: int, sequences: int, *, model: nn.Module, optimizer: torch.optim.Optimizer, wire: Wire,
        good: bool = True,
    ) -> Path:  # fmt: skip
        """Write the checkpoint of ``step``, and remove those of this run that are not among the newest ``keep``.

        One that is not ``good`` (the run diverges) is marked so: it replaces no other, and ``latest`` does not name it.
        Where a good one of the same step is there it is not written.
        ``sequences``: of the shuffled text that all ranks together have trained on.

        Raises:
            ThinwireError: on all ranks, with what kept one of them from writing. Older checkpoints are as they were.
        """
        together, rank = self.together, self.together.rank
        final = self.path / f"step-{step:06d}"
        partial = self.path / f".{final.name}.partial"
        if not good and any(together.gather(lambda: _is_good(final))):
            return final
        own, common = _tensors(model, optimizer, wire)

        def write() -> dict[str, int]:
            wrote = {rank_file(rank): own} | ({MODEL: common} if common and self.folder.first else {})
            for name, tensors in wrote.items():
                _write(tensors, partial / name)
            return {name: (partial / name).stat().st_size for name in wrote}

        def seal() -> None:
            meta = {
                "format": FORMAT, "run": self.run, "save": save, "step": step, "sequences": sequences,
                "good": good, "world_size": together.size, "files": dict(sorted(sizes.items())), "about": self.about,
            }  # fmt: skip
            _write_meta(partial, meta)

        def publish() -> None:
            if final.exists():
                files.remove(final)
            partial.rename(final)
            files.sync(self.path)

        try:
            self.folder.by_first(lambda: _fresh(partial))
            sizes = {name: size for wrote in together.gather(write) for name, size in wrote.items()}
            save = together.tell(uuid.uuid4().hex)[0]
            self.folder.by_first(seal)
        except BaseException:
            if self.folder.first and partial.exists():
                files.remove(partial)
            raise
        self.folder.by_first(publish)
        self.folder.by_first(lambda: self._tidy(final.name, good))  # when all hosts have theirs
        self.latest = final.name if good else self.latest
        return final

    def _tidy(self, newest: str, good: bool) -> None:
        if good:
            files.write(self.path / "latest", newest + "\n")
        there = {}
        for name in steps_in(self.path):
            with contextlib.suppress(Damaged):  # of which nobody can tell whose it is: it stays
                meta = read_meta(self.path / name).meta
                if meta["run"] == self.run:
                    there[name] = meta["good"]
        for old in obsolete(there, newest, self._pointer(), self.keep):
            files.remove(self.path / old)

    def find(self, resume: str) -> Resumed | None:
        """What ``--resume`` means: "auto", "latest" or a checkpoint's folder; its files are read. None: start afresh.

        "auto" and "latest" take the newest that is whole where what ``latest`` names is not, and say so. What else is
        another than in the checkpoint, and may be, is said too.

        Raises:
            ThinwireError: there is no such checkpoint, nothing that is there can be used, or it is not of such a run.
        """
        newest = resume in ("auto", "latest")
        ours = newest or any(self.together.gather(lambda: Path(resume).parent.resolve() == self.path.resolve()))
        if not ours:  # before a host that lacks the checkpoint gets a copy
            self.folder.check_free()
        resumed = self._newest(resume) if newest else self._given(Path(resume))
        if resumed is not None:
            if ours:
                self.run, self.latest = resumed.checkpoint.meta["run"], resumed.checkpoint.path.name
            differ = differences.compare(resumed.checkpoint.meta["about"], self.about, anyway=True, resize=self.resize)
            if differ and self.together.rank == 0:
                line = f"going on, but not bit for bit as the run would have: {differ}"
                warnings.warn(line, ThinwireWarning, stacklevel=2)
        return resumed

    def _given(self, path: Path) -> Resumed:
        found, wrong = self._look(lambda: [path])
        damaged = [line for line in wrong if line != _no_meta(path)]
        if damaged or not found:
            raise Damaged([*damaged, *wrong][0])
        if len(found) > 1:
            raise ThinwireError(f"{path} is not the same checkpoint on all ranks")
        return self._read(found[0], path)

    def _newest(self, resume: str) -> Resumed | None:
        found, wrong = self._look(lambda: [self.path / name for name in steps_in(self.path)])
        pointers = self.together.gather(self._pointer)
        wrong += [
            f"{self.path / 'latest'} names {name}, which is not there"
            for name in sorted({name for name in pointers if name} - {seen.name for seen in found})
        ]
        if None in pointers:
            wrong.append(f"{self.path / 'latest'} is damaged")
        good = [seen for seen in found if seen.meta["good"]]
        # What ``latest`` names comes first: beyond it may be a future that the run has gone back from.
        for seen in sorted(good, key=lambda seen: (seen.name in pointers, seen.step), reverse=True):
            try:
                resumed = self._read(seen, self.path / seen.name)
            except Damaged as error:
                wrong.append(str(error))
                continue
            if wrong and self.together.rank == 0:
                line = f"{'; '.join(wrong)}: going on from {resumed.checkpoint.path}"
                warnings.warn(line, ThinwireWarning, stacklevel=2)
            return resumed
        if wrong:
            raise ThinwireError(f"no checkpoint in {self.path} can be used: {'; '.join(wrong)}")
        if resume == "auto" and not found:
            return None
        why = " but such as were taken while the run diverged; --overwrite starts afresh" if found else ""
        raise ThinwireError(f"there is no checkpoint in {self.path} to resume from{why}")

    def _look(self, paths: Callable[[], Iterable[Path]]) -> tuple[list[Seen], list[str]]:
        """What all ranks see of the checkpoints in ``paths()``, and what is wrong with the others."""

        def look() -> dict[str, list[Any]]:
            there: dict[str, list[Any]] = {"found": [], "wrong": []}
            for path in sorted(paths()):
                try:
                    checkpoint = read_meta(path)
                    there["found"].append([path.name, checkpoint.meta, checkpoint.here])
                except Damaged as error:
                    there["wrong"].append(str(error))
            return there

        found: dict[str, Seen] = {}
        wrong: dict[str, None] = {}
        for rank, there in enumerate(self.together.gather(look)):
            wrong.update(dict.fromkeys(there["wrong"]))
            for name, meta, here in there["found"]:
                seen = found.setdefault(meta["save"], Seen(name, meta, {file: [] for file in meta["files"]}))
                for file in here:
                    seen.holders[file].append(rank)
        return list(found.values()), list(wrong)

    def _read(self, seen: Seen, path: Path) -> Resumed:
        """This rank's part of a checkpoint, from ``path``, where what this folder lacks is brought from other ranks."""
        together, rank = self.together, self.together.rank
        differences.compare(seen.meta["about"], self.about, anyway=self.anyway, resize=self.resize)
        resize = self.resize if differences.moved(seen.meta["about"], self.about) else None
        lost = [file for file, holders in seen.holders.items() if not holders]
        if lost:
            raise Damaged(f"{path} is not whole: {lost[0]} is missing or has another size")
        own, common = rank_file(rank), [MODEL] if MODEL in seen.holders else []
        path = self._fetch(seen, path, list(seen.holders) if resize else [own, *common])
        checkpoint = Checkpoint(path, seen.meta)

        def read() -> Resumed:
            if resize:
                for file in seen.holders:
                    deque(read_tensors(path / file), maxlen=0)  # for the checksums' sake
                return Resumed(checkpoint, {}, {}, resize)
            tensors = {file: dict(read_tensors(path / file)) for file in [own, *common]}
            return Resumed(checkpoint, tensors[own], tensors.get(MODEL, {}))

        def tried() -> Resumed | Damaged:
            try:
                return read()
            except Damaged as error:
                return error

        found = together.do(tried)
        # Damage, of which all take an older one, is told apart from other trouble by all ranks or none.
        for rank, line in enumerate(together.tell(str(found) if isinstance(found, Damaged) else "")):
            if line:
                raise found if isinstance(found, Damaged) else Damaged(f"rank {rank}: {line}")
        assert isinstance(found, Resumed)
        return found

    def _fetch(self, seen: Seen, path: Path, needed: list[str]) -> Path:
        """Bring what the ranks of this folder need and it has not from ranks that have it. The folder that has it."""
        together, rank, homes = self.together, self.together.rank, self.folder.homes
        lacking = together.gather(lambda: [file for file in needed if rank not in seen.holders[file]])
        wanted = {(homes[rank], file) for rank, files in enumerate(lacking) for file in files}
        if not wanted:
            return path
        mine = sorted(file for home, file in wanted if home == rank)
        target = self.path / f".{seen.name}.partial" if mine and not path.exists() else path
        together.do(lambda: target.mkdir(parents=True, exist_ok=True) if mine else None)
        for file in sorted({file for _, file in wanted}):
            together.copy(min(seen.holders[file]), path / file, target / file if file in mine else None)

        def publish() -> None:
            if target != path:
                _write_meta(target, seen.meta)
                target.rename(self.path / seen.name)
                files.sync(self.path)

        together.do(publish)
        return path if path.exists() else self.path / seen.name

    def _pointer(self) -> str | None:
        """The name in ``latest``; "" where there is none, None where it is damaged."""
        try:
            name = (self.path / "latest").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""
        except (OSError, ValueError):
            return None
        return name if _NAME.fullmatch(name) else None


def _is_good(path: Path) -> bool:
    try:
        return read_meta(path).meta["good"]
    except Damaged:
        return False


def _fresh(path: Path) -> None:
    if path.exists():
        files.remove(path)
    path.mkdir(parents=True)


def _number(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1


def steps_in(path: Path) -> list[str]:
    """The names of the checkpoints in ``path``, by step."""
    return sorted((found.name for found in path.glob("step-*") if _NAME.fullmatch(found.name)), key=_number)


def obsolete(there: dict[str, bool], newest: str, latest: str | None, keep: int) -> list[str]:
    """Which checkpoints of a run to remove after ``newest`` was written: all but the ``keep`` newest good ones.

    ``there``: for each name, is it good? What is beyond ``newest`` belongs to a future that the run has gone back
    from, and goes once something good replaces it. Of those that are not good only ``newest`` stays. What ``latest``
    names always stays.
    """
    at = _number(newest)
    past = sorted((name for name, good in there.items() if good and _number(name) <= at), key=_number)
    beyond = [name for name, good in there.items() if good and _number(name) > at]
    kept = {newest, latest, *past[-keep:], *([] if there.get(newest) else beyond)}
    return [name for name in there if name not in kept]


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that are trained: others are what the run began with."""
    return {bare_name(name): weight for name, weight in model.named_parameters() if weight.requires_grad}


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, wire: Wire
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What this rank alone has, and what all have alike."""
    own = {_WIRE + key: value for key, value in wire.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for key, parameter in _named(model).items():
        tensors[f"model/{key}"] = local(parameter)
        for kind, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{kind}"] = local(value)
    return (own, tensors) if wire.engine.kind == "ddp" else (own | tensors, {})

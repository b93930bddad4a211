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
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.base import files
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.train.checkpoint import format as stored
from thinwire.train.checkpoint import run_settings as differences
from thinwire.train.checkpoint.format import Checkpoint, Damaged, rank_file, read_meta, read_tensors, steps_in
from thinwire.train.checkpoint.state import Resize, Resumed, tensors_of
from thinwire.train.job.run_folder import Folder
from thinwire.wire import Wire


@dataclass(frozen=True)
class Seen:
    """A checkpoint as all ranks together see it: who of them holds which of its files."""

    name: str
    meta: dict[str, Any]
    holders: dict[str, list[int]]

    @property
    def step(self) -> int:
        return self.meta["step"]


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
        if not good and any(together.gather(lambda: stored.is_good(final))):
            return final
        own, common = tensors_of(model, optimizer, wire)

        def write() -> dict[str, int]:
            wrote = {rank_file(rank): own} | ({stored.MODEL: common} if common and self.folder.first else {})
            for name, tensors in wrote.items():
                stored.write_tensors(tensors, partial / name)
            return {name: (partial / name).stat().st_size for name in wrote}

        def seal() -> None:
            meta = {
                "format": stored.FORMAT, "run": self.run, "save": save, "step": step, "sequences": sequences,
                "good": good, "world_size": together.size, "files": dict(sorted(sizes.items())), "about": self.about,
            }  # fmt: skip
            stored.write_meta(partial, meta)

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
        damaged = [line for line in wrong if line != stored.no_meta(path)]
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
        own, common = rank_file(rank), [stored.MODEL] if stored.MODEL in seen.holders else []
        path = self._fetch(seen, path, list(seen.holders) if resize else [own, *common])
        checkpoint = Checkpoint(path, seen.meta)

        def read() -> Resumed:
            if resize:
                for file in seen.holders:
                    deque(read_tensors(path / file), maxlen=0)  # for the checksums' sake
                return Resumed(checkpoint, {}, {}, resize)
            tensors = {file: dict(read_tensors(path / file)) for file in [own, *common]}
            return Resumed(checkpoint, tensors[own], tensors.get(stored.MODEL, {}))

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
                stored.write_meta(target, seen.meta)
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
        return name if stored.NAME.fullmatch(name) else None


def _fresh(path: Path) -> None:
    if path.exists():
        files.remove(path)
    path.mkdir(parents=True)


def obsolete(there: dict[str, bool], newest: str, latest: str | None, keep: int) -> list[str]:
    """Which checkpoints of a run to remove after ``newest`` was written: all but the ``keep`` newest good ones.

    ``there``: for each name, is it good? What is beyond ``newest`` belongs to a future that the run has gone back
    from, and goes once something good replaces it. Of those that are not good only ``newest`` stays. What ``latest``
    names always stays.
    """
    at = stored.number_in(newest)
    past = sorted((name for name, good in there.items() if good and stored.number_in(name) <= at), key=stored.number_in)
    beyond = [name for name, good in there.items() if good and stored.number_in(name) > at]
    kept = {newest, latest, *past[-keep:], *([] if there.get(newest) else beyond)}
    return [name for name in there if name not in kept]

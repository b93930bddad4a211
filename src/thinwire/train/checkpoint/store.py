"""Checkpoints that resume a run bit for bit: safetensors, no pickle, written whole or not at all.

    DIR/checkpoints/step-000100/   meta.json   model.safetensors (DDP)   rank-0000.safetensors ...
    DIR/checkpoints/latest         the name of the newest that is good to go on from

Each rank's file holds what differs by rank: the method's state, and under FSDP2 and HSDP the shards of weights and
moments. If hosts share no folder, each host's folder holds meta.json, the model's file and the files of its own ranks.

Every tensor has a checksum in its file's metadata, and meta.json has one too; readers compare both. A folder is written
under a hidden name, synced to the disk, and then renamed; removal goes in the reverse order. So a kill at any moment
leaves every visible checkpoint whole.

Replicas of an elastic run share a folder, and take turns, but one that was stopped in its save is not waited for, and
some file systems have no locks. So none counts on being alone. What others have saved since a process began is no
future that it has gone back from: it is not removed. Who writes ``latest`` looks into the folder afterwards, and writes
again if a newer one has come. This relies on atomic renames, and on a look that shows what was there before the own
last rename (as NFS does). While a process is stopped right before that look, or if it is killed there, ``latest`` may
be one behind until the next save, and ``--resume auto`` goes on from there: a lock would have to be waited for, and a
newer one may be a future that the run has gone back from. If ``latest`` names one that is gone, it takes the newest.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.base import files
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.train.checkpoint import format, run_settings
from thinwire.train.checkpoint.format import MODEL, Checkpoint, Damaged, rank_file, read_meta, step_of
from thinwire.train.checkpoint.state import Resize, ResumedState, collect_tensors
from thinwire.train.job.run_folder import RunFolder
from thinwire.wire import Wire


class Checkpoints:
    """The checkpoints of one run, in ``folder``/checkpoints. The methods are collective.

    Attributes:
        run: an id that tells this run's checkpoints from those of others in the same folder.
        latest: name of the newest good checkpoint that this run has written or resumed from; "" while there is none.
        _noted: ids of the saves that were here as this process began, and of its own; others are of other replicas.
    """

    def __init__(
        self, folder: RunFolder, description: dict[str, Any], *, keep: int, resume_anyway: bool = False,
        resize: Resize | None = None,
    ) -> None:  # fmt: skip
        """``resume_anyway`` and ``resize`` say which differences from ``description`` a checkpoint may have."""
        self.folder, self.collective, self.keep = folder, folder.collective, keep
        self.description, self.resume_anyway, self.resize = description, resume_anyway, resize
        self.path = folder.path / "checkpoints"
        self.run = self.collective.share(uuid.uuid4().hex)[0]
        self.latest = self._difference = ""
        self._noted = {meta["save"] for meta in self._metas().values()} if folder.is_keeper else set()

    def save(
        self, step: int, sequences: int, *, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], wire: Wire,
        good: bool = True, result: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Write the checkpoint of ``step``, and remove this run's obsolete ones.

        A checkpoint that is not ``good`` (the run diverges) replaces no good one, and ``latest`` does not name it.
        It is dropped, with a warning, if this process was stopped meanwhile, and another replica has saved this step or
        a later one. ``sequences`` counts those of the shuffled text that all ranks together have trained on.
        ``result``: what the run's last files say of its steps, where they are over.

        Raises:
            ThinwireError: on all ranks, with what kept one of them from writing. Older checkpoints are as they were.
        """
        collective, folder = self.collective, self.folder
        final, save = self.path / format.checkpoint_name(step), collective.share(uuid.uuid4().hex)[0]
        self._noted.add(save)
        partial = self.path / f".{final.name}.{save[:8]}.partial"
        if not good and any(collective.gather(lambda: format.is_good(final))):
            return
        of_rank, common = collect_tensors(model, optimizers, wire)

        def begin() -> None:
            self.path.mkdir(exist_ok=True)
            partial.mkdir()

        def write() -> dict[str, int]:
            tensors = {rank_file(collective.rank): of_rank} | ({MODEL: common} if common and folder.is_keeper else {})
            return {name: format.write_tensors(tensors[name], partial / name) for name in tensors}

        try:
            folder.do_once(begin)
            sizes = {name: size for written in collective.gather(write) for name, size in written.items()}
            meta = {
                "format": format.FORMAT, "run": self.run, "save": save, "step": step, "sequences": sequences,
                "good": good, "world_size": collective.size,
                "files": dict(sorted(sizes.items())), "about": self.description,
                "result": collective.share(result)[0],
            }  # fmt: skip
            folder.do_once(lambda: format.write_meta(partial, meta))
            newer = max(collective.gather(lambda: self._newer(step, self._metas()) if folder.is_keeper else ""))
            folder.do_once(lambda: shutil.rmtree(partial) if newer else self._publish(partial, final))
        except BaseException:
            if folder.is_keeper:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if newer:
            self._warn(f"the checkpoint of step {step} is dropped, as {newer} came while it was written")
        self.latest = newer or (final.name if good else self.latest)
        folder.do_once(lambda: self._tidy(step))  # only after all hosts have published theirs

    def _publish(self, partial: Path, final: Path) -> None:
        while True:
            self._remove(final.name)
            try:
                partial.rename(final)
                break
            except OSError as error:
                if error.errno not in files.IS_THERE:
                    raise
            if self._newer(step_of(final.name), self._metas()):
                shutil.rmtree(partial)  # another replica has saved this step right now
                break
        files.sync(self.path)

    def _tidy(self, step: int) -> None:
        """Point ``latest`` to the newest good checkpoint, and remove this run's obsolete ones from this folder."""
        metas = self._point()
        of_this_run = {name: meta["good"] for name, meta in metas.items() if meta["run"] == self.run}
        newest = self._newer(step, metas) or format.checkpoint_name(step)
        for name in obsolete(of_this_run, newest, self._read_latest(), self.keep):
            if step_of(name) < step or metas[name]["save"] in self._noted:
                self._noted.add(metas[name]["save"])
                self._remove(name)

    def _point(self) -> dict[str, dict[str, Any]]:
        """Point ``latest`` to the newest good checkpoint, if it is not lost; return what is in the folder then."""
        while True:  # until nobody has come between
            pointed, metas = self._read_latest(), self._metas()
            self.latest = self._newer(step_of(self.latest) if self.latest else 0, metas) or self.latest
            if pointed == self.latest or self.latest not in metas:
                return metas
            files.write(self.path / "latest", self.latest + "\n")

    def _metas(self) -> dict[str, dict[str, Any]]:
        """Read what is in this folder: the meta.json of each checkpoint that has a whole one, by name, by step."""
        metas = {}
        for name in format.checkpoint_names(self.path):
            with contextlib.suppress(Damaged):  # nobody can tell which run it belongs to: it stays
                metas[name] = read_meta(self.path / name).meta
        return metas

    def _is_news(self, meta: dict[str, Any]) -> bool:
        """Is it a good checkpoint of this run that another replica has saved since this process began?"""
        return meta["good"] and meta["run"] == self.run and meta["save"] not in self._noted

    def _newer(self, step: int, metas: dict[str, dict[str, Any]]) -> str:
        """Return the name of the newest that another replica has saved since, if it is of ``step`` or a later one."""
        return next((name for name in reversed(metas) if self._is_news(metas[name]) and step_of(name) >= step), "")

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, unless another replica has done so, or has put a new one into its place."""

        def is_new(path: Path) -> bool:
            with contextlib.suppress(Damaged):
                return self._is_news(read_meta(path).meta)
            return False

        with contextlib.suppress(FileNotFoundError):
            files.remove(self.path / name, is_new)

    def find(self, resume: str) -> ResumedState | None:
        """Read the checkpoint that ``--resume`` means: "auto", "latest" or a checkpoint's folder. None: start afresh.

        "auto" and "latest" pass over damaged checkpoints with a warning.

        Raises:
            ThinwireError: there is no such checkpoint, none can be used, or it is not of such a run.
        """
        newest = resume in ("auto", "latest")
        in_this_folder = newest or any(
            self.collective.gather(lambda: Path(resume).parent.resolve() == self.path.resolve())
        )
        if not in_this_folder:  # checked before a host that lacks the checkpoint gets a copy
            self.folder.check_free()
        state = self._find_newest(resume) if newest else self._read_named(Path(resume))
        if state is not None:
            meta = state.checkpoint.meta
            if in_this_folder:
                self.run, self.latest = meta["run"], state.checkpoint.path.name
                self._noted.add(meta["save"])
        return state

    def go_on(self) -> None:
        """Begin to go on from the checkpoint that ``find`` has read. Should this run be killed before it saves, the
        next one goes on from there, too, and not from a future that this one has gone back from. Settings that differ
        get a warning."""
        if self._difference:
            self._warn(f"going on, but not bit for bit as an uninterrupted run: {self._difference}")
        if self.latest:
            self.folder.do_once(self._point)

    def _warn(self, line: str) -> None:
        if self.collective.rank == 0:
            warnings.warn(line, ThinwireWarning, stacklevel=3)

    def _read_named(self, path: Path) -> ResumedState:
        candidates, errors = self._list_candidates(path.parent, path.name)
        damaged = [line for line in errors if line != format.no_meta(path)]
        if damaged or not candidates:
            raise Damaged([*damaged, *errors][0])
        if len(candidates) > 1:
            raise ThinwireError(f"{path} is another checkpoint on some ranks: let all ranks read the same folder")
        return self._read(candidates[0])

    def _find_newest(self, resume: str) -> ResumedState | None:
        candidates, errors = self._list_candidates(self.path)
        latest = self.collective.gather(self._read_latest)
        errors += [
            f"{self.path / 'latest'} names {name!r}, which is not there"
            for name in sorted({*latest} - {None} - {candidate.path.name for candidate in candidates})
        ]
        good = [candidate for candidate in candidates if candidate.meta["good"]]
        # The one that ``latest`` names comes first: later ones may be a future that the run has gone back from.
        for candidate in sorted(good, key=lambda it: (it.path.name in latest, it.step), reverse=True):
            try:
                state = self._read(candidate)
            except Damaged as error:
                errors.append(str(error))
                continue
            if errors:
                self._warn(f"{'; '.join(errors)}: going on from {state.checkpoint.path}")
            return state
        if errors:
            raise ThinwireError(f"no checkpoint in {self.path} can be used: {'; '.join(errors)}")
        if resume == "auto" and not candidates:
            self.folder.check_unfinished()
            return None
        but = ", only some that were saved while the run diverged; --overwrite starts afresh" if candidates else ""
        raise ThinwireError(f"there is no checkpoint in {self.path} to resume from{but}")

    def _list_candidates(self, folder: Path, only: str | None = None) -> tuple[list[Checkpoint], list[str]]:
        """List the checkpoints in ``folder`` (or ``only`` one) that any rank can read, and errors of the others."""

        def read_all() -> tuple[list[Any], list[str]]:
            readable, errors = [], []
            for name in format.checkpoint_names(folder) if only is None else [only]:
                try:
                    checkpoint = read_meta(folder / name)
                    readable.append([name, checkpoint.meta, checkpoint.complete_files])
                except Damaged as error:
                    errors.append(str(error))
            return readable, errors

        candidates: dict[str, Checkpoint] = {}
        all_errors: dict[str, None] = {}
        for rank, (readable, errors) in enumerate(self.collective.gather(read_all)):
            all_errors.update(dict.fromkeys(errors))
            for name, meta, complete in readable:
                fresh = Checkpoint(folder / name, meta, {file: [] for file in meta["files"]})
                candidate = candidates.setdefault(meta["save"], fresh)
                for file in complete:
                    candidate.holders[file].append(rank)
        return list(candidates.values()), list(all_errors)

    def _read(self, checkpoint: Checkpoint) -> ResumedState:
        """Read this rank's tensors of a checkpoint; ranks that have a file copy it to those that lack it."""
        collective, holders = self.collective, checkpoint.holders
        saved, current = checkpoint.meta["about"], self.description
        self._difference = run_settings.compare(saved, current, resume_anyway=self.resume_anyway, resize=self.resize)
        resize = self.resize if run_settings.layout_differs(saved, current) else None
        lost = [file for file in holders if not holders[file]]
        if lost:
            raise Damaged(f"{checkpoint.path} is incomplete: {lost[0]} is missing or has another size")
        needed = list(holders) if resize else [rank_file(collective.rank), *[MODEL] * (MODEL in holders)]
        path = self._fetch(checkpoint, needed)
        tensors: dict[str, Tensor] = {}

        def read() -> str:
            try:
                for file in needed:
                    for name, tensor in format.read_tensors(path / file):
                        if not resize:  # with resize it is read only to compare its checksum
                            tensors[name] = tensor
            except Damaged as error:
                return str(error)
            return ""

        # If one rank finds damage, all ranks raise Damaged, and so all try an older checkpoint.
        lines = collective.gather(read)
        for rank, line in enumerate(lines):
            if line:
                raise Damaged(lines[collective.rank] or f"rank {rank}: {line}")
        return ResumedState(replace(checkpoint, path=path), tensors, resize)

    def _fetch(self, checkpoint: Checkpoint, needed: list[str]) -> Path:
        """Copy files that this folder lacks and its ranks need from ranks that have them; return the files' folder."""
        collective, rank, homes, holders = self.collective, self.collective.rank, self.folder.homes, checkpoint.holders
        path, copy = checkpoint.path, self.path / checkpoint.path.name
        lacking = collective.gather(lambda: [file for file in needed if rank not in holders[file]])
        wanted = {(homes[rank], file) for rank, names in enumerate(lacking) for file in names}
        if not wanted:
            return path
        to_write = sorted(file for home, file in wanted if home == rank)
        target = copy.with_name(f".{copy.name}.partial") if to_write and not path.exists() else path
        collective.do(lambda: target.mkdir(parents=True, exist_ok=True) if to_write else None)
        for file in sorted({file for _, file in wanted}):
            collective.copy(min(holders[file]), path / file, target / file if file in to_write else None)

        def publish() -> None:
            if target != path:
                format.write_meta(target, checkpoint.meta)
                self._noted.add(checkpoint.meta["save"])
                target.rename(copy)
                files.sync(self.path)

        collective.do(publish)
        return path if path.exists() else copy

    def newest(self) -> str:
        """Return the name of the good checkpoint in this folder that ``latest`` names; "": there is none."""
        name = self._read_latest() or ""
        return name if format.NAME.fullmatch(name) and format.is_good(self.path / name) else ""

    def _read_latest(self) -> str | None:
        """Read the name in the file ``latest``, which may be damaged; None: there is no such file."""
        path = self.path / "latest"
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else None


def obsolete(checkpoints: dict[str, bool], newest: str, latest: str | None, keep: int) -> list[str]:
    """List the ``checkpoints`` of a run, {name: is it good}, to remove after ``newest`` was written.

    These stay: ``newest``, the one that ``latest`` names, and the ``keep`` newest good ones up to ``newest``. Good ones
    beyond ``newest``, a future that the run has gone back from, stay until ``newest`` is good.
    """
    good = sorted((name for name, is_good in checkpoints.items() if is_good), key=step_of)
    past = [name for name in good if step_of(name) <= step_of(newest)]
    future = [] if checkpoints.get(newest) else good[len(past) :]
    return [name for name in checkpoints if name not in {newest, latest, *past[-keep:], *future}]

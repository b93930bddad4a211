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
from thinwire.train.checkpoint import format, run_settings
from thinwire.train.checkpoint.format import (
    MODEL,
    Checkpoint,
    Damaged,
    checkpoint_names,
    rank_file,
    read_meta,
    read_tensors,
    step_of,
)  # fmt: skip
from thinwire.train.checkpoint.state import Resize, ResumedState, collect_tensors
from thinwire.train.job.run_folder import RunFolder
from thinwire.wire import Wire


@dataclass(frozen=True)
class Candidate:
    """A checkpoint as all ranks together see it.

    Attributes:
        holders: file -> the ranks that see it whole.
    """

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
        self, folder: RunFolder, description: dict[str, Any], *, keep: int, resume_anyway: bool = False,
        resize: Resize | None = None,
    ) -> None:  # fmt: skip
        """``description``: the run's. ``resume_anyway``, ``resize``: which differences are let pass when it goes on."""
        self.folder, self.collective, self.keep = folder, folder.collective, keep
        self.description, self.resume_anyway, self.resize = description, resume_anyway, resize
        self.path = folder.path / "checkpoints"
        self.run = self.collective.share(uuid.uuid4().hex)[0]
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
        collective, folder = self.collective, self.folder
        final = self.path / f"step-{step:06d}"
        partial = self.path / f".{final.name}.partial"
        if not good and any(collective.gather(lambda: format.is_good(final))):
            return final
        of_rank, common = collect_tensors(model, optimizer, wire)

        def begin() -> None:
            if partial.exists():
                files.remove(partial)
            partial.mkdir(parents=True)

        def write() -> dict[str, int]:
            tensors = {rank_file(collective.rank): of_rank} | ({MODEL: common} if common and folder.is_keeper else {})
            for name in tensors:
                format.write_tensors(tensors[name], partial / name)
            return {name: (partial / name).stat().st_size for name in tensors}

        def seal() -> None:
            meta = {
                "format": format.FORMAT, "run": self.run, "save": save, "step": step, "sequences": sequences,
                "good": good, "world_size": collective.size, "files": dict(sorted(sizes.items())),
                "about": self.description,
            }  # fmt: skip
            format.write_meta(partial, meta)

        def publish() -> None:
            if final.exists():
                files.remove(final)
            partial.rename(final)
            files.sync(self.path)

        try:
            folder.do_once(begin)
            sizes = {name: size for written in collective.gather(write) for name, size in written.items()}
            save = collective.share(uuid.uuid4().hex)[0]
            folder.do_once(seal)
        except BaseException:
            if folder.is_keeper and partial.exists():
                files.remove(partial)
            raise
        folder.do_once(publish)
        folder.do_once(lambda: self._tidy(final.name, good))  # when all hosts have theirs
        self.latest = final.name if good else self.latest
        return final

    def _tidy(self, newest: str, good: bool) -> None:
        """Let ``latest`` name the newest good checkpoint, and remove this run's obsolete ones from this folder."""
        if good:
            files.write(self.path / "latest", newest + "\n")
        of_this_run = {}
        for name in checkpoint_names(self.path):
            with contextlib.suppress(Damaged):  # nobody can tell whose it is: it stays
                meta = read_meta(self.path / name).meta
                if meta["run"] == self.run:
                    of_this_run[name] = meta["good"]
        for name in obsolete(of_this_run, newest, self._read_latest(), self.keep):
            files.remove(self.path / name)

    def find(self, resume: str) -> ResumedState | None:
        """Read what ``--resume`` means: "auto", "latest" or a checkpoint's folder. None: start afresh.

        "auto" and "latest" take the newest that is whole where the one that ``latest`` names is not, and say so. What
        else is another than in the checkpoint, and may be, is said too.

        Raises:
            ThinwireError: there is no such checkpoint, none can be used, or it is not of such a run.
        """
        newest = resume in ("auto", "latest")
        in_this_folder = newest or any(
            self.collective.gather(lambda: Path(resume).parent.resolve() == self.path.resolve())
        )
        if not in_this_folder:  # before a host that lacks the checkpoint gets a copy
            self.folder.check_free()
        state = self._find_newest(resume) if newest else self._read_named(Path(resume))
        if state is not None:
            meta = state.checkpoint.meta
            if in_this_folder:
                self.run, self.latest = meta["run"], state.checkpoint.path.name
            difference = run_settings.compare(meta["about"], self.description, resume_anyway=True, resize=self.resize)
            if difference:
                self._warn(f"going on, but not bit for bit as the run would have: {difference}")
        return state

    def _warn(self, line: str) -> None:
        if self.collective.rank == 0:
            warnings.warn(line, ThinwireWarning, stacklevel=3)

    def _read_named(self, path: Path) -> ResumedState:
        candidates, errors = self._list_candidates(lambda: [path])
        damaged = [line for line in errors if line != format.no_meta(path)]
        if damaged or not candidates:
            raise Damaged([*damaged, *errors][0])
        if len(candidates) > 1:
            raise ThinwireError(f"{path} is not the same checkpoint on all ranks")
        return self._read(candidates[0], path)

    def _find_newest(self, resume: str) -> ResumedState | None:
        candidates, errors = self._list_candidates(lambda: [self.path / name for name in checkpoint_names(self.path)])
        latest = self.collective.gather(self._read_latest)
        errors += [
            f"{self.path / 'latest'} names {name}, which is not there"
            for name in sorted({name for name in latest if name} - {candidate.name for candidate in candidates})
        ]
        if None in latest:
            errors.append(f"{self.path / 'latest'} is damaged")
        good = [candidate for candidate in candidates if candidate.meta["good"]]
        # The one that ``latest`` names comes first: beyond it may be a future that the run has gone back from.
        for candidate in sorted(good, key=lambda candidate: (candidate.name in latest, candidate.step), reverse=True):
            try:
                state = self._read(candidate, self.path / candidate.name)
            except Damaged as error:
                errors.append(str(error))
                continue
            if errors:
                self._warn(f"{'; '.join(errors)}: going on from {state.checkpoint.path}")
            return state
        if errors:
            raise ThinwireError(f"no checkpoint in {self.path} can be used: {'; '.join(errors)}")
        if resume == "auto" and not candidates:
            return None
        but = " but such as were taken while the run diverged; --overwrite starts afresh" if candidates else ""
        raise ThinwireError(f"there is no checkpoint in {self.path} to resume from{but}")

    def _list_candidates(self, paths: Callable[[], Iterable[Path]]) -> tuple[list[Candidate], list[str]]:
        """List the checkpoints in ``paths()`` that any rank sees, and what is wrong with the others."""

        def look() -> tuple[list[Any], list[str]]:
            readable, errors = [], []
            for path in sorted(paths()):
                try:
                    checkpoint = read_meta(path)
                    readable.append([path.name, checkpoint.meta, checkpoint.complete_files])
                except Damaged as error:
                    errors.append(str(error))
            return readable, errors

        candidates: dict[str, Candidate] = {}
        all_errors: dict[str, None] = {}
        for rank, (readable, errors) in enumerate(self.collective.gather(look)):
            all_errors.update(dict.fromkeys(errors))
            for name, meta, complete in readable:
                candidate = candidates.setdefault(
                    meta["save"], Candidate(name, meta, {file: [] for file in meta["files"]})
                )
                for file in complete:
                    candidate.holders[file].append(rank)
        return list(candidates.values()), list(all_errors)

    def _read(self, candidate: Candidate, path: Path) -> ResumedState:
        """Read this rank's tensors of a checkpoint in ``path``, for which missing files come from other ranks."""
        collective, saved, holders = self.collective, candidate.meta["about"], candidate.holders
        run_settings.compare(saved, self.description, resume_anyway=self.resume_anyway, resize=self.resize)
        resize = self.resize if run_settings.layout_differs(saved, self.description) else None
        lost = [file for file in holders if not holders[file]]
        if lost:
            raise Damaged(f"{path} is not whole: {lost[0]} is missing or has another size")
        own_file, common_files = rank_file(collective.rank), [MODEL] if MODEL in holders else []
        needed = list(holders) if resize else [own_file, *common_files]
        checkpoint = Checkpoint(self._fetch(candidate, path, needed), candidate.meta)

        def read() -> ResumedState | Damaged:
            try:
                if resize:
                    for file in needed:
                        deque(read_tensors(checkpoint.path / file), maxlen=0)  # for the checksums' sake
                    return ResumedState(checkpoint, {}, {}, resize)
                tensors = {file: dict(read_tensors(checkpoint.path / file)) for file in needed}
                return ResumedState(checkpoint, tensors[own_file], tensors.get(MODEL, {}))
            except Damaged as error:
                return error

        result = collective.do(read)
        # Damage, for which all take an older one, is told apart from other trouble by all ranks or none.
        for rank, line in enumerate(collective.share(str(result) if isinstance(result, Damaged) else "")):
            if line:
                raise result if isinstance(result, Damaged) else Damaged(f"rank {rank}: {line}")
        assert isinstance(result, ResumedState)
        return result

    def _fetch(self, candidate: Candidate, path: Path, needed: list[str]) -> Path:
        """Bring files that this folder's ranks need and it lacks from ranks that have them; return their folder."""
        collective, rank, homes, holders = self.collective, self.collective.rank, self.folder.homes, candidate.holders
        lacking = collective.gather(lambda: [file for file in needed if rank not in holders[file]])
        wanted = {(homes[rank], file) for rank, names in enumerate(lacking) for file in names}
        if not wanted:
            return path
        to_write = sorted(file for home, file in wanted if home == rank)
        target = self.path / f".{candidate.name}.partial" if to_write and not path.exists() else path
        collective.do(lambda: target.mkdir(parents=True, exist_ok=True) if to_write else None)
        for file in sorted({file for _, file in wanted}):
            collective.copy(min(holders[file]), path / file, target / file if file in to_write else None)

        def publish() -> None:
            if target != path:
                format.write_meta(target, candidate.meta)
                target.rename(self.path / candidate.name)
                files.sync(self.path)

        collective.do(publish)
        return path if path.exists() else self.path / candidate.name

    def _read_latest(self) -> str | None:
        """Read the name in ``latest``; "" where there is none, None where it is damaged."""
        try:
            name = (self.path / "latest").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""
        except (OSError, ValueError):
            return None
        return name if format.NAME.fullmatch(name) else None


def obsolete(checkpoints: dict[str, bool], newest: str, latest: str | None, keep: int) -> list[str]:
    """List the checkpoints of a run to remove after ``newest`` was written: all but the ``keep`` newest good ones.

    ``checkpoints``: for each name, is it good? Those beyond ``newest`` belong to a future that the run has gone back
    from, and go once something good replaces it. Of those that are not good only ``newest`` stays. The one that
    ``latest`` names always stays.
    """
    good = sorted((name for name, is_good in checkpoints.items() if is_good), key=step_of)
    past = [name for name in good if step_of(name) <= step_of(newest)]
    future = [] if checkpoints.get(newest) else good[len(past) :]
    return [name for name in checkpoints if name not in {newest, latest, *past[-keep:], *future}]

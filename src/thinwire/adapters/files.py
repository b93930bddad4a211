"""The state of a wire beside a framework's own checkpoint, without pickle.

Each rank writes and reads its own file, ``FOLDER/rank-0000.safetensors`` ..., so hosts need not share the folder. It
names the weights that its state belongs to, because a program without Thinwire may have replaced the checkpoint since.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.base import extras
from thinwire.base.errors import ThinwireError, ThinwireWarning, first_line
from thinwire.core.agreement import Agreement
from thinwire.core.replica_check import aside, digest
from thinwire.network.comm import GroupComm, local
from thinwire.wire import Wire

safetensors = extras.load("safetensors")


def _file(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank():04d}.safetensors"


def _hash(wire: Wire) -> str:
    """Hash this rank's own trained weights."""
    return str(int(digest(torch.stack([digest(local(weight)) for weight in wire._run.weights.values()]))))


def save(wire: Wire, folder: Path) -> None:
    """Write this rank's state into ``folder``, whole or not at all. Every rank must call it."""
    file = _file(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    state = {key: value.contiguous().cpu() for key, value in wire.state_dict().items()}
    # Where ranks go their own ways, the framework keeps the weights of rank 0.
    kept = wire.method.rank_equal or (wire.engine.kind == "ddp" and dist.get_rank() == 0)
    extras.save_file(state, partial, metadata={"weights": _hash(wire)} if kept else {})
    os.replace(partial, file)


def load(wire: Wire, folder: Path) -> None:
    """Load this rank's state from ``folder``, once the framework has loaded the weights. Every rank must call it.

    Warn and start anew where no rank has a file, or where the state belongs to other weights.

    Raises:
        ThinwireError: ``folder`` has no file of this rank, or of another one; or a rank cannot use its file. Raised on
            all ranks.
    """
    file, weights = _file(folder), _hash(wire)
    here, stale = file.exists(), False
    with _agreement(wire):
        if here:
            try:
                with safetensors.safe_open(file, "pt") as opened:
                    names = opened.keys()
                    state = {name: opened.get_tensor(name) for name in names}
                    stale = (opened.metadata() or {}).get("weights", weights) != weights
            except (safetensors.SafetensorError, OSError) as error:
                raise ThinwireError(
                    f"{file} is damaged, or cannot be read ({first_line(error)}): go back to an earlier checkpoint"
                ) from None
    present, absent, stale = _any_rank(wire, here, not here, stale)
    if present and absent:
        lacking = f"the file of another rank in {folder}" if here else file
        raise ThinwireError(f"{lacking} is missing: the checkpoint was made by fewer ranks, or is incomplete")
    if present and not stale:
        with _agreement(wire):
            wire.load_state_dict(state)
    elif dist.get_rank() == 0:
        cause = (
            f"the state in {folder} belongs to other weights than those that were loaded: a program without Thinwire "
            "has replaced the checkpoint"
            if stale
            else f"there is no {file}: the checkpoint was made without Thinwire"
        )
        warnings.warn(f"{cause}, and the method begins with an empty state", ThinwireWarning, stacklevel=2)


def meet(wire: Wire) -> None:
    """Give ranks that step alone the mean of their weights. Collective.

    A framework may stop inside a round, or its callbacks put averages of each rank's own in place of the weights with
    which the last round ended; and it keeps the weights of rank 0.
    """
    if wire.method.card.alone(wire._road.step):
        wire.reset()


def warn_of_evaluation(wire: Wire) -> None:
    """Warn, on rank 0, of an evaluation now if ranks that step alone hold weights of their own."""
    if wire.method.card.alone_from is not None and not wire.method.rank_equal and wire.engine.rank == 0:
        warnings.warn(
            f"evaluated inside a round of {wire.method}: its loss is a mean over ranks with weights of their own, and "
            "a checkpoint has those of rank 0. Evaluate where a round ends, every so many rounds (docs/diloco.md)",
            ThinwireWarning, stacklevel=2,
        )  # fmt: skip


def _agreement(wire: Wire) -> Agreement:
    """Make a passage that all ranks complete, or none."""
    return Agreement([aside(comm) for comm in wire.engine.comms if isinstance(comm, GroupComm)])


def _any_rank(wire: Wire, *flags: bool) -> list[bool]:
    """Return which of ``flags`` are set on any rank. Collective."""
    row = torch.tensor(flags, dtype=torch.float32, device=wire._device)
    with wire.ledger.aside():
        for comm in wire.engine.comms:
            comm.all_reduce(row, "max")
    return [bool(flag) for flag in row]

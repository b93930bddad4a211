"""The state of a wire beside a framework's own checkpoint, without pickle.

Each rank writes and reads its own file, ``FOLDER/rank-0000.safetensors`` ..., so hosts need not share the folder.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch.distributed as dist

from thinwire.base import extras
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.wire import Wire

safetensors = extras.load("safetensors.torch")


def _file(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank():04d}.safetensors"


def save(wire: Wire, folder: Path) -> None:
    """Write this rank's state into ``folder``, whole or not at all. Every rank must call it."""
    file = _file(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    extras.save_file({key: value.contiguous().cpu() for key, value in wire.state_dict().items()}, partial)
    os.replace(partial, file)


def load(wire: Wire, folder: Path) -> None:
    """Load this rank's state from ``folder``. Every rank must call it. Without ``folder``, warn and start anew.

    Raises:
        ThinwireError: ``folder`` has no file of this rank.
    """
    file = _file(folder)
    if file.exists():
        wire.load_state_dict(safetensors.load_file(file))
    elif folder.exists():
        raise ThinwireError(f"{file} is missing: the checkpoint was made by fewer ranks, or is incomplete")
    else:
        warnings.warn(
            f"there is no {folder}: the checkpoint was made without Thinwire, and the method begins with an empty "
            "state",
            ThinwireWarning,
            stacklevel=2,
        )

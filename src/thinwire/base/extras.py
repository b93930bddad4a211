"""Optional packages, and the extra that brings each."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from thinwire.base.errors import ThinwireError

PACKAGES = {
    "numba": ("cpu", "fast kernels on CPUs; without it they run as plain torch"),
    "xxhash": ("cpu", "fast checksums of messages and checkpoints"),
    "triton": ("gpu", "fast kernels on GPUs"),
    "rich": ("train", "plans, reports and `thinwire train`"),
    "markdown_it": ("train", "report.html of `thinwire compare`"),
    "tyro": ("train", "options of `thinwire train` and most other commands"),
    "yaml": ("train", "config.yaml of `thinwire train`"),
    "safetensors": ("train", "checkpoints"),
    "tokenizers": ("train", "tokenizers other than bytes"),
    "matplotlib": ("plots", "pictures of `thinwire compare`"),
    "wandb": ("wandb", "`thinwire train --track wandb`"),
    "trackio": ("trackio", "`thinwire train --track trackio`"),
    "mlflow": ("mlflow", "`thinwire train --track mlflow`"),
    "datasets": ("hub", "text from the Hugging Face hub"),
    "accelerate": ("hf", "the adapter for Accelerate"),
    "peft": ("hf", "fine-tuning with LoRA"),
    "transformers": ("hf", "the adapter for the Trainer, and fine-tuning"),
    "lightning": ("lightning", "the adapter for Lightning"),
    "lm_eval": ("eval", "`thinwire eval`"),
    "torchft": ("elastic", "the adapter for replicas that come and go"),
}
"""Package, by the name that is imported -> the extra that brings it, and its use."""
EXTRAS = {package: extra for package, (extra, _) in PACKAGES.items()}


def load(module: str) -> ModuleType:
    """Import ``module``.

    Raises:
        ThinwireError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing(error) from None


def package_folder(package: str) -> Path:
    """Return the folder of ``package`` without importing it, which may take seconds.

    Raises:
        ThinwireError: as :func:`load`.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # it stands in sys.modules without one, as None
        spec = None
    if spec is None or spec.origin is None:
        raise missing(ModuleNotFoundError(name=package))
    return Path(spec.origin).parent


def missing(error: ModuleNotFoundError) -> Exception:
    """Return the exception to raise for ``error``: one line with a command if an extra brings the package."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return error
    return ThinwireError(f"the package '{package}' is not installed: pip install 'thinwire[{EXTRAS[package]}]'")


def missing_for_triton() -> str:
    """Say in a line what this machine lacks for Triton, which compiles its launchers where they run; "": nothing."""
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton needs a C compiler to launch kernels, and finds neither gcc nor clang: apt-get install gcc"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"Triton needs Python's headers to launch kernels, and there is no {header}: apt-get install python3-dev"
    return ""


def save_file(tensors: dict[str, Any], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Call safetensors' ``save_file``, but give the file the usual permissions, not its owner's alone.

    Raises:
        ThinwireError: it cannot be written: the disk is full, say.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        load("safetensors.torch").save_file(tensors, path, metadata=metadata)
    except load("safetensors").SafetensorError as error:
        raise ThinwireError(f"cannot write {path}: {' '.join(str(error).split())}") from None
    path.chmod(mode)

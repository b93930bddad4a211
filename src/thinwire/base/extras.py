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

EXTRAS = {
    "numba": "cpu",
    "xxhash": "cpu",
    "triton": "gpu",
    "rich": "train",
    "markdown_it": "train",
    "tyro": "train",
    "yaml": "train",
    "safetensors": "train",
    "tokenizers": "train",
    "matplotlib": "plots",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "datasets": "hub",
    "accelerate": "hf",
    "peft": "hf",
    "transformers": "hf",
    "lightning": "lightning",
    "lm_eval": "eval",
    "torchft": "elastic",
}
"""Package, by the name that is imported -> extra."""


def load(module: str) -> ModuleType:
    """Import ``module``.

    Raises:
        ThinwireError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing(error) from None


def found(package: str) -> Path:
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
    """Call safetensors' ``save_file``, but give the file the usual permissions, not its owner's alone."""
    path.touch()
    mode = path.stat().st_mode
    load("safetensors.torch").save_file(tensors, path, metadata=metadata)
    path.chmod(mode)

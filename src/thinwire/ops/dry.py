"""CUDA's host code without CUDA, Triton and memory: what would be launched?

Inside ``run()``, tensors without storage go the way of CUDA tensors, through ``ops/*/triton.py``, with something in
Triton's place that compiles and computes nothing. A launch is counted, and whoever asks is told of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor

from thinwire.ops.backends import host_code, launches

FAMILIES = (
    "adams", "direction", "mask", "moments", "projection", "quant", "rows", "shards", "sign", "sketch", "sparse",
)  # fmt: skip

Told = Callable[[str, Mapping[str, Any]], object]
"""(the kernel's name, by argument what it is compiled for: the types of those given, and the constants)"""


class _Kernel:
    """What ``ops/gpu.py`` uses of a kernel."""

    def __init__(self, function: Callable[..., None], told: Told) -> None:
        self._name = f"{function.__module__.removesuffix('.triton')}.{function.__name__}"
        self._arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        self._told = told

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: object, **constants: object) -> None:
            _count(self._name)
            self.warmup(*given, grid=grid, **constants)

        return launch

    def warmup(self, *given: object, grid: tuple[int, ...], **constants: object) -> None:
        types = {name: _type(value) for name, value in zip(self._arguments, given, strict=False)}
        self._told(self._name, types | constants)


def _count(name: str) -> None:
    if (counter := launches.get()) is not None:
        counter[name] += 1


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return f"*{value.dtype}"
    if isinstance(value, int):
        return "int32" if -(2**31) <= value < 2**31 else "int64"
    return type(value).__name__


def _in_tritons_place(told: Told) -> dict[str, ModuleType]:
    def jit(function: Any = None, **knobs: object) -> Any:
        return jit if function is None else _Kernel(function, told)

    module, language = ModuleType("triton"), ModuleType("triton.language")
    vars(module).update(jit=jit, cdiv=lambda a, b: -(-a // b), language=language)
    vars(language).update(constexpr=lambda value: value)
    return {"triton": module, "triton.language": language}


@contextmanager
def run(told: Told = lambda name, variant: None) -> Iterator[None]:
    """Tensors without storage stand for CUDA's. ``told``: of every launch, and of every variant that is compiled."""
    ours = ["thinwire.ops.gpu", *(f"thinwire.ops.{family}.triton" for family in FAMILIES)]
    everything = [*ours, *(name for name in sys.modules if name.partition(".")[0] == "triton")]
    before = {name: sys.modules.pop(name) for name in everything if name in sys.modules}
    try:
        sys.modules.update(_in_tritons_place(told))
        found = {name: importlib.import_module(name) for name in ours}
    finally:
        for name in [*ours, "triton", "triton.language"]:
            sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            if parent in sys.modules and name in before:
                setattr(sys.modules[parent], child, before[name])
            elif parent in sys.modules and parent != "triton":
                vars(sys.modules[parent]).pop(child, None)
        sys.modules.update(before)
    token = host_code.set({f"thinwire.ops.{family}": found[f"thinwire.ops.{family}.triton"] for family in FAMILIES})
    try:
        yield
    finally:
        host_code.reset(token)

"""Run CUDA's host code without CUDA, Triton and memory, to see what would be launched.

Inside ``run()``, tensors without storage go the way of CUDA tensors, through ``ops/*/triton.py``, with something in
Triton's place that compiles and computes nothing. A launch is counted, and reported to a function.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.ops.backends import host_code, launches

FAMILIES = (
    "adams", "direction", "mask", "moments", "norms", "projection", "quant", "rows", "shards", "sign", "sketch",
    "sparse", "steps",
)  # fmt: skip

Report = Callable[[str, Mapping[str, Any]], object]
"""(the kernel's name, by argument what it is compiled for: types at run time, and constants)"""
Launched = Callable[[Callable[..., None], Mapping[str, object]], object]
"""(the kernel's source, its arguments at run time by name)"""


waits: ContextVar[Callable[[str], object] | None] = ContextVar("waits", default=None)
"""Told why the host waits for the device, where set."""


class Bound(dict[str, Any]):
    """The arguments and constants of a launch, by name."""


class _Kernel:
    """Has of a kernel what ``ops/gpu.py`` uses."""

    def __init__(self, function: Callable[..., None], report: Report, launched: Launched) -> None:
        self.function, self._launched = function, launched
        self._name = f"{function.__module__.removesuffix('.triton')}.{function.__name__}"
        self._arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        self._report = report

    def __repr__(self) -> str:
        return self._name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **constants: object) -> None:
            if (report := launches.get()) is not None:
                report(self._name, (Bound({**dict(zip(self._arguments, arguments, strict=False)), **constants}),))
            self._launched(self.function, dict(zip(self._arguments, arguments, strict=False)))
            self.warmup(*arguments, grid=grid, **constants)

        return launch

    def warmup(self, *arguments: object, grid: tuple[int, ...], **constants: object) -> None:
        types = {name: _type(value) for name, value in zip(self._arguments, arguments, strict=False)}
        self._report(self._name, types | constants)


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return f"*{value.dtype}"
    if isinstance(value, int):
        return "int32" if -(2**31) <= value < 2**31 else "int64"
    return type(value).__name__


def _triton_stand_ins(report: Report, launched: Launched) -> dict[str, ModuleType]:
    def jit(function: Any = None, **knobs: object) -> Any:
        return jit if function is None else _Kernel(function, report, launched)

    module, language = ModuleType("triton"), ModuleType("triton.language")
    vars(module).update(jit=jit, language=language, __version__="none")
    vars(language).update(constexpr=lambda value: value)
    return {"triton": module, "triton.language": language}


_clock = itertools.count()
_waited_at = -1


def wait(why: str) -> None:
    """Let the host wait for the device: all that was recorded is over then."""
    global _waited_at
    _waited_at = next(_clock)
    if (report := waits.get()) is not None:
        report(why)


class _Stream:
    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None:
        wait("a stream")


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._recorded_at = -1

    def record(self, stream: object = None) -> None:
        self._recorded_at = next(_clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0

    def synchronize(self) -> None:
        if self._recorded_at > _waited_at:
            wait("an event")


class _Streams:
    """What stands for ``torch.cuda`` where tensors have no storage: one stream, on which nothing happens."""

    Stream, Event = _Stream, _Event
    _current = _Stream()

    @classmethod
    def current_stream(cls, device: object = None) -> _Stream:
        return cls._current

    @staticmethod
    def stream(stream: object) -> Any:
        return nullcontext()

    @staticmethod
    def synchronize(device: object = None) -> None:
        wait("the device")

    is_current_stream_capturing = staticmethod(bool)


@contextmanager
def _like_cuda() -> Iterator[None]:
    """Let code that asks of "meta" whether it has streams, or operations on lists, hear what CUDA says."""
    from torch.utils import _foreach_utils

    streams_of, foreach = devices.streams, _foreach_utils._get_foreach_kernels_supported_devices
    autocast, keep = torch.autocast, devices.keep

    def host_memory(shape: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    with ExitStack() as stack:
        for module, name, double in (
            (devices, "streams", lambda device: _Streams if device.type == "meta" else streams_of(device)),
            (devices, "host_memory", host_memory),
            (devices, "keep", lambda tensor: None if tensor.is_meta else keep(tensor)),
            (torch, "autocast", lambda kind, **how: nullcontext() if kind == "meta" else autocast(kind, **how)),
            (_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: [*foreach(), "meta"]),
        ):
            stack.enter_context(mock.patch.object(module, name, double))
        yield


@contextmanager
def run(
    report: Report = lambda name, variant: None, launched: Launched = lambda function, arguments: None
) -> Iterator[None]:
    """Let tensors without storage stand for CUDA's. ``report`` is called at each launch and each compiled variant,
    ``launched`` at each launch."""
    own_modules = ["thinwire.ops.gpu", *(f"thinwire.ops.{family}.triton" for family in FAMILIES)]
    replaced = [*own_modules, *(name for name in sys.modules if name.partition(".")[0] == "triton")]
    originals = {name: sys.modules.pop(name) for name in replaced if name in sys.modules}
    try:
        sys.modules.update(_triton_stand_ins(report, launched))
        imported = {name: importlib.import_module(name) for name in own_modules}
    finally:
        for name in [*own_modules, "triton", "triton.language"]:
            sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            if parent in sys.modules and name in originals:
                setattr(sys.modules[parent], child, originals[name])
            elif parent in sys.modules and parent != "triton":
                vars(sys.modules[parent]).pop(child, None)
        sys.modules.update(originals)
    token = host_code.set({f"thinwire.ops.{family}": imported[f"thinwire.ops.{family}.triton"] for family in FAMILIES})
    try:
        with _like_cuda():
            yield
    finally:
        host_code.reset(token)

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Compile and launch Triton kernels, and declare the alignment of their addresses."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.ops.backends import every_variant

GRID = (2**31 - 1, 65535, 65535)
"""The most programs that CUDA takes along each dimension of a grid. A launch beyond it fails ("invalid argument")."""
INT32 = range(-(2**31), 2**31)
"""Integers that a kernel takes in 32 bits; for others it is compiled anew."""
VARIANTS = {"ALIGN": (16, 1), "WIRE": (16, 4, 1)}
"""The values of these constants in a step: see :func:`alignment` and :func:`wire_alignment`."""


def kernel(function: Any) -> Any:
    """Decorate a kernel to launch: ``triton.jit`` that compiles anew only for other dtypes and constants.

    Triton's default also compiles a variant for each argument that is 1 or a multiple of 16; the step that meets one
    waits for it, with all other ranks.
    """
    parameters = inspect.signature(function).parameters
    runtime_arguments = [name for name, parameter in parameters.items() if parameter.annotation != "tl.constexpr"]
    return triton.jit(do_not_specialize=runtime_arguments, do_not_specialize_on_alignment=runtime_arguments)(function)


@triton.jit
def row_of(tensor, stride, row, ALIGN: tl.constexpr):
    """Point to row ``row`` of ``tensor``, at a multiple of ``ALIGN`` bytes, perhaps beyond 2 GiB."""
    return tl.multiple_of(tensor + tl.cast(row, tl.int64) * stride, ALIGN)


@triton.jit
def along(tensor, element, ALIGN: tl.constexpr):
    """Point to the elements ``element`` (BLOCK,) of ``tensor``; the first lies at a multiple of ``ALIGN`` bytes."""
    return tl.multiple_of(tensor + element, ALIGN)


@triton.jit
def whole(n, ALIGN: tl.constexpr):
    """Return ``n``, a multiple of ``ALIGN``, which keeps accesses wide: masks that may end anywhere narrow them."""
    return n // ALIGN * ALIGN


@triton.jit
def segment_of(programs, table, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    """Return this program's row, its segment's number and line of ``table``, and its ``BLOCK`` elements of the segment.

    ``programs``: see ``programs_on``. ``table``: ``FIELDS`` int64 for each segment.
    """
    number = tl.load(programs + 2 * tl.program_id(0)).to(tl.int64)
    element = tl.load(programs + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(1).to(tl.int64), number, table + number * FIELDS, element


@triton.jit
def is_last(ends, programs):
    """Is this the last of ``programs`` programs that count themselves in ``ends``, each once?

    The last one finds what the others wrote before they came, if it loads with ".cg", and leaves ``ends`` at zero.
    """
    tl.debug_barrier()  # the release below covers what all threads of this program wrote
    last = tl.atomic_add(ends, 1, sem="acq_rel") == programs - 1
    tl.store(ends, 0, mask=last)
    return last


@triton.jit
def add_up(counts, size, BLOCK: tl.constexpr):
    """Replace ``size`` int32, which other programs have written, by their running sums."""
    lane, total = tl.arange(0, BLOCK), tl.full((), 0, tl.int32)
    for first in range(0, size, BLOCK):
        inside = first + lane < size
        values = tl.load(counts + first + lane, mask=inside, other=0, cache_modifier=".cg")
        tl.store(counts + first + lane, total + tl.cumsum(values, 0), mask=inside)
        total += tl.sum(values, 0)


@triton.jit
def zero_words(words, size, BLOCK: tl.constexpr):
    """Zero ``size`` int64; the programs along the first dimension of the grid share them."""
    share = tl.cdiv(size, tl.num_programs(0))
    first = tl.program_id(0).to(tl.int64) * share
    end = tl.minimum(first + share, size)
    for start in range(first, end, BLOCK):
        word = start + tl.arange(0, BLOCK)
        tl.store(words + word, tl.zeros((BLOCK,), tl.int64), mask=word < end)


def counters(device: torch.device, size: int) -> Tensor:
    """Return (at least ``size``,) int32 zeros, which all kernels on a stream share: each leaves zeros behind."""
    return _counters(device, devices.stream_key(device), 1 << (size - 1).bit_length())


@functools.lru_cache(maxsize=64)
def _counters(device: torch.device, stream: Any, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


def cdiv(size: int, step: int) -> int:
    """Return how many times ``step`` covers ``size``; Triton's own is for kernels, and slow on the host."""
    return -(-size // step)


def alignment(*values: Tensor) -> int:
    """Return ALIGN: 16 if all rows of ``values`` start at multiples of 16 bytes and have 16 i elements; else 1."""
    for tensor in values:
        if tensor.size(-1) % 16 or not _starts_at(16, tensor):
            return 1
    return 16


def wire_alignment(wire: Tensor, *values: Tensor) -> int:
    """Return WIRE: 16 or 4 if ``wire``'s rows start at multiples of it in bytes and ``values`` are aligned; else 1."""
    if alignment(*values) == 1:
        return 1
    return next((size for size in VARIANTS["WIRE"] if _starts_at(size, wire)), 1)


def _starts_at(size: int, tensor: Tensor) -> bool:
    step = tensor.stride(0) * tensor.itemsize if tensor.dim() == 2 and tensor.size(0) > 1 else 0
    return (tensor.data_ptr() | step) % size == 0


class _Bound(NamedTuple):
    """A kernel, what Triton has compiled of it, and the constants, which it is launched with behind the arguments.

    ``run``, ``function``, ``metadata``: what its runner calls, and hands over.
    """

    kernel: Any
    compiled: Any
    constants: tuple[Any, ...]
    run: Any
    function: Any
    metadata: Any

    def launch(self, grid: tuple[int, ...], index: int, arguments: Sequence[Any]) -> None:
        """Do what ``compiled[grid](...)`` does, which builds metadata for hooks even where there is none."""
        x, y, z, *_ = (*grid, 1, 1)
        stream = triton.runtime.driver.active.get_current_stream(index)
        self.run(x, y, z, stream, self.function, self.metadata, None, None, None, *arguments, *self.constants)

    def told(self, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Launch as Triton does, which tells the hooks."""
        x, y, z, *_ = (*grid, 1, 1)
        self.compiled[x, y, z](*arguments, *self.constants)


def _has_hooks() -> bool:
    """Does a profiler want to be told of launches? A hook is a chain of calls, or one of them, or None."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


_bound: dict[tuple[Any, ...], _Bound | None] = {}
"""By kernel, device, types of the arguments and constants: all that Triton compiles for. None: as Triton launches."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, fused: bool = False, **constants: Any) -> None:
    """Run ``kernel`` in ``grid`` programs, on the device of its first tensor rather than the current one.

    The first launch with arguments of some types is Triton's ``kernel[grid](...)``, which finds out what to compile or
    to take from its cache; later ones run what that one has found.

    Args:
        arguments: a tensor of two dimensions is passed with the distance of its rows in elements.
        fused: a product may be contracted into an addition, which rounds once instead of twice.
        constants: all values of those in ``VARIANTS`` are compiled before the first step.

    Raises:
        ThinwireError: the grid is larger than CUDA's; a dry run (``tests/support/dry_cuda.py``) raises it, too.
    """
    if max(grid) > GRID[-1] and any(size > limit for size, limit in zip(grid, GRID, strict=False)):
        raise ThinwireError(f"{kernel}: CUDA takes grids of up to {GRID} programs, not {grid}: send fewer rows at once")
    flattened: list[Any] = []
    kinds: list[Any] = [id(kernel), fused]
    first: Tensor | None = None
    for argument in arguments:
        flattened.append(argument)
        if isinstance(argument, Tensor):
            kinds.append(argument.dtype)
            if first is None:
                first = argument
            if argument.ndim == 2:
                flattened.append(stride := argument.stride(0))
                if stride not in INT32:
                    kinds.append("int64")
        else:
            kinds.append(argument in INT32 if type(argument) is int else type(argument))
    assert first is not None
    index = first.get_device()  # -1: memory of the host, or none
    if index >= 0 and index != torch.accelerator.current_device_index():
        with torch.cuda.device_of(first):
            _launch(kernel, grid, flattened, (index, *kinds), constants, fused)
    else:
        _launch(kernel, grid, flattened, (index, *kinds), constants, fused)


def _launch(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], kinds: tuple[Any, ...], constants: dict[str, Any],
    fused: bool,
) -> None:  # fmt: skip
    if not every_variant.get() and _launched((*kinds, *constants, *constants.values()), grid, kinds[0], arguments):
        return
    options = {**constants, "enable_fp_fusion": fused}
    if every_variant.get():
        for name in VARIANTS.keys() & constants.keys():
            for value in VARIANTS[name]:
                variant = kernel.warmup(*arguments, grid=grid, **{**options, name: value})
                _bind(kernel, variant, kinds, len(arguments), {**constants, name: value})
    _bind(kernel, kernel[grid](*arguments, **options), kinds, len(arguments), constants)


def _launched(key: tuple[Any, ...], grid: tuple[int, ...], index: int, arguments: Sequence[Any]) -> bool:
    """Launch what is bound to ``key``, if anything is."""
    if (bound := _bound.get(key)) is None:
        return False
    try:
        has_hooks = _has_hooks()
        if not has_hooks:
            bound.launch(grid, index, arguments)
    except (TypeError, AttributeError) as error:
        _bound[key] = None
        warnings.warn(
            f"Triton {triton.__version__} launches kernels in another way than those that were tried ({error}): "
            "it launches this one itself, which takes the host longer", ThinwireWarning, stacklevel=5,
        )  # fmt: skip
        return False
    if has_hooks:
        bound.told(grid, arguments)  # an error of a hook is not ours, and comes after the launch
    return True


def _bind(kernel: Any, compiled: Any, kinds: tuple[Any, ...], count: int, constants: dict[str, Any]) -> None:
    """Keep how to launch what Triton has ``compiled`` for ``count`` arguments. Its machine code is loaded by then."""
    key = (*kinds, *constants, *constants.values())
    if compiled is not None and key not in _bound:  # interpreted, or in a dry run, there is nothing compiled
        behind = tuple(constants[name] for name in kernel.arg_names[count:])
        launcher = (getattr(compiled, name, None) for name in ("run", "function", "packed_metadata"))
        _bound[key] = _Bound(kernel, compiled, behind, *launcher)

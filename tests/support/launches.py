"""What a step launches on CUDA, the bytes that its kernels move, and where its host waits, counted in a dry run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import dry_cuda
from thinwire.ops.backends import launches as told
from thinwire.ops.rows import CopyTable
from thinwire.predict import launches
from thinwire.predict.launches import nbytes_of

CHUNK = 65536
"""Values of one tensor that one block of torch's operations on lists takes (ATen/native/cuda/MultiTensorApply.cuh)."""
BLOCKS = 320
"""Blocks of one launch there."""
TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors of one launch there, by the number of lists."""
TENSORS_WITH_SCALARS = {1: 96, 2: 64, 3: 48, 4: 36, 5: 30}
"""The same where each tensor comes with a number."""
JOINED = 128
"""Tensors that one launch of ``torch.cat`` joins (ATen/native/cuda/Shape.cu)."""
READ_AGAIN, NEAR, LISTED = 0.44, 0.10, 0.08
"""The shares of all 32-byte sectors that hold a value with the exponent of the k-th, one that is near the last step's
k-th, and one that is listed: of one value in a hundred sent, and a normal distribution, whose k-th lies anywhere
between two powers of two: the mean of 1 - (1 - p)^8."""
MISSED = 0.1
"""The share of k-th sizes that are not near the last step's: docs/log.md, 2026-11-28, "How far the k-th size moves"."""
HIGH = 0.15
"""The share of high bits among packed positions of one value in a hundred: (1 + 1 / 2.56) / (9 + 1 / 2.56)."""
DONE_AGAIN = ("rows", "residual", "total", "second", "second_out", "state", "marks")
"""What the first pass of a choice touches where it has cut an outlier."""
MEASURES = ("squares", "columns", "usual", "usual_now", "shares", "residues", "bounded")
"""What it touches to find out."""
READS = ("_local_scalar_dense", "is_nonzero", "equal")
"""Operations whose result the host reads."""


_table = vars(CopyTable)["table"].func


def _known_table(copies: CopyTable) -> Tensor:
    """Make the table of ``copies`` for a kernel, with which a launch of it tells what is copied."""
    table = _table(copies)
    table.of = copies
    return table


class LaunchWatch(launches.LaunchWatch):
    """Counts kernels by step and name, with the bytes that they move, and the waits of the host."""

    def __init__(self) -> None:
        super().__init__()
        self._now = Counts()
        self._steps: list[tuple[float, Counts]] = []  # share of the steady state, counts

    def launched(self, name: str, nbytes: float, times: int = 1) -> None:
        self._now.launches[name] += times
        self._now.moved[name] += nbytes  # type: ignore[assignment]

    def waited(self, why: str) -> None:
        """The host waits for the device."""
        self._now.waits[why] += 1

    def __enter__(self) -> Self:
        super().__enter__()
        self._ours = told.set(self._launched_by_us)
        self._waits = dry_cuda.waits.set(self.waited)
        self._tables = mock.patch.object(vars(CopyTable)["table"], "func", _known_table)
        self._tables.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._tables.stop()
        dry_cuda.waits.reset(self._waits)
        told.reset(self._ours)
        super().__exit__(*raised)

    def _launched_by_us(self, name: str, args: tuple[Any, ...]) -> None:
        is_kernel = len(args) == 1 and isinstance(args[0], dry_cuda.Bound)
        self.launched(name, kernel_bytes(name, args[0]) if is_kernel else launches.own_bytes(name, args))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            if name in READS:
                dry_cuda.wait(name)
                return torch.zeros((), dtype=tensors[0].dtype).item() if name == "_local_scalar_dense" else False
            if name in ("_to_copy", "copy_") and (of := self._from_device(name, args, kwargs)) is not None:
                return of
        before = self._now.launches.total()
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if self._now.launches.total() > before:
            kernel = launches.name_of(function)
            self._now.launches[kernel] += launches_of(name, args, kwargs) - 1
            if name.startswith("_fused"):  # torch says that gradients change, as they do under a GradScaler
                self._now.moved[kernel] -= nbytes_of(args[1])  # type: ignore[assignment]
        return result

    def _from_device(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Return what a copy from the device to the host makes; count a wait, and that of a copy the other way."""
        source, target = (args[1], args[0].device) if name == "copy_" else (args[0], kwargs.get("device"))
        if target is None or source.device.type == torch.device(target).type:
            return None
        if not (args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking", False)):
            dry_cuda.wait(f"{name} without non_blocking")
        if torch.device(target).type == "meta":
            return None
        self.launched(f"aten.{name}", 2 * nbytes_of(source))
        return args[0] if name == "copy_" else torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)

    def end_step(self, share: float) -> None:
        super().end_step(share)
        self._steps.append((share, self._now))
        self._now = Counts()

    def steady(self) -> Mapping[str, float]:
        """The launches by name: see ``average``."""
        return self.average().launches

    def average(self) -> Counts:
        """Average over the steady state; where all its steps are alike, the second, which finds memory ready."""
        shares = [share for share, _ in self._steps]
        if 1.0 in shares:
            return self._steps[shares.index(1.0) + 1][1]
        total = Counts()
        for share, counts in self._steps:
            for sums, added in zip(total.all(), counts.all(), strict=True):
                for name, count in added.items() if share else ():
                    sums[name] += share * count  # type: ignore[assignment]
        return total


class Counts:
    """Of a step: ``launches`` and bytes ``moved`` by kernel, ``waits`` of the host by reason."""

    def __init__(self) -> None:
        self.launches, self.moved, self.waits = Counter[str](), Counter[str](), Counter[str]()

    def all(self) -> Sequence[Counter[str]]:
        return self.launches, self.moved, self.waits


def launches_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Count the launches of an operation of torch that launches something."""
    if name in ("cat", "stack"):
        return -(-len(args[0]) // JOINED)
    return _launches_of_lists(name, args, kwargs) if name.startswith(("_foreach", "_fused")) else 1


def _launches_of_lists(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Count the launches of an operation of torch on lists: a few where all tensors are dense and alike, else one each.

    So does CUDA: ATen/native/ForeachUtils.h, ``can_use_fast_route``.
    """
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple) and value]
    lists = [value for value in values if all(isinstance(item, Tensor) for item in value)]
    lists = lists[:4] if name.startswith("_fused") else lists  # not the counts of steps
    first = lists[0]
    for other in lists:
        same_length = len(other) == len(first)
        dense = all(tensor.dtype == first[0].dtype and _is_dense(tensor) for tensor in other)
        alike = same_length and all(
            a.shape == b.shape and a.stride() == b.stride() for a, b in zip(first, other, strict=True)
        )
        if not dense or not alike:
            return len(first)
    is_norm = "norm" in name
    depth = len(lists) + (not name.endswith("_") and not is_norm)
    limit = (TENSORS if len(values) == len(lists) else TENSORS_WITH_SCALARS)[min(depth, 5)]
    count = blocks = tensors = 0
    for tensor in first:
        chunks = -(-tensor.numel() // CHUNK)
        tensors += chunks > 0
        for chunk in range(chunks):
            blocks += 1
            is_last = chunk == chunks - 1
            if blocks == BLOCKS or (tensors == limit and is_last):
                count, blocks, tensors = count + 1, 0, 0 if is_last else 1
    return max(count + (blocks > 0), 1) + is_norm  # blocks' norms are added up by a second launch


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


Named = Mapping[str, Any]


def _where(**flags: str) -> Callable[[Named], Mapping[str, float]]:
    """Arguments that are touched only with a constant: ``_where(residual="FEEDBACK")``."""
    return lambda of: {name: nbytes_of(of[name]) * bool(of[flag]) for name, flag in flags.items()}


def _twice(*arguments: str) -> Callable[[Named], Mapping[str, float]]:
    """``arguments`` are read and written."""
    return lambda of: {name: 2 * nbytes_of(of[name]) for name in arguments}


def _at(values: str, *arguments: str) -> Callable[[Named], Mapping[str, float]]:
    """Of ``arguments`` as many values are touched as ``values`` has."""
    return lambda of: {name: nbytes_of(of[values]) for name in arguments}


def _listed(of: Named) -> Mapping[str, float]:
    """What is chosen is read, listed and, in integers, read again; of what they leave out as much is kept."""
    listed, sends, again = nbytes_of(of["payload"]), bool(of["BITS"]), of["BITS"] in (4, 8)
    return {
        "total": nbytes_of(of["total"]) * LISTED + listed * of["KEEP"] * sends, "payload": listed * (1 + again),
        "positions": listed * (1 + again * of["KEEP"]), "arrived": 0.0,
        "codes": nbytes_of(of["codes"]) * sends, "scales": nbytes_of(of["scales"]) * again,
    }  # fmt: skip


def _others(of: Named) -> float:
    """Count, on average, the programs before one that decodes positions: one segment has all that are too many."""
    return (len(of["programs"]) // 2 - len(of["segments"]) // of["FIELDS"]) / 2


def _kept(of: Named) -> float:
    """Bytes of what is copied to a message of weights; codes and scales, which lie in it too, count by themselves."""
    return float(launches._copied(of["copy_table"].of) * of["message"].element_size())


TOUCHED: Mapping[str, Sequence[Callable[[Named], Mapping[str, float]]]] = {
    "adams._adams": (_twice("weight", "moment"), _where(next_moment="HAS_NEXT")),
    "direction._direction": (_twice("g"), _where(m="MOMENTUM", m_out="MOMENTUM")),
    "mask._collect": (_at("message", "row"),),
    "mask._gather_keep": (
        _where(residual="FEEDBACK", residual_out="KEEP"),
        lambda of: {} if of["KEEP"] else {"rows": nbytes_of(of["payload"])},
    ),
    "mask._renew": (_twice("rows"),),
    "moments._add_up": (_where(common="COMMON"), lambda of: {"moment": nbytes_of(of["rows"]) * (not of["COMMON"])}),
    "moments._advance": (
        _where(common="COMMON", common_out="COMMON"), lambda of: {"moment": nbytes_of(of["next_moment"])},
    ),
    "projection._project": (_where(residual="FEEDBACK", residual_out="KEEP"),),
    "norms._bound": (  # a step as usual has nothing to cut
        lambda of: {"flat": 0.0, "rows": launches._pack(of["flat"], of["table"].of, of["rows"])},
    ),
    "rows._pack": (lambda of: {"flat": 0.0, "rows": launches._pack(of["flat"], of["table"].of, of["rows"])},),
    "rows._unpack": (
        lambda of: {"flat": 0.0, "rows": launches._unpack(of["rows"], of["table"].of, of["flat"], of["ADD"])},
    ),
    "shards._read": (lambda of: {  # of its own row a rank reads ``resident``
        "resident": nbytes_of(of["resident"]) * of["ADD"], "rows": nbytes_of(of["rows"]) * (1 + of["ADD"]),
        "message": _kept(of) * len(of["rows"]),
    },),
    "shards._write": (_where(resident="SUBTRACT"), lambda of: {"message": _kept(of)}),
    "sketch._encode": (_at("payload", "whole"),),
    "sketch._gather": (_at("payload", "rows"),),
    "sketch._restore": (_at("sent", "residual", "out"),),
    "sketch._round_to": (_twice("payload"),),
    "norms._sample": (lambda of: {"rows": len(of["positions"]) * 4},),
    "sparse._first": (
        _where(residual="FEEDBACK", total="KEEP", second="STEP", second_out="STEP", marks="GUESS"),
        _where(positions="SAMPLE", norms="SAMPLE", sums="SAMPLE"),
        _where(**dict.fromkeys(MEASURES, "MEASURE")),
        lambda of: {"cuts": nbytes_of(of["cuts"]) * (of["MEASURE"] or of["CUT"])},
        lambda of: dict.fromkeys(("counts", "near", "over", "limited"), 0.0),
        lambda of: dict.fromkeys(DONE_AGAIN, 0.0) if of["CUT"] else {},  # a step as usual has nothing to cut
    ),
    "sparse._second": (lambda of: {
        "counts": 0.0, **{name: nbytes_of(of[name]) * (MISSED if of["GUESS"] else 1) for name in ("total", "marks")},
    },),
    "sparse._third": (_twice("marks"), lambda of: {"counts": 0.0, "total": nbytes_of(of["total"]) * (
        NEAR + (READ_AGAIN - NEAR) * MISSED if of["GUESS"] else READ_AGAIN
    )}),
    "sparse._tally": (_where(words="PACK"), _twice("marks"), lambda of: {"total": 0.0}),
    "sparse._list": (_where(words="PACK"), _listed),
    "steps._take": (lambda of: {"weight": len(of["programs"]) // 2 * of["BLOCK"] * 12, "change": 0.0},),
    "sparse._spread": (_twice("words"), lambda of: {"wire": nbytes_of(of["wire"]) * (1 + HIGH * _others(of))}),
    "sparse._put": (_at("payload", "out"),),
}  # fmt: skip
"""By kernel: the bytes that it moves of arguments that are not moved once; of what has no name, such as moments."""


def kernel_bytes(name: str, arguments: Named) -> float:
    """Count the bytes that one launch of our kernel ``name`` moves, whatever its caches save."""
    moved: dict[str, float] = {name: nbytes_of(value) for name, value in arguments.items() if name != "ends"}
    for touched in TOUCHED.get(name.removeprefix("thinwire.ops."), ()):
        moved.update(touched(arguments))
    return sum(moved.values())

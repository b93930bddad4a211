"""What must hold of every case of ``adversarial``, with tolerances derived from the formats.

Legend: N ranks, R rows, S columns of one tensor without padding. g (N, R, S) are the gradients, h what a rank encodes,
e and e' what waits before and after. Everything is float64 here, where float32's extremes neither overflow nor vanish.

Every bound is a sum of roundings, each of them half a unit in the last place of what it rounds: U * |value| in float32,
U8 * |value| in bfloat16, and never less than half the smallest subnormal. Second-order terms are covered by counting
two roundings more than there are (``SPARE``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from projections import matrix_of
from thinwire.base.knobs import knobs_of
from thinwire.codecs.base import Codec
from thinwire.codecs.cast import Bf16, Fp32
from thinwire.codecs.intquant import Integers, ShiftedInt8
from thinwire.codecs.projection import Projection
from thinwire.core.exchange import Exchange
from thinwire.core.method import Method, count_of
from thinwire.ops.adams.reference import EXACT, ROUNDED
from thinwire.ops.projection import LANES
from thinwire.ops.quant import ORDER

if TYPE_CHECKING:
    from adversarial import Case

Array = NDArray[Any]
Rounding = Callable[[Array], Array]
"""Magnitudes (..., S) -> the largest error of a codec that encodes values of these magnitudes."""
Claim = tuple[str, Array, Array, Array]
"""What is claimed, what came, what was to come, and by how much they may differ."""

U, U8 = 2.0**-24, 2.0**-8
LEAST, LEAST8 = 2.0**-150, 2.0**-134
"""Half the smallest subnormal numbers of float32 and bfloat16."""
SMALLEST_SCALE = 2.0**-126
SPARE = 2
TOP = float(np.finfo(np.float32).max)
ROOM = 1024.0
"""Below TOP / ROOM, and N and the steps, no sum, transform or momentum of a case can leave float32."""


@dataclass(frozen=True)
class Taken:
    """What one rank had after one step. ``counts``: it was finite on all ranks, and kept."""

    counts: bool
    mean: Array
    bytes: float
    state: dict[str, Array]
    moments: dict[str, Array]
    weights: dict[str, Array]
    clip: float = 1.0


@dataclass(frozen=True)
class Played:
    """A case that was played: by turn the step's number, how it ended and the inputs; by rank what it had then.

    ``spans``: of each tensor, columns without and with padding. ``rows``: of the bucket. ``plan``: dry-runs a step and
    returns its bytes; None: they are not looked at.
    """

    numbers: list[int]
    ends: list[str]
    inputs: list[list[Array]]
    ranks: list[list[Taken]]
    method: Method
    exchange: Exchange
    spans: dict[str, tuple[int, int]]
    rows: int
    plan: Callable[[], float] | None


class View:
    """A played case, tensor by tensor, in the form of a bucket's rows."""

    def __init__(self, case: Case, played: Played) -> None:
        self.case, self.played, self.method = case, played, played.method
        self.size, self.rows = case.size, played.rows
        self.names = list(played.spans)
        self.turns = range(len(played.numbers))
        self._offsets = self._places()
        largest = max((float(np.abs(values).max()) for ranks in played.inputs for values in ranks
                       if np.isfinite(values).all()), default=0.0)  # fmt: skip
        self.may_overflow = largest * ROOM * case.size * case.steps > self._limit()

    def _limit(self) -> float:
        """The root mean square of 1-bit Adam squares its values, as its docstring says."""
        return TOP**0.5 if getattr(self.method, "scale", "") == "rms" else TOP

    def _places(self) -> dict[str, tuple[int, int]]:
        """Offset and numel of each tensor in the engine's buffer (in a shard of it)."""
        found, offset = {}, 0
        for name, shape in self.case.shapes.items():
            numel = int(np.prod(shape))
            if self.case.owner:
                numel = self.played.spans[name][0]
            found[name] = offset, numel
            offset += numel
        return found

    def values(self, flat: Array, name: str) -> Array:
        """``name``'s part of an engine's buffer: (R, S), zeros where there is no value."""
        (offset, numel), span = self._offsets[name], self.played.spans[name][0]
        if self.case.owner:
            return flat.reshape(self.size, -1)[:, offset : offset + span].astype(np.float64)
        found = np.zeros(self.rows * span)
        found[:numel] = flat[offset : offset + numel]
        return found.reshape(self.rows, span)

    def counted(self, name: str) -> Array:
        """(R, S) bool: where there is a value."""
        ones = np.ones(self.played.inputs[0][0].shape)
        return self.values(ones, name) != 0

    def inputs(self, turn: int, name: str) -> Array:
        return np.stack([self.values(flat, name) for flat in self.played.inputs[turn]])

    def mean(self, turn: int, name: str, rank: int = 0) -> Array:
        """(R, S), as rank ``rank`` has it, or put together from the ranks' own rows."""
        if self.case.owner:
            flat = np.concatenate([rank[turn].mean for rank in self.played.ranks])
            return self.values(flat, name)
        return self.values(self.played.ranks[rank][turn].mean, name)

    def sent_before(self, turn: int, name: str) -> bool:
        """Was anything of ``name`` sent in the last step that counts before ``turn``?"""
        kept = [before for before in range(turn) if self.played.ranks[0][before].counts]
        return bool(kept) and bool(self.mean(kept[-1], name).any())

    def state(self, turn: int, kind: str, name: str, rows: int | None = None) -> Array:
        """``kind`` of ``name`` after ``turn``: (N, R, S), zeros before there is any."""
        shape = (rows or self.rows, self.played.spans[name][0])
        if turn < 0:
            return np.zeros((self.size, *shape))
        found = [rank[turn].state.get(f"{kind}/{name}") for rank in self.played.ranks]
        return np.stack([np.zeros(shape) if values is None else values.astype(np.float64) for values in found])

    def small(self, turn: int, kind: str, name: str = "", rank: int = 0) -> Array | None:
        """What was ``put``."""
        return None if turn < 0 else self.played.ranks[rank][turn].state.get(f"={kind}/{name}")

    def moment(self, turn: int, name: str) -> Array:
        """The optimizer's first moment after ``turn``: (R, S)."""
        total = sum(numel for _, numel in self._offsets.values())
        rows = [np.zeros(total) for _ in range(self.size if self.case.owner else 1)]
        offset, numel = self._offsets[name]
        for row, rank in zip(rows, self.played.ranks, strict=False):
            found = None if turn < 0 else rank[turn].moments.get(name)
            if found is not None:
                row[offset : offset + numel] = found.reshape(-1)
        return self.values(np.concatenate(rows), name)


# Roundings of the codecs.


def by_group(values: Array, group: int) -> Array:
    """(..., S) -> the largest of each group of columns, in every column of the group."""
    size = values.shape[-1]
    padded = np.zeros((*values.shape[:-1], -(-size // group) * group))
    padded[..., :size] = values
    largest = padded.reshape(*values.shape[:-1], -1, group).max(-1)
    return np.repeat(largest, group, -1)[..., :size]


def _group_sum(values: Array, group: int) -> Array:
    """(..., S) -> the sum of each group of columns, in every column of the group."""
    size = values.shape[-1]
    padded = np.zeros((*values.shape[:-1], -(-size // group) * group))
    padded[..., :size] = values
    return np.repeat(padded.reshape(*values.shape[:-1], -1, group).sum(-1), group, -1)[..., :size]


def nothing(values: Array) -> Array:
    return np.zeros_like(values)


def rounding_of(codec: Codec | None) -> Rounding:
    """Of one encoding and decoding."""
    if codec is None or isinstance(codec, Fp32):
        return nothing
    if isinstance(codec, Bf16):
        return lambda values: U8 * values + LEAST8
    if isinstance(codec, ShiftedInt8):  # whose scale may be subnormal, or too small even for that
        return lambda values: _integers(by_group(values, codec.group), 126.5, 0.5) + 2 * 127 * LEAST
    assert isinstance(codec, Integers), codec
    # A code is right to half a level, or, stochastically, to one and the 2^-17 to which its random bits reach; four
    # float32 roundings: of the scale, its reciprocal, the quotient and the product.
    part = 0.5 if codec.rounding == "nearest" else 1 + 2.0**-17
    levels = {4: 7, 8: 127}[codec.bits]
    if codec.hadamard:
        return lambda values: _hadamard(values, codec.group, levels, part)
    return lambda values: _integers(by_group(values, codec.group), levels, part)


def _integers(largest: Array, levels: int, part: float) -> Array:
    return part * np.maximum(largest / levels, SMALLEST_SCALE) + (4 + SPARE) * U * largest + LEAST


def _hadamard(values: Array, group: int, levels: int, part: float) -> Array:
    """Of the transform of every 32 neighbours, which is below the sum of their magnitudes / sqrt(32); transformed back,
    32 errors are below sqrt(32) of the largest. Five additions and one product each way."""
    largest = by_group(_group_sum(values, ORDER) / ORDER**0.5, group)
    return ORDER**0.5 * (_integers(largest, levels, part) + 2 * 6 * U * largest + 6 * LEAST)


def exchanged(
    view: View, x: Array, rounding: Rounding, *, on_wire: bool = False, unit: float = U
) -> tuple[Array, Array]:
    """The mean of ``x`` (N, R, S), and how far from it an exchange may end: hop by hop.

    ``unit``: half a unit in the last place of what the sums are in. ``on_wire``: the network sums, once.
    """
    least = LEAST if unit == U else LEAST8
    error = np.zeros_like(x)
    sizes = np.abs(x) + error
    error = error.mean(0) + _sum_error(sizes, rounding, unit, least, axis=0)
    mean = x.mean(0)
    if not view.case.owner and not on_wire:
        error = error + rounding(np.abs(mean) + error)
    if view.case.dtype == torch.bfloat16:  # the engine's buffer
        error = error + U8 * (np.abs(mean) + error) + LEAST8
    return mean, error


def _sum_error(sizes: Array, rounding: Rounding, unit: float, least: float, axis: int) -> Array:
    """Of the mean along ``axis`` of what is encoded: each rounded once; n - 1 additions, a product with fl(1 / n)."""
    count, own = sizes.shape[axis], rounding(sizes)
    growth = (1 + unit) ** count * (count + 1 + SPARE) * unit
    return own.mean(axis) + growth * (sizes + own).mean(axis) + (count + SPARE) * least


# The laws by method: claims about one tensor after one turn.


def _gradients(view: View, turn: int, name: str) -> Array:
    return view.inputs(turn, name)


def dense(view: View, turn: int, name: str) -> Iterator[Claim]:
    unit = U8 if view.method.card.native and view.case.dtype == torch.bfloat16 else U
    mean, error = exchanged(view, view.inputs(turn, name), nothing, on_wire=True, unit=unit)
    yield "the mean", view.mean(turn, name), mean, error


def none(view: View, turn: int, name: str) -> Iterator[Claim]:
    given = view.inputs(turn, name)
    for rank in range(view.size):
        yield f"rank {rank}'s own", view.mean(turn, name, rank), given[rank], np.zeros_like(given[rank])


def lossy(view: View, turn: int, name: str) -> Iterator[Claim]:
    """Bounded error; with error feedback also: nothing is lost."""
    method: Any = view.method
    old, new = view.state(turn - 1, "residual", name), view.state(turn, "residual", name)
    h = view.inputs(turn, name) + old
    rounding = rounding_of(method.codec)
    unit = U8 if method.card.summed_by_network else U  # the network sums bfloat16 in bfloat16
    mean, error = exchanged(view, h, rounding, on_wire=method.card.summed_by_network, unit=unit)
    yield "the mean", view.mean(turn, name), mean, error + (U * np.abs(h) + LEAST).mean(0)
    if method.feedback is not None:
        group = method.codec.group
        sizes = by_group((np.abs(h) + np.abs(new)).sum(0), group)
        yield _kept(view, turn, name, h - new, feedback_error(view.size, sizes))


def feedback_error(size: int, sizes: Array) -> Array:
    """Of sum(h - e') against N * mean with a codec fed back; ``sizes``: the largest of sum(|h| + |e'|) in a group.

    h, d = decode(h) <= 2 sizes, r = h - d, N - 1 additions of d, 1 / N and its product, rest = mean - again <= 2 sizes
    in sum, N * rest and e' = r + N * rest: a rounding each.
    """
    count = 1 + 1 + 2 * (size - 1) + 4 + 4 + 2 + 1
    return (count + SPARE) * U * sizes + 4 * size * LEAST


def _kept(view: View, turn: int, name: str, sent: Array, error: Array) -> Claim:
    """``sent`` (N, R, S), summed over the ranks, is N times the mean."""
    mean = view.mean(turn, name)
    if view.case.dtype == torch.bfloat16:
        error = error + view.size * (U8 * np.abs(mean) * (1 + U8) + LEAST8)
    return "input + what waited = N mean + what waits", view.size * mean, sent.sum(0), error


def integers(view: View, turn: int, name: str) -> Iterator[Claim]:
    """SDP4Bit, ZeRO++, QSDP: bounded error on each hop."""
    method: Any = view.method
    codec = method._intra_codec if view.played.exchange.comm.one_node else method.codec
    mean, error = exchanged(view, view.inputs(turn, name), rounding_of(codec))
    yield "the mean", view.mean(turn, name), mean, error


def loco(view: View, turn: int, name: str) -> Iterator[Claim]:
    method: Any = view.method
    old, new = view.state(turn - 1, "error", name), view.state(turn, "error", name)
    h = view.inputs(turn, name) + old
    mean, error = exchanged(view, h, rounding_of(method.codec))
    yield "the mean", view.mean(turn, name), mean, error + (U * np.abs(h) + LEAST).mean(0)
    if method.reset and (view.played.numbers[turn] + 1) % method.reset == 0:
        yield "the error after a reset", new, np.zeros_like(new), np.zeros_like(new)
        return
    # e' = beta e + (1 - beta) r: two products and a sum more, all of it divided by 1 - beta
    left = (new - method.beta * old) / (1 - method.beta)
    sizes = by_group((np.abs(h) + (np.abs(new) + 2 * np.abs(old)) / (1 - method.beta)).sum(0), method.group)
    error = (5 + SPARE) * U * sizes + (2 + SPARE) * view.size * LEAST / (1 - method.beta)
    yield _kept(view, turn, name, h - left, feedback_error(view.size, sizes) + error)


def _elementwise(view: View, turn: int, name: str, sent: Array, sizes: Array, roundings: int) -> Claim:
    """Conservation where each place is by itself: ``roundings`` of at most ``sizes`` (N, R, S), and the sum's."""
    count = roundings + view.size + 1 + SPARE
    return _kept(view, turn, name, sent, count * U * sizes.sum(0) + count * view.size * LEAST)


def topk(view: View, turn: int, name: str) -> Iterator[Claim]:
    method: Any = view.method
    given = view.inputs(turn, name)
    if method.feedback is None:
        chosen = np.stack([_largest(rows, method) for rows in given])
        yield _elementwise(view, turn, name, chosen, np.abs(chosen), 0)
        return
    old, new = view.state(turn - 1, "residual", name), view.state(turn, "residual", name)
    yield _elementwise(view, turn, name, given + old - new, np.abs(given) + np.abs(old), 1)
    yield from _sent_the_largest(given + old, new, method)


def trickle(view: View, turn: int, name: str) -> Iterator[Claim]:
    """Of gradients with masks of their own. Steps are made inside, merged masks are encoded twice: ``proof.laws``."""
    method: Any = view.method
    if method.updates is not None or method.mask == "merged":
        return
    given = view.inputs(turn, name)
    old, new = view.state(turn - 1, "residual", name), view.state(turn, "residual", name)
    yield _elementwise(view, turn, name, given + old - new, np.abs(given) + np.abs(old) + np.abs(new), 4)


def _largest(rows: Array, method: Any) -> Array:
    """The k largest of each row, ties to the lowest index, zeros elsewhere."""
    order = np.argsort(-np.abs(rows), axis=1, kind="stable")[:, : count_of(method.density, rows.shape[1])]
    found = np.zeros_like(rows)
    np.put_along_axis(found, order, np.take_along_axis(rows, order, 1), 1)
    return found


def _sent_the_largest(h: Array, new: Array, method: Any) -> Iterator[Claim]:
    """No more than k of a row were sent, and nothing that waits is larger than what was sent (up to rounding of h)."""
    sent = (new == 0) & (h != 0)
    least = np.where(sent, np.abs(h), np.inf).min(-1)
    most = np.abs(new).max(-1)
    yield "what waits, above the least that was sent", np.maximum(most - least, 0), 0 * most, 2 * U * most + LEAST
    many = np.maximum(sent.sum(-1) - count_of(method.density, h.shape[-1]), 0).astype(float)
    yield "values sent, above k", many, 0 * many, 0 * many


def dgc(view: View, turn: int, name: str) -> Iterator[Claim]:
    method: Any = view.method
    given, old, new = (view.inputs(turn, name), view.state(turn - 1, "residual", name),
                       view.state(turn, "residual", name))  # fmt: skip
    before, after = view.state(turn - 1, "velocity", name), view.state(turn, "velocity", name)
    velocity = method.momentum * before + given
    sizes = np.abs(method.momentum * before) + np.abs(given)
    yield _elementwise(view, turn, name, velocity + old - new, sizes + np.abs(old), 4)
    yield from _sent_the_largest(velocity + old, new, method)
    where = new != 0
    yield "the velocity where it waits", after, np.where(where, velocity, 0), 4 * U * sizes + 2 * LEAST


def radius(view: View, turn: int, name: str) -> Iterator[Claim]:
    old, new = view.state(turn - 1, "residual", name), view.state(turn, "residual", name)
    given = view.inputs(turn, name)
    # at a resample step h = g + scale e and e' = (1 - scale) e: four roundings
    yield _elementwise(view, turn, name, given + old - new, np.abs(given) + 2 * np.abs(old), 4)


def tagc(view: View, turn: int, name: str) -> Iterator[Claim]:
    """Sums of multiples of one quantum are exact; h and the mean's product with fl(1 / N) are rounded."""
    method: Any = view.method
    old, new = view.state(turn - 1, "residual", name), view.state(turn, "residual", name)
    given = view.inputs(turn, name)
    counts = view.small(turn, "counts", name)  # of this step: "left" adds up those before it
    guessed = counts is not None and counts[0] > 0
    if not (method.leftovers == "median" and guessed):
        yield _elementwise(view, turn, name, given + old - new, np.abs(given) + np.abs(old) + np.abs(new), 3)


def separate(view: View, turn: int, name: str) -> Iterator[Claim]:
    """The mean is the projection of the mean; what waits is what that left out."""
    method: Any = view.method
    number = view.played.numbers[turn]
    old, new = view.state(turn - 1, "residual", name), view.state(turn, "residual", name)
    h = view.inputs(turn, name) + old
    restart = bool(method.reset) and number % method.reset == 0
    projected, error = _projected(view, turn, name, h)
    more = U * np.abs(h).sum(0)
    yield _kept(view, turn, name, projected, error + more)
    if restart:
        yield "what waits after a restart", new, np.zeros_like(new), np.zeros_like(new)
    elif method._weight_of_old < 1:
        share = 1 - method._weight_of_old
        left = (new - method._weight_of_old * old) / share
        sizes = (np.abs(h) + (np.abs(new) + np.abs(old)) / share).sum(0)
        yield _kept(view, turn, name, h - left, 2 * error + more + (6 + SPARE) * U * sizes)


def _projected(view: View, turn: int, name: str, h: Array) -> tuple[Array, Array]:
    """C(h) (N, R, S) by this step's matrix, and the error (R, S) of its sum over the ranks.

    Products of ``block`` and m terms, with magnitudes in place of values. The fast transform has log2(block) additions
    for the same sums, but of partial sums of other terms, which are all below sum|x| / sqrt(block).
    """
    method: Any = view.method
    width, block, srht = view.played.spans[name][1], method._estimator.block, method.estimator == "cyclic_srht"
    drawn = method._estimator.draw(view.case.seed, name, view.played.numbers[turn], torch.device("cpu"))
    matrix = matrix_of(Projection(method._estimator, [(0, width, drawn)])).double().numpy()
    kept = matrix.shape[1]
    scale = 1 / kept  # of the paper's

    def through(values: Array, by: Array) -> Array:
        padded = np.zeros((*values.shape[:-1], width))
        padded[..., : values.shape[-1]] = values
        if srht:
            tiles = padded.reshape(*values.shape[:-1], -1, block, LANES)
            found = np.einsum("bm,cm,...cl->...bl", by, by, tiles)
        else:
            found = padded.reshape(*values.shape[:-1], -1, block) @ by @ by.T * scale
        return found.reshape(*values.shape[:-1], width)[..., : values.shape[-1]]

    # with magnitudes for the matrix, too: H's entries all have one, so this is the bound for partial sums as well
    count = 2 * (block + kept) + view.size + 8
    sizes = through(np.abs(h), np.abs(matrix)).sum(0)
    return through(h, matrix), count * U * sizes + count * view.size * LEAST * block


def powersgd(view: View, turn: int, name: str) -> Iterator[Claim]:
    """N P mean(q)^T against the sum of h - P q^T: products of r terms, each below |h_j|, the length of a column."""
    method: Any = view.method
    old, new = view.state(turn - 1, "residual", name), view.state(turn, "residual", name)
    h = view.inputs(turn, name) + old
    cols, rank = int(np.prod(view.case.shapes[name][1:])), method.rank  # type: ignore[index]
    matrices = h.reshape(view.size, -1, cols)
    lengths = np.sqrt((matrices**2).sum(1, keepdims=True)) * np.ones_like(matrices)
    sizes = np.abs(h) + rank * lengths.reshape(h.shape)
    yield _elementwise(view, turn, name, h - new, sizes, 2 * rank + 4)
    mean = view.mean(turn, name).reshape(-1, cols)
    yield from _is_a_projection(view, mean, matrices, rank, view.sent_before(turn, name))


def _is_a_projection(view: View, mean: Array, matrices: Array, rank: int, sent_before: bool) -> Iterator[Claim]:
    """P P^T h with orthonormal P: what is left is orthogonal to what was sent.

    With an error of P P^T h up to ``noise``, and of P^T P - 1 up to ``skew``: sums of ``rows`` terms, and twice r
    columns taken out. Nothing is sent of an h that is orthogonal to the last one's Q, but that only once.
    """
    h = matrices.mean(0)
    length = np.linalg.norm(h)
    sizes = np.linalg.norm(matrices, axis=(1, 2)).mean()
    unit = U8 if view.case.dtype == torch.bfloat16 else U
    rows, cols = h.shape
    skew = (4 * rank + rows) * U
    noise = (2 * rank + view.size + rows + cols) * U * sizes + 2 * unit * length + (rows + cols) * LEAST * rows
    if length <= 2**10 * noise:  # too small beside what the ranks hold, or among the subnormal numbers
        return
    left = np.array([(mean / length * ((h - mean) / length)).sum()])
    yield "what is left, along what was sent", left, 0 * left, np.array([4 * noise / length + 4 * skew])
    sent = float(mean.any() or sent_before)
    yield "something is sent, now or the step before", np.array([sent]), np.ones(1), np.zeros(1)


def scape(view: View, turn: int, name: str) -> Iterator[Claim]:
    """N m' + N x' + sum(e') = sum of (1 - b1) g + e, and N times b1 m + x; see scape.py for the letters."""
    method: Any = view.method
    if method.density == 1:
        yield from dense(view, turn, name)
        return
    given, b1 = view.inputs(turn, name), method.beta1
    old, new = view.state(turn - 1, "residual", name), view.state(turn, "residual", name)
    m, after = view.moment(turn - 1, name), view.moment(turn, name)
    x, waits = np.zeros_like(m), np.zeros_like(m)
    if view.case.owner:
        x, waits = (view.state(t, "common", name, 1)[:, 0] for t in (turn - 1, turn))
    came = ((1 - b1) * given + old).sum(0) + view.size * (b1 * m + x)
    went = view.size * (after + waits) + new.sum(0)
    sizes = ((1 - b1) * np.abs(given) + np.abs(old) + np.abs(new)).sum(0)
    sizes += view.size * (b1 * np.abs(m) + np.abs(x) + np.abs(after) + np.abs(waits))
    # products with b1 and 1 - b1 (and those two themselves), sums, twice each: at most 16 roundings, and N of the sum
    error = (16 + view.size + SPARE) * U * sizes
    clip = view.played.ranks[0][turn].clip
    if clip == 1:  # else the optimizer's moment is of the clipped gradient
        yield "moment and what waited = moment and what waits", went, came, error + 16 * view.size * LEAST
    # m' = (1 - b1) g^ + b1 m at the mask, by a division and the products and sums above
    mean = view.mean(turn, name)
    unit = U8 if view.case.dtype == torch.bfloat16 else U
    error = (1 - b1) * (unit * np.abs(mean) + LEAST8) + 8 * U * ((1 - b1) * np.abs(mean) + b1 * np.abs(m))
    if clip < 1:  # which is noticed by what it changes, from ROUNDED and EXACT on
        error += (1 - b1) * ROUNDED * np.abs(mean) + EXACT * np.abs(after) + 2.0**-120
    wanted = np.where(mean == 0, after, (1 - b1) * clip * mean + b1 * m)
    yield "the moment of the mean", after, wanted, error


def onebit(view: View, turn: int, name: str) -> Iterator[Claim]:
    method: Any = view.method
    given, b1 = view.inputs(turn, name), method.beta1
    where = view.counted(name)
    old, new = (view.state(t, "residual", name) * where for t in (turn - 1, turn))
    served, serves = (view.state(t, "server", name, 1)[:, 0] * where for t in (turn - 1, turn))
    m = _momentum(view, turn - 1, name) * where
    mean = view.mean(turn, name)
    came = ((1 - b1) * given + old - new).sum(0) + view.size * (b1 * m + served - serves)
    sizes = ((1 - b1) * np.abs(given) + np.abs(old) + np.abs(new)).sum(0)
    sizes += view.size * (b1 * np.abs(m) + np.abs(served) + np.abs(serves) + np.abs(mean))
    # h: three products and two sums; e' = h - C(h); N sums and 1 / N; + s; s' = x - C(x)
    error = (5 + 2 + view.size + 3 + SPARE) * 2 * U * sizes + 16 * view.size * LEAST
    if view.case.dtype == torch.bfloat16:
        error = error + view.size * (2 * U8 * np.abs(mean) + LEAST8)
    yield "momentum and what waited = momentum and what waits", view.size * mean, came, error
    yield from _one_scale_a_group((1 - b1) * given + b1 * m + old, new, where, method)


def _one_scale_a_group(h: Array, new: Array, where: Array, method: Any) -> Iterator[Claim]:
    """|C(h)| is the mean of |h|, or its root mean square, over the values of the group.

    A product with 1 / count and log2(group) + 1 additions of positive numbers, and six roundings of h and e'.
    """
    power = 2 if method.scale == "rms" else 1
    counts = np.maximum(_group_sum(where.astype(float), method.group), 1)
    scale = (_group_sum(np.abs(h) ** power * where, method.group) / counts) ** (1 / power)
    sizes = by_group((np.abs(h) + np.abs(new)) * where, method.group)
    # each product may be subnormal; squares of less than 2^-75 vanish
    least = (2.0**-70 if power == 2 else (method.group + 8) * LEAST) * np.ones_like(scale)
    error = (method.group.bit_length() + 8 + SPARE) * U * (scale + sizes) + least
    yield "the scale of a group", np.abs(h - new) * where, scale * where, error


def _momentum(view: View, turn: int, name: str) -> Array:
    """As all workers have received it, or, at first, Adam's own: (R, S)."""
    wire = view.small(turn, "moment", name)
    if wire is None:  # Adam's is of clipped gradients
        clip = view.small(turn, "clip")
        return view.moment(turn, name) / (1.0 if clip is None else clip)
    span, width = view.played.spans[name]
    codec = view.method.codec
    assert codec is not None
    return codec.decode(torch.from_numpy(wire), torch.empty(len(wire), width)).numpy()[:, :span].astype(np.float64)


LAWS: dict[str, Callable[[View, int, str], Iterator[Claim]]] = {
    "dense": dense, "fp32": dense, "none": none, "bf16": lossy, "int8": lossy,
    "radius": radius, "scape": scape, "separate": separate, "tagc": tagc, "lhc": tagc, "sdp4bit": integers,
    "zeropp": integers, "qsdp": integers, "loco": loco, "powersgd": powersgd, "topk": topk, "dgc": dgc,
    "onebit-adam": onebit, "trickle": trickle,
}  # fmt: skip
AT_THE_PLACE = ("dense", "fp32", "bf16", "int8", "sdp4bit", "zeropp", "qsdp", "none")
"""A value that is not finite shows at its own place of the mean, unless something waits."""
SHARED = ("mask", "q", "moment", "union", "peak", "left")
"""Kinds of state that all ranks must agree on."""


def claims(view: View, turn: int, name: str) -> Iterator[Claim]:
    method = view.method
    if getattr(method, "first", 0) > view.played.numbers[turn]:
        return dense(view, turn, name)
    if method.name == "tagc" and method.theta == 0:  # type: ignore[attr-defined]
        return dense(view, turn, name)
    return LAWS.get(method.name, lambda *of: iter(()))(view, turn, name)


# All laws of a case.


def of_one_play(view: View) -> list[str]:
    """What is wrong with a play: turn by turn, then its bytes."""
    found: list[str] = []
    for turn, end in enumerate(view.played.ends):
        if end == "forget":
            found += _left_behind(view, turn)
        if end != "keep":
            found += _shows(view, turn, end)
            continue
        found += _agreement(view, turn)
        if not view.may_overflow:
            found += _finite(view, turn)
        if not view.played.ranks[0][turn].counts:
            continue
        if not all(np.isfinite(values).all() for rank in view.played.ranks for values in _floats(rank[turn].state)):
            return found  # a sum that waits has left float32: from here on steps are not finite, which the guard sees
        for name in view.names:
            for claim in claims(view, turn, name):
                found += _compare(view, turn, name, claim)
        if view.case.only_zeros:
            found += _zeros(view, turn)
    return found + _as_planned(view)


def _floats(state: dict[str, Array]) -> Iterator[Array]:
    return (values for values in state.values() if values.dtype.kind == "f")


def _bits(values: Array) -> bytes:
    return values.tobytes()


def _agreement(view: View, turn: int) -> list[str]:
    """All ranks hold the same bits where they must, and have sent as many bytes."""
    found, first = [], view.played.ranks[0][turn]
    alone = view.method.card.alone(view.played.numbers[turn])
    same = view.method.rank_equal and not alone and not view.case.owner
    for rank, ranks in enumerate(view.played.ranks[1:], 1):
        other = ranks[turn]
        if same and _bits(first.mean) != _bits(other.mean):
            found.append(f"turn {turn}: ranks 0 and {rank} have different means")
        if same and any(_bits(first.weights[name]) != _bits(other.weights[name]) for name in view.names):
            found.append(f"turn {turn}: ranks 0 and {rank} have different weights")
        for key, values in first.state.items():
            if key[1:].partition("/")[0] in SHARED and key[0] == "=" and _bits(values) != _bits(other.state[key]):
                found.append(f"turn {turn}: ranks 0 and {rank} have different {key}")
        if first.bytes != other.bytes:
            found.append(f"turn {turn}: rank 0 sent {first.bytes} bytes, rank {rank} {other.bytes}")
    return found


def _finite(view: View, turn: int) -> list[str]:
    """Inputs that nothing can overflow with give a finite mean and finite state."""
    found = []
    for rank, ranks in enumerate(view.played.ranks):
        if not np.isfinite(ranks[turn].mean).all():
            found.append(f"turn {turn}: rank {rank} has a mean that is not finite, of moderate inputs")
        for key, values in ranks[turn].state.items():
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                found.append(f"turn {turn}: rank {rank} has {key} that is not finite, of moderate inputs")
    return found


def _compare(view: View, turn: int, name: str, claim: Claim) -> list[str]:
    what, got, wanted, tolerance = claim
    with np.errstate(invalid="ignore"):
        excess = np.abs(got - wanted) - tolerance
    if not (bad := ~(excess <= 0)).any():
        return []
    worst = np.unravel_index(int(np.nan_to_num(np.where(bad, excess, -np.inf), nan=np.inf).argmax()), got.shape)
    return [f"turn {turn}, {name}{[int(i) for i in worst]}: {what}: {got[worst]:.9g}, not {wanted[worst]:.9g} "
            f"(+- {np.broadcast_to(tolerance, got.shape)[worst]:.3g})"]  # fmt: skip


def _zeros(view: View, turn: int) -> list[str]:
    found = []
    for rank, ranks in enumerate(view.played.ranks):
        if ranks[turn].mean.any():
            found.append(f"turn {turn}: rank {rank} has a mean that is not zero, of zeros")
        for key, values in ranks[turn].state.items():
            if not key.startswith("=") and values.any():
                found.append(f"turn {turn}: rank {rank} has {key} that is not zero, of zeros")
    return found


def _as_planned(view: View) -> list[str]:
    """Bytes of a period of steps in the steady state; see ``period``."""
    steps = [turn for turn in view.turns if view.played.ranks[0][turn].counts]  # of those to keep
    first, period = _period(view)
    chosen = [turn for turn in steps if view.played.numbers[turn] >= first][:period]
    if view.played.plan is None or not period or len(chosen) < period:
        return []
    sent = sum(view.played.ranks[0][turn].bytes for turn in chosen) / period
    planned = view.played.plan()
    if abs(sent - planned) <= 1e-6 * max(sent, 1):
        return []
    return [f"{sent} bytes a step were sent, and {planned} announced"]


def _period(view: View) -> tuple[int, int]:
    """First step from which on, and number of steps over which, the plan is an average. 0: bytes follow the data."""
    method: Any = view.method
    if method.name == "radius":
        return method.card.steady, method.T
    if method.name == "scape" and method.density < 1:
        return method.card.steady, method.refresh
    if method.name == "onebit-adam" and view.case.owner:  # the first also gathers Adam's moment
        return method.card.steady + 1, 1
    if method.name == "local-steps":
        return method.card.steady, method.every
    if method.name == "lhc" or (method.name == "tagc" and method.theta):
        return 0, 0
    return method.card.steady, 1


def of_two_plays(plain: View, disturbed: View) -> list[str]:
    """The same bits twice, whatever was taken back in between."""
    found: list[str] = []
    kept = [turn for turn, end in enumerate(disturbed.played.ends) if end == "keep"]
    for rank, (one, other) in enumerate(zip(plain.played.ranks, disturbed.played.ranks, strict=True)):
        for turn, again in zip(plain.turns, kept, strict=True):
            found += _difference(f"rank {rank}, turn {turn}, again", one[turn], other[again])
    return found


def _left_behind(view: View, turn: int) -> list[str]:
    """State, moments and weights after a step that was taken back are what they were."""
    found = []
    for rank, ranks in enumerate(view.played.ranks):
        before = ranks[turn - 1] if turn else Taken(True, ranks[turn].mean, 0, {}, {}, ranks[turn].weights)
        found += _difference(f"rank {rank}, turn {turn}, taken back", before, ranks[turn], "state")
    return found


def _difference(where: str, one: Taken, other: Taken, what: str = "mean state") -> list[str]:
    """Of two that should have the same bits. What was never read is as good as zero."""
    found = []
    if "mean" in what and _bits(one.mean) != _bits(other.mean):
        found.append(f"{where}: another mean")
    if "mean" in what and one.bytes != other.bytes:
        found.append(f"{where}: {other.bytes} bytes, not {one.bytes}")
    for kind in ("state", "moments", "weights"):
        a, b = getattr(one, kind), getattr(other, kind)
        for key in sorted({*a, *b}):
            zeros = np.zeros_like(a.get(key, b.get(key)))
            if _bits(a.get(key, zeros)) != _bits(b.get(key, zeros)):
                found.append(f"{where}: another {key} in {kind}")
    return found


def _shows(view: View, turn: int, end: str) -> list[str]:
    """A NaN or an infinity that came in is in the mean or, where the step was kept to be looked at, in the state."""
    _, rank, tensor, value, _ = view.case.poison
    name = view.names[tensor]
    waits = [values for ranks in view.played.ranks for key, values in ranks[turn].state.items()
             if key.endswith(f"/{name}") and values.dtype.kind == "f"]  # fmt: skip
    places = ~np.isfinite(view.inputs(turn, name)).all(0)
    shown = ~np.isfinite(view.mean(turn, name, rank))
    if view.method.name in AT_THE_PLACE and not view.method.card.keeps_state and not shown[places].all():
        return [f"turn {turn}, {name}: {value} on rank {rank} is a finite mean at its place"]
    if end == "look" and not shown.any() and all(np.isfinite(values).all() for values in waits):
        return [f"turn {turn}, {name}: {value} on rank {rank} shows neither in the mean nor in what waits"]
    return []


def names_a_knob(message: str, make: Callable[[], Method]) -> bool:
    """Does a refusal say what to change?"""
    try:
        knobs = [knob.name for knob in knobs_of(make())]
    except Exception:  # it was the settings that were refused
        knobs = []
    return bool(re.search(rf"\b({'|'.join([*knobs, 'two_level', 'density', 'beta', 'k', 'ratio'])})\b", message))

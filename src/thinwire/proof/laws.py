"""The laws that every method obeys, on virtual ranks: for ours, and for anybody's own.

    from thinwire.proof.laws import check_laws

    check_laws(MyMethod)                    # raises AssertionError with a line for each law that is broken

On every engine that the method names, with 1 to 8 ranks, in one hop and in two, where the method takes two:

* ``ranks``: all ranks hold the same bits where they must, and send as many bytes; none where each goes its own way.
* ``promise``: what :class:`thinwire.core.method.Promise` says.
* ``bytes``: as many as planned, to the byte, in the steady state; no more where the method ``adapts``.
* ``repeats``: the same inputs give the same bits.
* ``undone``: a step that does not count leaves no trace.

Tolerances are those of float32 and of the method's format, and are counted, not fitted: U is half a unit in the last
place of float32 at 1. A value of the laws' small cases passes through at most ``ROUNDINGS`` roundings and one for each
of N ranks, sums of its own method's arithmetic (a product of two short rows, a transform of a short block) included,
each of them at most U times the length |x| of all that is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.exchange import AllReduce
from thinwire.core.method import Method, Rounding, carrier_of
from thinwire.proof.played import Played, Taken, Where, begun, common, play, small

WINDOW = 4
"""Steps of the steady state: two periods of the longest, ``T``."""
FEW = 4
"""Ranks up to which a case is played again: whether a step is forgotten does not depend on their number."""
U = 2.0**-24
ROUNDINGS = 32


EVERYWHERE = (
    *(Where(topology, size) for topology in ("all_reduce", "reduce_scatter") for size in (1, 2, 3, 5, 8)),
    *(Where("hsdp", *sizes) for sizes in ((1, 1), (2, 2), (3, 1), (5, 5), (8, 2))),
    *(Where(topology, *sizes) for topology in ("two_level", "two_level_owner") for sizes in ((4, 2), (6, 3), (8, 2))),
)


class Broken(NamedTuple):
    """A law that was broken, and how."""

    law: str
    what: str


def check_laws(cls: type[Method], *, where: Sequence[Where] = EVERYWHERE, **knobs: Any) -> None:
    """Hold the method ``cls`` to every law, wherever it runs. Small tensors are made worth compressing: see ``KNOBS``.

    Args:
        cls: a subclass of ``Method`` that can be made without arguments. knobs: to make it with.
        where: topologies and numbers of ranks; of those only the ones whose engine ``cls.engines`` names.

    Raises:
        AssertionError: a line for each law that does not hold: where, which, and how.
        ThinwireError: the method runs nowhere in ``where``, or compresses none of ``SHAPES``.
    """
    places = [place for place in where if place.engine in cls.engines]
    if not places:
        raise ThinwireError(f"{cls.name} runs on {', '.join(cls.engines)} only: nothing to play")
    found = [
        f"{cls.name} on {place.topology}, {place.size} ranks: {law}: {what}"
        for place in places
        for law, what in broken_laws(partial(small, cls, **knobs), place)
    ]
    if found:
        raise AssertionError("\n".join(found))


def broken_laws(make: Callable[[], Method], where: Where) -> list[Broken]:
    """The laws that what ``make`` makes breaks ``where``. None where the method takes one level and says so."""
    try:
        first = begun(make, where)
    except ThinwireError as refused:
        if where.topology.startswith("two_level") and "on DDP takes one level" in str(refused):
            return []
        raise
    steps = first.method.card.steady + 1 + WINDOW
    plain = play(make, where, steps)
    found = [*_ranks(plain), *_promise(plain), *_bytes(plain, first.plan.wire_bytes)]
    if plain.method.card.promise.kind == "lossy":
        found += _lossy(plain, play(make, where, 2, gradient=lambda rank, step, numel: torch.zeros(numel)))
    if where.size > FEW:
        return found
    disturbed = play(make, where, steps, undo=(0, steps - 3))
    if (what := _difference(plain, disturbed)) is not None:
        again = _difference(plain, play(make, where, steps))
        found.append(Broken("undone", what) if again is None else Broken("repeats", again))
    return found


def _ranks(played: Played) -> Iterator[Broken]:
    """All that hold the same parameters hold the same bits of their means and weights; all send as many bytes."""
    alike = not played.stages[-1].exchange.owner
    for number, rank in enumerate(played.ranks):
        # In two hops, ranks that do not exchange with each other have other shards, of which one may need more bytes.
        twin = number % played.where.per_node if len(played.stages) == 2 else 0
        for step, (one, other) in enumerate(zip(played.ranks[twin], rank, strict=True)):
            if one.sent != other.sent:
                yield Broken("ranks", f"step {step}: rank {twin} sends {one.sent} bytes, rank {number} {other.sent}")
                break
            if played.where.topology == "two_level":  # there all hold everything
                one = played.ranks[0][step]
            means, weights = other.equal and not other.alone, other.equal
            if alike and ((means and not _equal(one.mean, other.mean))
                          or (weights and not _equal(one.weights, other.weights))):  # fmt: skip
                yield Broken("ranks", f"step {step}: ranks {twin} and {number} hold different bits")
                break
            across = other.sent if len(played.stages) == 1 else 0
            if other.alone and not other.equal and (across or not _equal(other.stepped, other.weights)):
                yield Broken("ranks", f"step {step}: something of another rank reaches rank {number}, which is alone")
                break


def _promise(played: Played) -> Iterator[Broken]:
    """What each hop's method promises, of the ranks that exchange with each other."""
    ranks, per_node = played.ranks, played.where.per_node
    groups: list[list[list[list[Taken]]]] = [[ranks]]
    if len(played.stages) == 2:
        nodes = [ranks[first : first + per_node] for first in range(0, len(ranks), per_node)]
        groups = [nodes, [ranks[first::per_node] for first in range(per_node)]]
    for hop, of in enumerate(groups):
        for group in of:
            yield from _Books(played, hop, group).check()


class _Books:
    """The books of one exchange: what came in, what went out and what waits, parameter by parameter as rows (R, n)."""

    def __init__(self, played: Played, hop: int, ranks: list[list[Taken]]) -> None:
        method, exchange = played.stages[hop].method, played.stages[hop].exchange
        self.method, self.exchange, self.ranks, self.hop = method, exchange, ranks, hop
        self.promise = method.card.promise
        self.size, self.rows = len(ranks), exchange.bucket_rows(carrier_of(method).card.summed_by_network)
        self.places: dict[str, slice] = {}
        self.numel, place = ranks[0][0].hops[hop].given.numel(), 0
        width = self.numel // (self.rows if exchange.owner else 1)
        many = width // sum(of.local for of in played.parameters.values())  # rows of all nodes, side by side
        for name, of in played.parameters.items():
            self.places[name] = slice(place, place + many * of.local)
            place += many * of.local

    def check(self) -> Iterator[Broken]:
        exact = self.promise.kind == "exact"
        if self.promise.kind == "lossy":
            return
        for step, taken in enumerate(self.ranks[0]):
            if taken.alone and not taken.equal and self.promise.of == "weights":
                continue  # nothing comes in
            if exact:
                if not self._exact(step):
                    yield Broken("promise", f"step {step}: the mean is not, bit for bit, the stock engine's")
                    return
                continue
            for name, place in self.places.items():
                over = self._over(step, name, place)
                if not over <= 0:
                    yield Broken("promise", f"step {step}, {name}: off by {over:.3g} more than roundings explain")
                    return

    def _exact(self, step: int) -> bool:
        """The sum in rank order; DDP divides before, FSDP2 and HSDP after it."""
        given = [rank[step].hops[self.hop].given for rank in self.ranks]
        before = isinstance(self.exchange, AllReduce) and self.exchange.divide == "before"
        total = torch.zeros(())
        for i, values in enumerate(given):
            values = values * (1 / self.size) if before else values
            total = values if i == 0 else total + values
        mean = total if before else total / self.size
        means = [rank[step].hops[self.hop].mean for rank in self.ranks]
        return _equal(torch.cat(means) if self.exchange.owner else means[0], mean)

    def _over(self, step: int, name: str, place: slice) -> float:
        """By how much the books of ``name`` are off, beyond what roundings explain: see ``Promise``."""
        promise = self.promise
        given = torch.stack([self._flat(rank[step].hops[self.hop].given, place) for rank in self.ranks])
        mean = self._rows([rank[step].hops[self.hop].mean for rank in self.ranks], place)
        earlier: Tensor | float = 0.0
        if promise.of == "moments":
            beta1: float = self.method.beta1  # type: ignore[attr-defined]
            earlier = beta1 * self._moments(step - 1, place)
            given, mean = (1 - beta1) * given, self._moments(step, place)
        began = torch.zeros(())
        if promise.of == "weights" and self.ranks[0][step].alone:
            began = self._began(step, place)
            stepped, weights = ([getattr(rank[step], of) for rank in self.ranks] for of in ("stepped", "weights"))
            given = began - torch.stack([self._flat(values, place) for values in stepped])
            mean = began - self._rows(weights, place)
        old, new = (self._waiting(at, name) for at in (step - 1, step))  # nothing of it changes between rounds
        off = given.sum(0) + old.sum(0) - new.sum(0) + self.size * (earlier - mean)
        off = off * self._flat(torch.ones(self.numel), place)  # padding has no gradient to lose
        lengths = [*given, *old, *new, self.size * mean, self.size * torch.as_tensor(earlier), self.size * began]
        involved = sum(torch.linalg.vector_norm(values) for values in lengths)
        rounding = promise.rounding or Rounding("nothing")
        allowed = self.size * self._rounded(given + old, rounding)
        allowed += rounding.block**0.5 * (self.size + ROUNDINGS) * U * involved
        return float((_blocks(off, rounding.block) - allowed).max())

    def _rounded(self, encoded: Tensor, rounding: Rounding) -> Tensor:
        """How far from the mean of ``encoded`` (N, R, n) an exchange may end by the format: (R, blocks), lengths."""
        blocks = _blocks(encoded, rounding.block)
        if carrier_of(self.method).card.summed_by_network:  # the network rounds every one of its sums
            return (1 + rounding.value) ** self.size * self.size * _mean_off(blocks, rounding).mean(0)
        off = _mean_off(blocks, rounding).mean(0)
        if self.exchange.owner:
            return off
        return off + _mean_off(blocks.mean(0) + off, rounding)

    def _flat(self, values: Tensor, place: slice) -> Tensor:
        """A parameter's part of one rank's flat buffer, as rows (R, n)."""
        if self.exchange.owner:
            return values.view(self.rows, -1)[:, place].double()
        values = values[place].double()
        columns = -(-len(values) // self.rows)
        return torch.nn.functional.pad(values, (0, self.rows * columns - len(values))).view(self.rows, columns)

    def _rows(self, values: list[Tensor], place: slice) -> Tensor:
        """Of what all ranks hold whole, or each its own row of: (R, n)."""
        return self._flat(torch.cat(values) if self.exchange.owner else values[0], place)

    def _moments(self, step: int, place: slice) -> Tensor:
        moments = [rank[max(step, 0)].moments for rank in self.ranks]
        return self._rows([values * (step >= 0) for values in moments], place)

    def _began(self, step: int, place: slice) -> Tensor:
        """The weights when all ranks held the same ones last, before ``step``; zeros at first."""
        equal = [earlier for earlier in range(step) if self.ranks[0][earlier].equal]
        return self._rows([rank[max(equal, default=0)].weights * bool(equal) for rank in self.ranks], place)

    def _waiting(self, step: int, name: str) -> Tensor:
        """What waits on each rank after ``step``, (N, R, n); zeros before the first."""
        columns = -(-self._length(name) // (1 if self.exchange.owner else self.rows))
        total = torch.zeros((self.size, self.rows, columns), dtype=torch.float64)
        for number, rank in enumerate(self.ranks if step >= 0 else []):
            for kind, counts in self.promise.waits.items():
                found = rank[step].state.get(f"{kind}/{name}")
                if found is None:
                    continue
                if len(found) == self.rows:
                    total[number] += counts * found.double()
                else:
                    total[number, number] += self.size * counts * found[0].double()
        return total

    def _length(self, name: str) -> int:
        return self.places[name].stop - self.places[name].start


def _blocks(values: Tensor, block: int) -> Tensor:
    """The lengths (..., n / block) of blocks of neighbours of ``values`` (..., n)."""
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % block))
    return torch.linalg.vector_norm(values.unflatten(-1, (-1, block)), dim=-1)


def _mean_off(blocks: Tensor, rounding: Rounding) -> Tensor:
    """How far one encoding may be off, for blocks of these lengths (..., blocks): see ``Rounding``."""
    group = max(rounding.group // rounding.block, 1)
    padded = torch.nn.functional.pad(blocks, (0, -blocks.shape[-1] % group))
    largest = padded.unflatten(-1, (-1, group)).amax(-1).repeat_interleave(group, -1)[..., : blocks.shape[-1]]
    return rounding.value * blocks + rounding.step * rounding.block**0.5 * largest


def _lossy(played: Played, silent: Played) -> Iterator[Broken]:
    """Where something is thrown away: what arrives points where all ranks' gradients point; of zeros comes nothing."""
    for number, rank in enumerate(played.ranks):
        arrived = torch.stack([taken.mean for taken in rank]).sum(0)
        rows = common(played.numel).view(-1, len(arrived))  # all of it, or each rank's row; on HSDP those of a node
        if not float(arrived @ rows[number % len(rows)]) > 0:
            yield Broken("promise", f"what arrives on rank {number} does not point where the gradients do")
            return
    if any(taken.mean.any() for rank in silent.ranks for taken in rank):
        yield Broken("promise", "of gradients that are zero comes a mean that is not")


def _bytes(played: Played, planned: float) -> Iterator[Broken]:
    """Over whole periods of the steady state, without its first step, which may still settle something."""
    for number, rank in enumerate(played.ranks):
        sent = [taken.sent for taken in rank][-WINDOW:]
        if played.method.card.bytes_follow_data:
            if max(sent) > planned * (1 + U):
                yield Broken("bytes", f"rank {number} sends {max(sent)} in a step, and at most {planned} are planned")
            continue
        periods = [p for p in range(1, WINDOW // 2 + 1) if all(a == b for a, b in zip(sent, sent[p:], strict=False))]
        if not periods:
            yield Broken("bytes", f"they follow no period, {sent}, and the method does not say that it adapts")
            return
        mean = sum(sent[: periods[0]]) / periods[0]
        if abs(mean - planned) > 1e-6 * max(mean, 1):
            yield Broken("bytes", f"rank {number} sends {mean} per step, and {planned} are planned")
            return


def _difference(one: Played, other: Played) -> str | None:
    """Where two plays differ first."""
    for number, (a, b) in enumerate(zip(one.ranks, other.ranks, strict=True)):
        for step, (taken, again) in enumerate(zip(a, b, strict=True)):
            if what := _unlike(taken, again):
                return f"step {step}, rank {number}: another {what}"
    return None


def _unlike(one: Taken, other: Taken) -> str | None:
    if not all(_equal(a.mean, b.mean) for a, b in zip(one.hops, other.hops, strict=True)):
        return "mean"
    if one.sent != other.sent:
        return "number of bytes"
    for key in sorted({*one.state, *other.state}):  # what was never read is as good as zero
        a, b = one.state.get(key), other.state.get(key)
        if a is None or b is None:
            a, b = (torch.zeros_like(of) if mine is None else mine for mine, of in ((a, b), (b, a)))  # type: ignore
        if not _equal(a, b):
            return key
    return None if _equal(one.weights, other.weights) else "weight"


def _equal(one: Tensor, other: Tensor) -> bool:
    """The same bits, or zeros of either sign."""
    return one.shape == other.shape and bool(torch.equal(one, other))

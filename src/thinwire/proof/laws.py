"""The laws that every method obeys, checked on virtual ranks, for Thinwire's methods and your own.

    from thinwire.proof.laws import check_laws

    check_laws(MyMethod)                    # raises AssertionError with a line for each law that is broken

On every engine that the method names, with 1 to 8 ranks, in one hop and, if the method takes two, in two:

* ``ranks``: ranks hold the same bits where they must, and send equally many bytes; none if each goes its own way. Where
  they share weights that each differs from (``Card.common``), nothing but those reaches a rank.
* ``promise``: the method keeps its :class:`thinwire.core.method.Promise`.
* ``bytes``: the steady state sends exactly the planned bytes, or at most those if ``bytes_follow_data``.
* ``repeats``: the same inputs give the same bits.
* ``undone``: a step that does not count leaves no trace.

Tolerances are counted from float32 and the method's format, not fitted. U is half a unit in the last place of float32
at 1. In the laws' small cases a value passes through at most ``ROUNDINGS`` + N roundings (the sums of the method's own
arithmetic included: a product of two short rows, a transform of a short block), each at most U times the length |x| of
all values involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.exchange import bucket_rows
from thinwire.core.method import Method, Rounding, carrier_of
from thinwire.proof.ranks import Threads
from thinwire.proof.record import Rank, Recording, Setup, StepRecord, common, play, small

WINDOW = 4
"""Steps of the steady state: two of the longest periods, ``T``."""
FEW = 4
"""Ranks up to which a case is played again, since ``undone`` does not depend on their number."""
U = 2.0**-24
ROUNDINGS = 32


EVERYWHERE = (
    *(Setup(topology, size) for topology in ("all_reduce", "reduce_scatter") for size in (1, 2, 3, 5, 8)),
    *(Setup("hsdp", *sizes) for sizes in ((1, 1), (2, 2), (3, 1), (5, 5), (8, 2))),
    *(Setup(topology, *sizes) for topology in ("two_level", "two_level_owner") for sizes in ((4, 2), (6, 3), (8, 2))),
)


def check_laws(cls: type[Method], *, setups: Sequence[Setup] = EVERYWHERE, **knobs: Any) -> None:
    """Check every law for the method ``cls``, wherever it runs. ``KNOBS`` make it compress small tensors.

    Args:
        cls: a subclass of ``Method`` that can be made without arguments. knobs: arguments to make it with.
        setups: topologies and numbers of ranks; those whose engine is not in ``cls.engines`` are left out.

    Raises:
        AssertionError: laws are broken; one line for each says where, which, and how.
        ThinwireError: the method runs in none of ``setups``, or compresses none of ``SHAPES``.
    """
    setups = [setup for setup in setups if setup.engine in cls.engines]
    if not setups:
        raise ThinwireError(f"{cls.name} runs on {', '.join(cls.engines)} only: nothing to play")
    broken = [
        f"{cls.name} on {setup.topology}, {setup.size} ranks: {law}: {detail}"
        for setup in setups
        for law, detail in broken_laws(partial(small, cls, **knobs), setup)
    ]
    if broken:
        raise AssertionError("\n".join(broken))


def broken_laws(make: Callable[[], Method], setup: Setup) -> list[tuple[str, str]]:
    """List (law, how it is broken) for the methods of ``make``; empty if ``setup`` has two levels and they refuse."""
    try:
        first = Rank(make, setup, Threads(setup.size), 0)
    except ThinwireError as refused:
        if setup.topology.startswith("two_level") and "on DDP works on one level only" in str(refused):
            return []
        raise
    steps = first.method.card.steady + 1 + WINDOW
    plain = play(make, setup, steps)
    laws = [("ranks", _ranks(plain)), ("promise", _promise(plain)), ("bytes", _bytes(plain, first.plan.wire_bytes))]
    if first.method.card.promise.kind == "lossy":
        silent = play(make, setup, 2, gradient=lambda rank, step, numel: torch.zeros(numel))
        laws.append(("promise", _lossy(plain, silent)))
    broken = [(law, detail) for law, details in laws for detail in details]
    if setup.size > FEW:
        return broken
    disturbed = play(make, setup, steps, undo=(0, steps - 3))
    if (difference := _difference(plain, disturbed)) is not None:
        repeated = _difference(plain, play(make, setup, steps))
        broken.append(("undone", difference) if repeated is None else ("repeats", repeated))
    return broken


def _ranks(recording: Recording) -> Iterator[str]:
    """Check that ranks with the same parameters hold equal means and weights, and send equally many bytes."""
    stages = recording.first.road.stages
    replicated = not stages[-1].exchange.owner
    for number, rank in enumerate(recording.ranks):
        # In two hops, ranks that do not exchange with each other hold different shards, which may need unequal bytes.
        twin = number % recording.setup.per_node if len(stages) == 2 else 0
        for step, (reference, record) in enumerate(zip(recording.ranks[twin], rank, strict=True)):
            if reference.sent != record.sent:
                yield f"step {step}: rank {twin} sends {reference.sent} bytes, rank {number} {record.sent}"
                break
            if recording.setup.topology == "two_level":  # all ranks hold everything
                reference = recording.ranks[0][step]
            means, weights = record.equal and not record.alone, record.equal
            if replicated and ((means and not torch.equal(reference.mean, record.mean))
                          or (weights and not torch.equal(reference.weights, record.weights))):  # fmt: skip
                yield f"step {step}: ranks {twin} and {number} hold different bits"
                break
            across = record.sent if len(stages) == 1 else 0
            if record.alone and not record.equal and stages[-1].method.card.common:
                yield from _mixes(recording, number, twin, step)
                continue
            if record.alone and not record.equal and (across or not torch.equal(record.stepped, record.weights)):
                yield f"step {step}: something of another rank reaches rank {number}, which is alone"
                break


def _mixes(recording: Recording, number: int, twin: int, step: int) -> Iterator[str]:
    """Check that a rank's weights lie between its own and the common ones, which all hold alike and a round moves.

    In a step that mixes the common weights in and then moves them, they are those from before.
    """
    record, stages = recording.ranks[number][step], recording.first.road.stages
    shared, earlier = (_shared_weights(recording, number, end) for end in (step, step - 1))
    if not torch.equal(shared, _shared_weights(recording, twin, step)):
        yield f"step {step}: ranks {twin} and {number} hold different common weights"
    sends_all_here = len(stages) == 1 and stages[0].exchange.ranks > 1
    if sends_all_here and not record.sent and not torch.equal(shared, earlier):
        yield f"step {step}: the common weights of rank {number} change, and nothing was sent"
    ends = torch.stack([record.stepped, shared, earlier])
    room = ROUNDINGS * U * ends.abs().amax(0)
    if not bool(((ends.amin(0) - room <= record.weights) & (record.weights <= ends.amax(0) + room)).all()):
        yield f"step {step}: something else than the common weights reaches rank {number}"


def _shared_weights(recording: Recording, number: int, step: int) -> Tensor:
    """Return the weights that all ranks share, flat, on rank ``number``; before there are any, the rank's own."""
    record, kind = recording.ranks[number][max(step, 0)], recording.first.road.stages[-1].method.card.common
    keys = [f"={kind}/{name}" for name in recording.first.engine.parameters]
    if step < 0 or keys[0] not in record.state:
        return record.weights * (step >= 0)
    return torch.cat([record.state[key].reshape(-1) for key in keys])


def _promise(recording: Recording) -> Iterator[str]:
    """Check the promise of each hop's method between the ranks that exchange with each other."""
    numbers, per_node = range(len(recording.ranks)), recording.setup.per_node
    groups: list[list[Sequence[int]]] = [[numbers]]
    if len(recording.first.road.stages) == 2:
        nodes: list[Sequence[int]] = [numbers[first : first + per_node] for first in numbers[::per_node]]
        groups = [nodes, [numbers[first::per_node] for first in range(per_node)]]
    for hop, hop_groups in enumerate(groups):
        for group in hop_groups:
            yield from _Books(recording, hop, group).check()


class _Books:
    """The books of one exchange: its input, its result and what waits, by parameter, as rows (R, n)."""

    def __init__(self, recording: Recording, hop: int, numbers: Sequence[int]) -> None:
        """``numbers``: of the ranks that exchange with each other in the ``hop``."""
        self.recording, self.numbers = recording, numbers
        ranks = [recording.ranks[number] for number in numbers]
        stage, parameters = recording.first.road.stages[hop], recording.first.engine.parameters
        method, exchange = stage.method, stage.exchange
        self.method, self.exchange, self.ranks, self.hop = method, exchange, ranks, hop
        self.promise = method.card.promise
        self.size, self.rows = len(ranks), bucket_rows(exchange, carrier_of(method).card.summed_by_network)
        self.columns: dict[str, slice] = {}
        self.numel, start = ranks[0][0].hops[hop].entered.numel(), 0
        width = self.numel // (self.rows if exchange.owner else 1)
        # The rows of all nodes lie side by side.
        node_rows = width // sum(parameter.local for parameter in parameters.values())
        for name, parameter in parameters.items():
            self.columns[name] = slice(start, start + node_rows * parameter.local)
            start += node_rows * parameter.local

    def check(self) -> Iterator[str]:
        if self.promise.kind == "lossy":
            return
        for step, record in enumerate(self.ranks[0]):
            if record.alone and not record.equal and self.promise.of == "weights" and not self.method.card.common:
                continue  # nothing comes in
            if self.promise.kind == "exact":
                if not self._exact(step):
                    yield f"step {step}: the mean is not, bit for bit, the stock engine's"
                    return
                continue
            for name, columns in self.columns.items():
                if self._rests(step, columns):
                    continue
                excess = self._excess(step, name, columns)
                if not excess <= 0:
                    yield f"step {step}, {name}: off by {excess:.3g} more than roundings explain"
                    return

    def _rests(self, step: int, columns: slice) -> bool:
        """Do the common weights, if there are such, stay as they were?"""
        if not self.method.card.common or not self.ranks[0][step].alone:
            return False
        return torch.equal(self._shared(step, columns), self._shared(step - 1, columns))

    def _shared(self, step: int, columns: slice) -> Tensor:
        """Return rows (R, n) of the common weights after ``step``."""
        return self._rows([_shared_weights(self.recording, number, step) for number in self.numbers], columns)

    def _exact(self, step: int) -> bool:
        """Compare with the mean of the sum in rank order; DDP divides before, FSDP2 and HSDP after it."""
        inputs = [rank[step].hops[self.hop].entered for rank in self.ranks]
        if self.exchange.divide == "before":
            mean = reduce(torch.add, [values * (1 / self.size) for values in inputs])
        else:
            mean = reduce(torch.add, inputs) / self.size
        means = [rank[step].hops[self.hop].mean for rank in self.ranks]
        return torch.equal(torch.cat(means) if self.exchange.owner else means[0], mean)

    def _excess(self, step: int, name: str, columns: slice) -> float:
        """Return how far the books of ``name`` are off beyond what roundings explain: see ``Promise``."""
        promise = self.promise
        inputs = torch.stack([self._flat(rank[step].hops[self.hop].entered, columns) for rank in self.ranks])
        mean = self._rows([rank[step].hops[self.hop].mean for rank in self.ranks], columns)
        earlier: Tensor | float = 0.0
        if promise.of == "moments":
            beta1: float = self.method.beta1  # type: ignore[attr-defined]
            earlier = beta1 * self._recorded("moments", step - 1, columns)
            inputs, mean = (1 - beta1) * inputs, self._recorded("moments", step, columns)
        start = torch.zeros(())
        if promise.of == "weights" and self.ranks[0][step].alone:
            if self.method.card.common:
                start, arrived = self._shared(step - 1, columns), self._shared(step, columns)
            else:
                common_steps = [number for number in range(step) if self.ranks[0][number].equal]
                start = self._recorded("weights", max(common_steps, default=-1), columns)
                arrived = self._recorded("weights", step, columns)
            # What arrives in this step is mixed in before the next round leaves.
            field = "weights" if self.method.card.delay else "stepped"
            by_rank = [self._flat(getattr(rank[step], field), columns) for rank in self.ranks]
            inputs = start - torch.stack(by_rank)
            mean = start - arrived
        old, new = self._waiting(step - 1, name), self._waiting(step, name)  # equal between rounds
        gap = inputs.sum(0) + old.sum(0) - new.sum(0) + self.size * (earlier - mean)
        gap = gap * self._flat(torch.ones(self.numel), columns)  # padding has no gradient to lose
        lengths = [*inputs, *old, *new, self.size * mean, self.size * torch.as_tensor(earlier), self.size * start]
        involved = sum(torch.linalg.vector_norm(values) for values in lengths)
        rounding = promise.rounding or Rounding("nothing")
        allowed = self.size * self._rounded(inputs + old, rounding)
        allowed += rounding.block**0.5 * (self.size + ROUNDINGS) * U * involved
        return float((_blocks(gap, rounding.block) - allowed).max())

    def _rounded(self, encoded: Tensor, rounding: Rounding) -> Tensor:
        """Bound the distance of an exchange's result from the mean of ``encoded`` (N, R, n); return (R, blocks)."""
        blocks = _blocks(encoded, rounding.block)
        if carrier_of(self.method).card.summed_by_network:  # the network rounds each of its sums
            return (1 + rounding.value) ** self.size * self.size * _mean_error(blocks, rounding).mean(0)
        gap = _mean_error(blocks, rounding).mean(0)
        if self.exchange.owner:
            return gap
        return gap + _mean_error(blocks.mean(0) + gap, rounding)

    def _flat(self, values: Tensor, columns: slice) -> Tensor:
        """Return a parameter's columns of one rank's flat buffer, as rows (R, n)."""
        if self.exchange.owner:
            return values.view(self.rows, -1)[:, columns].double()
        values = values[columns].double()
        width = -(-len(values) // self.rows)
        return torch.nn.functional.pad(values, (0, self.rows * width - len(values))).view(self.rows, width)

    def _rows(self, values: list[Tensor], columns: slice) -> Tensor:
        """Return rows (R, n) of ``values``, which all ranks hold whole, or of which each rank holds its row."""
        return self._flat(torch.cat(values) if self.exchange.owner else values[0], columns)

    def _recorded(self, field: str, step: int, columns: slice) -> Tensor:
        """Return rows (R, n) of the records' ``field`` after ``step``; zeros before the first step."""
        return self._rows([getattr(rank[max(step, 0)], field) * (step >= 0) for rank in self.ranks], columns)

    def _waiting(self, step: int, name: str) -> Tensor:
        """Return what waits on each rank after ``step``, (N, R, n); zeros before the first step."""
        columns = self.columns[name]
        width = -(-(columns.stop - columns.start) // (1 if self.exchange.owner else self.rows))
        total = torch.zeros((self.size, self.rows, width), dtype=torch.float64)
        for number, rank in enumerate(self.ranks if step >= 0 else []):
            for kind, counts in self.promise.waits.items():
                values = rank[step].state.get(f"{kind}/{name}")
                if values is None:
                    continue
                if len(values) == self.rows:
                    total[number] += counts * values.double()
                else:
                    total[number, number] += self.size * counts * values[0].double()
        return total


def _blocks(values: Tensor, block: int) -> Tensor:
    """Return the lengths (..., n / block) of blocks of neighbours of ``values`` (..., n)."""
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % block))
    return torch.linalg.vector_norm(values.unflatten(-1, (-1, block)), dim=-1)


def _mean_error(blocks: Tensor, rounding: Rounding) -> Tensor:
    """Bound the error of one encoding for ``blocks``' lengths (..., blocks): see ``Rounding``."""
    group = max(rounding.group // rounding.block, 1)
    padded = torch.nn.functional.pad(blocks, (0, -blocks.shape[-1] % group))
    largest = padded.unflatten(-1, (-1, group)).amax(-1).repeat_interleave(group, -1)[..., : blocks.shape[-1]]
    return rounding.value * blocks + rounding.step * rounding.block**0.5 * largest


def _lossy(recording: Recording, silent: Recording) -> Iterator[str]:
    """Check that a lossy method's means point where all ranks' gradients point, and that zeros give zeros."""
    numel = recording.first.engine.numel
    for number, rank in enumerate(recording.ranks):
        arrived = torch.stack([record.mean for record in rank]).sum(0)
        rows = common(numel).view(-1, len(arrived))  # all of it, or each rank's row; on HSDP those of a node
        if not float(arrived @ rows[number % len(rows)]) > 0:
            yield f"what arrives on rank {number} does not point where the gradients do"
            return
    if any(record.mean.any() for rank in silent.ranks for record in rank):
        yield "of gradients that are zero comes a mean that is not"


def _bytes(recording: Recording, planned: float) -> Iterator[str]:
    """Check bytes over whole periods of the steady state, without its first step, which may still settle something."""
    for number, rank in enumerate(recording.ranks):
        sent = [record.sent for record in rank][-WINDOW:]
        if recording.first.method.card.bytes_follow_data:
            if max(sent) > planned * (1 + U):
                yield f"rank {number} sends {max(sent)} in a step, and at most {planned} are planned"
            continue
        periods = [p for p in range(1, WINDOW // 2 + 1) if all(a == b for a, b in zip(sent, sent[p:], strict=False))]
        if not periods:
            yield f"they follow no period, {sent}, and the method does not say that it adapts"
            return
        mean = sum(sent[: periods[0]]) / periods[0]
        if abs(mean - planned) > 1e-6 * max(mean, 1):
            yield f"rank {number} sends {mean} per step, and {planned} are planned"
            return


def _difference(first: Recording, second: Recording) -> str | None:
    for number, (a, b) in enumerate(zip(first.ranks, second.ranks, strict=True)):
        for step, (first_record, second_record) in enumerate(zip(a, b, strict=True)):
            if difference := _unlike(first_record, second_record):
                return f"step {step}, rank {number}: another {difference}"
    return None


def _unlike(first: StepRecord, second: StepRecord) -> str | None:
    if not all(torch.equal(a.mean, b.mean) for a, b in zip(first.hops, second.hops, strict=True)):
        return "mean"
    if first.sent != second.sent:
        return "number of bytes"
    for key in sorted({*first.state, *second.state}):  # a missing entry counts as zeros
        a, b = first.state.get(key), second.state.get(key)
        if a is None or b is None:
            a, b = (torch.zeros_like(like) if value is None else value for value, like in ((a, b), (b, a)))  # type: ignore
        if not torch.equal(a, b):
            return key
    return None if torch.equal(first.weights, second.weights) else "weight"

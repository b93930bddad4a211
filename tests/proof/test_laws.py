"""Laws over a table of all methods and topologies, on virtual ranks."""

from __future__ import annotations

import pytest
import torch

from thinwire import methods
from thinwire.base.alignment import padded
from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Bucket, Piece
from thinwire.core.exchange import AllReduce, ReduceScatter, bucket_rows
from thinwire.core.state import State, dump_state, load_state
from thinwire.network.comm import Comm
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadComm, Threads
from threaded import reduce_on_threads

SHAPES = {"a.weight": 300, "a.bias": 7, "b.weight": 129, "c.weight": 1}
METHODS = ["dense", "fp32", "bf16", "int8", "int8(group=16)"]
FEEDBACK = ["int8(feedback='gradients')", "int8(group=16, feedback='gradients')"]
TOPOLOGIES = ["all_reduce", "reduce_scatter"]
TOLERANCE = {"dense": 1e-6, "fp32": 1e-6, "bf16": 0.03, "int8": 0.04}
"""Largest error of a mean of standard normal values, absolute: two roundings at |x| up to 4."""


def gradients(rank: int, step: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def run(method: str, topology: str, size: int, **more):
    return reduce_on_threads(
        lambda: methods.resolve(method),
        more.pop("gradients", gradients),
        topology=topology,
        size=size,
        shapes=SHAPES,
        **more,
    )


def exact(results, step: int) -> torch.Tensor:
    return torch.stack([rank[step]["input"].double() for rank in results]).mean(0)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("method", METHODS)
def test_the_mean(method, topology, size):
    results = run(method, topology, size)
    expected = exact(results, 0)
    error = TOLERANCE[method.split("(")[0]]
    for rank, result in enumerate(results):
        mean = result[0]["mean"].double()
        mine = expected if topology == "all_reduce" else expected.view(size, -1)[rank]
        assert (mean - mine).abs().max() < error


@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_hold_the_same_bits(method):
    results = run(method, "all_reduce", 4, steps=3)
    for step in range(3):
        assert all(torch.equal(rank[step]["mean"], results[0][step]["mean"]) for rank in results)


def _per_parameter(flat: torch.Tensor, topology: str, size: int) -> dict[str, torch.Tensor]:
    """The engine's flat buffer by parameter: (numel,), padded with zeros to what the residual holds."""
    found, offset = {}, 0
    spans = {name: -(-numel // size) for name, numel in SHAPES.items()}
    for name, numel in SHAPES.items():
        if topology == "all_reduce":
            values = flat[offset : offset + numel]
            found[name] = torch.nn.functional.pad(values, (0, spans[name] * size - numel)).double()
            offset += numel
        else:
            found[name] = flat.view(size, -1)[:, offset : offset + spans[name]].reshape(-1).double()
            offset += spans[name]
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("method", FEEDBACK)
def test_nothing_is_lost(method, topology):
    """Sum over ranks of input + last residual - residual = N * mean, value by value, whatever was rounded."""
    size, steps = 3, 4
    results = run(method, topology, size, steps=steps)
    for step in range(steps):
        if topology == "all_reduce":
            mean = results[0][step]["mean"]
        else:
            mean = torch.stack([rank[step]["mean"] for rank in results]).reshape(-1)
        got = _per_parameter(mean, topology, size)
        for name in SHAPES:
            total = torch.zeros_like(got[name])
            for rank in results:
                total += _per_parameter(rank[step]["input"], topology, size)[name]
                total -= rank[step][f"residual/{name}"].reshape(-1).double()
                if step:
                    total += rank[step - 1][f"residual/{name}"].reshape(-1).double()
            assert (total - size * got[name]).abs().max() < 1e-5


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("method", FEEDBACK)
def test_feedback_sends_the_whole_gradient_in_the_end(method, topology):
    """A constant gradient: the average of what was received tends to its mean."""

    def constant(rank, step, numel):
        return gradients(rank, 0, numel)

    results = run(method, topology, 2, steps=64, gradients=constant)
    expected = exact(results, 0)
    for rank, result in enumerate(results):
        mine = expected if topology == "all_reduce" else expected.view(2, -1)[rank]
        error = torch.stack([step["mean"].double() for step in result]).mean(0) - mine
        once = (result[0]["mean"].double() - mine).abs().max()
        assert error.abs().max() < 0.1 * once


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_what_the_exchange_says(method, topology, size):
    made = methods.resolve(method)
    results = run(method, topology, size)
    ledger, world = Ledger(), Threads(size)
    comm = ThreadComm(world, 0, ledger)
    exchange = AllReduce(comm) if topology == "all_reduce" else ReduceScatter(comm)
    rows = bucket_rows(exchange, made.card.summed_by_network)
    width = sum(padded(padded(numel, rows) // rows, made.card.group) for numel in SHAPES.values())
    row_bytes = 4 * width if made.codec is None else made.codec.wire_bytes(width)
    expected = (1 if exchange.owner else 2) * (size - 1) / size * rows * row_bytes
    for result in results:
        assert float(result[0]["bytes"]) == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("topology", ["two_level", "two_level_owner"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (6, 2), (6, 3), (4, 1), (3, 3)])
def test_two_levels_give_the_mean_too(method, topology, size, per_node):
    results = run(method, topology, size, per_node=per_node)
    expected = exact(results, 0)
    for rank, result in enumerate(results):
        mine = expected if topology == "two_level" else expected.view(size, -1)[rank]
        assert (result[0]["mean"].double() - mine).abs().max() < TOLERANCE[method.split("(")[0]]


def test_groups_never_straddle_parameters():
    """A parameter's huge values do not touch its neighbour's precision."""

    def spiky(rank, step, numel):
        flat = torch.full((numel,), 0.01)
        flat[:300] = 1e6
        return flat

    for result in run("int8", "all_reduce", 2, gradients=spiky):
        assert (result[0]["mean"][300:] - 0.01).abs().max() < 1e-4


def test_a_rank_that_calls_other_verbs_does_not_hang():
    world = Threads(2)

    def body(rank):
        comm: Comm = ThreadComm(world, rank, Ledger())
        if rank == 0:
            comm.all_reduce(torch.zeros(3))

    with pytest.raises(TimeoutError):
        world.run(body)


def _bucket(names, rows=2, group=4, numel=10):
    pieces = [Piece(name, i * numel, numel) for i, name in enumerate(names)]
    return Bucket(pieces, rows=rows, owner=False, group=group, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_packing_and_unpacking_is_exact(rows, group):
    bucket = _bucket(["a", "b", "c"], rows, group, numel=11)
    flat = torch.arange(1.0, 34.0)
    packed = torch.full(bucket.shape, torch.nan)
    bucket.copies.pack(flat, packed)
    back = torch.full((33,), torch.nan)
    bucket.copies.unpack(packed, back)
    assert torch.equal(back, flat)
    assert packed.isfinite().all()
    assert packed.sum() == flat.sum()
    assert all(segment.start % group == 0 for segment in bucket.segments)


def test_state_follows_parameters_when_buckets_are_rebuilt():
    state = State()
    first = _bucket(["a", "b"])
    values = state.write("residual", first)
    first.copies.pack(torch.arange(20.0), values)
    state.commit()
    saved = dump_state(state)
    for name in ("b", "a"):
        state.read("residual", _bucket([name]))
    moved = dump_state(state)
    assert saved.keys() == moved.keys() == {"residual/a", "residual/b"}
    assert all(torch.equal(saved[key], moved[key]) for key in saved)
    fresh = State()
    load_state(fresh, saved)
    fresh.read("residual", _bucket(["b", "a"]))
    assert all(torch.equal(saved[key], value) for key, value in dump_state(fresh).items())


def test_a_rolled_back_step_leaves_state_as_it_was():
    state, bucket = State(), _bucket(["a"])
    state.write("residual", bucket).fill_(1)
    state.commit()
    state.write("residual", bucket).fill_(2)
    state.rollback()
    assert (state.read("residual", bucket) == 1).all()
    state.write("residual", bucket).fill_(3)
    state.commit()
    assert (state.read("residual", bucket) == 3).all()


def test_state_of_another_shape_is_refused_by_name():
    state = State()
    load_state(state, {"residual/a": torch.zeros(3, 5)})
    with pytest.raises(ThinwireError, match=r"residual.*of a.*another world size"):
        state.read("residual", _bucket(["a"]))


@pytest.mark.parametrize("text", ["int8(", "int8(64)", "int8(group=x)", "int8(group=-1)", "int8(dense=3", "", "int8)("])
def test_method_names_that_cannot_be_read(text):
    with pytest.raises(ThinwireError):
        methods.resolve(text)


def test_method_names():
    assert methods.resolve("INT8").name == "int8"
    assert methods.resolve("onebit_adam").name == "onebit-adam"
    method = methods.resolve("int8(group=64, dense='head.*', feedback='gradients')")
    assert (method.group, method.dense, method.feedback) == (64, ("head.*",), methods.Gradients())
    assert methods.resolve(str(method)) == method

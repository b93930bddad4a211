"""TAGC and LHC beyond the laws of test_linear.py: sizes that follow the union, the oracle, bytes, odd values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from papers.tagc import TAGC as TagcPaper
from papers.tagc import one_bit_index, peel
from thinwire import methods
from thinwire.base.alignment import padded
from thinwire.base.errors import ThinwireError
from thinwire.base.random import seed_of
from thinwire.core.exchange import bucket_rows
from thinwire.core.method import Parameter, Run
from thinwire.core.selection import keep_dense
from thinwire.core.state import State, load_state
from thinwire.methods import LHC, TAGC
from thinwire.methods.papers import tagc as tagc_module
from thinwire.network.ledger import Ledger
from thinwire.ops.sketch.reference import hashes
from thinwire.plan.plan import plan_of
from thinwire.proof.ranks import Threads, parameters_for
from threaded import exchange_on, reduce_on_threads

TOPOLOGIES = ["all_reduce", "reduce_scatter"]


def noise(rank: int, step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def hot(agree: int):
    """A tenth of the values is large: the same ones on all ranks in the first ``agree`` steps, then each its own."""

    def make(rank: int, step: int, numel: int) -> Tensor:
        values = 0.01 * noise(rank, step, numel)
        start = 0 if step < agree else rank * (numel // 10)
        values[start : start + numel // 10] += 5
        return values

    return make


def sparse(rank: int, step: int, numel: int) -> Tensor:
    """5% of the values are not zero, elsewhere on every rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.where(torch.rand(numel, generator=generator) < 0.05, noise(rank, step, numel), 0)


def run(make, gradients, size, topology="all_reduce", shapes=None, **more):
    shapes = {"w": 6400} if shapes is None else shapes
    return reduce_on_threads(make, gradients, topology=topology, size=size, shapes=shapes, **more)


def tagc(**knobs):
    return lambda: TAGC(**{"smallest": 0, "send": ("*",), "feedback": "gradients", **knobs})


def left(results) -> list[int]:
    """Left over in each step."""
    counts = [int(step["facts"]["left-overs so far"]) for step in results[0]]
    return [b - a for a, b in zip([0, *counts], counts, strict=False)]


def measured(step) -> tuple[int, int, int]:
    """After a step: left over so far, the largest union since w's sketch was sized, and the one it is sized for."""
    method = TAGC()
    method.state = State()
    load_state(method.state, {key: value for key, value in step.items() if key.startswith("=")})
    return method._measured("w")


def missing(results) -> float:
    """The largest value of any step that is neither in the mean nor in an accumulator, on an all-reduce."""
    worst, before = 0.0, torch.zeros(())
    for step in range(len(results[0])):
        now = sum(rank[step]["residual/w"].double().flatten() for rank in results)
        given = sum(rank[step]["input"].double() for rank in results)
        worst = max(worst, float((given + before - now - len(results) * results[0][step]["mean"]).abs().max()))
        before = now
    return worst


# sizes


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("size", "resize"), [(2, 100), (3, 3), (4, 100)])
def test_against_the_pseudo_code(topology, size, resize, monkeypatch):
    """50 steps against the pseudo-code in float64, peeled element by element, resized on schedule."""
    columns, keep, load = 2560, 128, 0.79
    monkeypatch.setattr(tagc_module, "LOAD", load)
    monkeypatch.setattr(tagc_module, "RESIZE", resize)
    rows = size if topology == "reduce_scatter" else 1
    make = tagc(theta=0.95)

    def gradients(rank, step, numel):  # supports that agree at first and drift apart, as in training
        common = 3 * noise(99, 0, numel) * max(0, 1 - step / 30)
        return common + noise(rank, step, numel)

    results = run(make, gradients, size, topology, {"w": columns * rows}, steps=50)
    papers = [TagcPaper(columns, size, keep) for _ in range(rows)]
    union, largest, total = min(size * keep, columns), 0, 0
    for step in range(50):
        cells = math.ceil(union / load / 3) + 8
        table, signs = (x.tolist() for x in hashes(seed_of(0, "w", step), torch.arange(columns), cells))
        seen = []

        def recover(values, index, table=table, signs=signs, cells=cells, seen=seen):
            out = peel(values, index, lambda i: ([row[i] for row in table], signs[i]), 3 * cells)
            seen.append((len(index), int(np.isnan(out).sum())))
            return out

        given = [gradients(n, step, columns * rows).double().numpy().reshape(rows, -1) for n in range(size)]
        sums = [given[n][row] + p.accumulators[n] for n in range(size) for row, p in enumerate(papers)]
        biggest = max(np.abs(each).max() for each in sums)
        # values are sent in units of 2^-(20 - log2 N) of the power of two above the largest: half a unit stays behind
        rounding = 2.0 ** (math.frexp(biggest)[1] - (20 - math.ceil(math.log2(size))) - 1) + 1e-5
        for row, paper in enumerate(papers):
            expected = paper.step([g[row] for g in given], recover)
            assert np.abs(results[row][step]["mean"].double().numpy() - expected).max() < rounding
            for n in range(size):
                acc = results[n][step]["residual/w"][row].double().numpy()
                assert np.abs(acc - paper.accumulators[n]).max() < rounding
                paper.accumulators[n] = acc  # or a value within rounding of the k-th would end the comparison
        largest = max(largest, *(count for count, _ in seen))
        total += sum(lost for _, lost in seen)
        if step % resize == 0 or step & (step - 1) == 0:
            union, largest = largest, 0
    assert 0 < total == results[0][-1]["facts"]["left-overs so far"]


def test_the_size_is_of_the_largest_union_since_the_last():
    def once(rank, step, numel):
        return hot(agree=0 if step == 6 else 99)(rank, step, numel)

    results = run(tagc(theta=0.95), once, 4, steps=10)
    _, peaks, unions = zip(*map(measured, results[0]), strict=True)
    assert unions[7] == unions[4] and unions[8] > 1.5 * unions[7]  # step 6's, sized from after step 8
    assert [peak > 0 for peak in peaks][4:] == [False, True, True, True, False, True]


def test_dense_is_left_again_when_the_union_turns_out_smaller():
    """Eight masks of 10% might cover 80%, for which a sketch is no smaller than the tensor: but these agree."""
    results = run(tagc(theta=0.9), hot(agree=99), 8, steps=4)
    assert [step["facts"]["tensors sent dense"] for step in results[0]] == [0] * 4  # as they are sized from then on
    sent = [float(step["bytes"]) for step in results[0]]
    assert sent[0] > 2 * 7 / 8 * 4 * 6400 and sent[1] < 0.25 * sent[0]
    assert (results[0][0]["residual/w"] == 0).all() and missing(results) < 1e-4


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_bytes_of_sketch_dense_fallback_and_lhc(topology, monkeypatch):
    """To the byte, also in the steps in which the size changes; several parameters share a bucket."""
    monkeypatch.setattr(tagc_module, "RESIZE", 2)
    size = 4  # ring shares of whole bytes
    shapes = {"a": size * 1500, "b": size * 260, "c": size * 1600}
    for make, gradients in ((tagc(theta=0.9), noise), (tagc(theta=0.5), noise),
                            (lambda: LHC(smallest=0, send=("*",)), sparse)):  # fmt: skip
        results = run(make, gradients, size, topology, shapes, steps=5)
        for step in range(1, 5):
            method, exchange = make(), exchange_on(topology, Threads(size), 0, Ledger())
            method.state = State()
            load_state(method.state, {k: v for k, v in results[0][step - 1].items() if k.startswith("=")})
            parameters = parameters_for(exchange, shapes)
            method.begin(Run(parameters, exchange, 5))
            expected, rows = 0.0, bucket_rows(exchange, True)
            for name, parameter in parameters.items():
                columns = parameter.local if exchange.owner else parameter.numel
                sent = 3 * method._cells(name, columns, exchange) or padded(columns, 64)
                share = 1 if exchange.owner else 2  # all the way round a ring, or half of it
                expected += (size - 1) / size * (2 * (rows * padded(columns, 64) / 8 + 4) + share * 4 * rows * sent)
            assert float(results[0][step]["bytes"]) == expected
        assert expected <= plan_of(make(), parameters.values(), exchange).wire_bytes


def test_the_default_is_ten_times_smaller_than_dense_on_four_ranks():
    """Index and sketch together, once the union is known; masks that have nothing in common just miss it."""
    numel = 64 * 1000

    def half_common(rank, step, numel):
        return noise(99, step, numel) + noise(rank, step, numel)

    dense = 2 * 3 / 4 * 4 * numel
    for gradients, ratio in ((half_common, 10.0), (noise, 9.6)):
        sent = run(tagc(), gradients, 4, shapes={"w": numel}, steps=3)[0][-1]["bytes"]
        assert dense / float(sent) > ratio


# values


@pytest.mark.parametrize("scale", [1e-42, 1e-39, 1e-30, 1e30])
def test_values_of_any_size_stay_finite(scale):
    """The unit that values are rounded to must not leave float32."""
    results = run(tagc(theta=0.9), lambda *where: noise(*where) * scale, 2, steps=2)
    for rank in results:
        assert rank[1]["mean"].isfinite().all() and rank[1]["residual/w"].isfinite().all()
    assert missing(results) <= 1e-6 * scale + 1e-44


def test_a_skipped_overload_leaves_the_size_as_it_was():
    results = run(tagc(theta=0.95), hot(agree=5), 4, steps=7, skip=(5,))
    sizes = [measured(step) for step in results[0]]
    assert sizes[5] == sizes[4] and sizes[6] != sizes[5]


# selection


@pytest.mark.parametrize(
    ("name", "attention"),
    [("attn.in_proj_weight", True), ("attention.query_key_value.weight", True), ("attn.qkv_proj.weight", True),
     ("attn.Wqkv.weight", True), ("SelfAttention.q.weight", True), ("attn1.to_q.weight", True),
     ("attn.kv_proj.weight", True), ("attn.q_proj_weight", True), ("attn.c_attn.weight", True),
     ("attn.out_proj.weight", False), ("attn.c_proj.weight", False), ("attention.dense.weight", False),
     ("mlp.key_norm_up.weight", False), ("keyboard.weight", False), ("value_head.weight", False),
     ("lm_head.weight", False), ("attn.to_out.weight", False)],
)  # fmt: skip
def test_attention_inputs_of_the_usual_models(name, attention):
    parameter = Parameter(name, (512, 512), 512 * 512, "matrix", torch.float32, 512 * 512)
    assert keep_dense(TAGC(select="non-attention"), parameter) == ("attention input" if attention else None)


# LHC


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_lhc_sends_what_is_not_zero_and_all_of_it(topology):
    size, shapes = 3, {"a": 64 * 3 * 20, "b": 64 * 3 * 7}
    numel = sum(shapes.values())
    results = run(lambda: LHC(smallest=0, send=("*",)), sparse, size, topology, shapes, steps=4)
    assert left(results) == [0] * 4 and results[0][-1]["facts"]["tensors sent dense"] == 0
    for step in range(1, 4):
        mean = sum(sparse(n, step, numel) for n in range(size)) / size
        found = results[0][step]["mean"]
        if topology == "reduce_scatter":
            found = torch.cat([rank[step]["mean"] for rank in results])
        assert (found - mean).abs().max() < 2**-15
        assert float(results[0][step]["bytes"]) < 0.5 * float(results[0][0]["bytes"])


def test_lhc_on_gradients_that_are_not_sparse_goes_dense_and_says_so():
    results = run(lambda: LHC(smallest=0, send=("*",)), noise, 2, steps=2)
    assert results[0][-1]["facts"]["tensors sent dense"] == 1
    mean = sum(rank[1]["input"] for rank in results) / 2
    assert torch.allclose(results[0][1]["mean"], mean, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "message"),
    [("lhc(theta=0.5)", "no knob 'theta' .lhc sends whatever is not zero"),
     ("tagc(limit=0.5)", "no knob 'limit'")],
)  # fmt: skip
def test_refusals(method, message):
    with pytest.raises(ThinwireError, match=message) as error:
        methods.resolve(method)
    assert "\n" not in str(error.value)


def test_the_one_bit_index_loses_entries_that_ours_keeps():
    generator = np.random.default_rng(0)
    masks = [generator.random(32000) < 0.2 for _ in range(2)]
    union = masks[0] | masks[1]
    read = one_bit_index(masks)
    lost = (union & ~read).sum() / union.sum()
    assert 0.1 < lost < 0.25
    assert (read & ~union).any()  # and carries make entries that nobody sent
    assert np.array_equal(one_bit_index(masks, field_bits=4), union)
    agree = one_bit_index([masks[0], masks[0]])
    assert (masks[0] & ~agree).sum() > 0.5 * masks[0].sum()
    words = [torch.from_numpy(np.packbits(mask, bitorder="little").view(np.int64)) for mask in masks]
    ours = np.unpackbits((words[0] | words[1]).numpy().view(np.uint8), bitorder="little").astype(bool)
    assert np.array_equal(ours, union)

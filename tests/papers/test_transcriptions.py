"""The transcriptions themselves, without Thinwire: limits, conservation, values by hand."""

from __future__ import annotations

import numpy as np
import pytest

from papers.compressors import (
    Merged,
    RadiusUpdates,
    dense,
    each_worker,
    in_rows,
    kept,
    margin,
    shared_mask,
    sign_mean,
    symmetric_integers,
    top_k,
    top_k_int8,
)
from papers.local_steps import (
    LS1,
    SGD,
    AdamW,
    DiLoCo,
)
from papers.powersgd import PowerSGDUpdates
from papers.support import mean_of, zeros_like
from papers.trickle import Trickle, delivered_by, lost, taken_by

SHAPES = [(6, 5), (7,)]
B2, EPS = 0.95, 1e-8


def drawn(steps: int, workers: int, shapes=SHAPES, seed: int = 0):
    """gradients[step][worker][tensor]."""
    rng = np.random.default_rng(seed)
    common = [rng.standard_normal(shape) for shape in shapes]
    return [[[c + rng.standard_normal(c.shape) for c in common] for _ in range(workers)] for _ in range(steps)]


def start(shapes=SHAPES):
    rng = np.random.default_rng(99)
    return [rng.standard_normal(shape) for shape in shapes]


def three(tensor: int, t: int) -> list[int]:
    return [(tensor + t + i) % 7 for i in range(3)]


def close(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13)


def compressors():
    rng = np.random.default_rng(3)
    return {
        "dense": dense,
        "top": each_worker(lambda h: top_k(h, kept(h.size, 0.2))),
        "top8": each_worker(lambda h: top_k_int8(h, kept(h.size, 0.4), 4)),
        "sign": each_worker(lambda h: sign_mean(h, 8)),
        "mask": shared_mask(three),
        "radius": RadiusUpdates(0.3, 4),
        "printed": RadiusUpdates(0.3, 4, start=3, printed=True),
        "power": PowerSGDUpdates({0: rng.standard_normal((5, 2))}),
        "torch's": PowerSGDUpdates({0: rng.standard_normal((5, 2))}, own=False),
    }


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", list(compressors()))
def test_trickle_conserves(name, delayed):
    steps, workers, wd = 14, 3, 0.1  # the last is no dense step
    gradients, lrs = drawn(steps, workers), [0.01 / t for t in range(1, steps + 1)]
    trickle = Trickle(start(), workers, compressors()[name], three, delayed)
    seen = [start()]
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), 1):
        seen.append(trickle.step(t, g, lr, B2, EPS, wd))
    for i in range(2):
        taken = taken_by([[worker[i] for worker in step] for step in gradients], lrs, trickle.rs, B2, EPS)
        delivered = delivered_by([weights[i] for weights in seen], lrs, wd)
        waiting = [e[i] for e in trickle.e]
        np.testing.assert_allclose(taken, trickle.taken[i], rtol=1e-12)
        np.testing.assert_allclose(delivered, trickle.delivered[i], atol=1e-13)
        assert lost(taken, delivered, waiting) < 1e-12
        assert (max(np.abs(e).max() for e in waiting) > 0) == (name != "dense" and (name, i) not in POWER_SENDS_DENSE)
    trickle.deliver()
    close(trickle.taken, trickle.delivered)
    assert min(trickle.rs) > 0 and max(trickle.rs) <= 1


POWER_SENDS_DENSE = {("power", 1), ("torch's", 1)}


@pytest.mark.parametrize("name", ["dense", "full"])
def test_one_worker_at_density_1_is_adam_without_beta1(name):
    full = each_worker(lambda h: top_k(h, kept(h.size, 1.0)))
    trickle = Trickle(start(), 1, dense if name == "dense" else full, three)
    adam, weights = AdamW(0.0, B2, EPS, 0.1), start()
    for t, g in enumerate(drawn(10, 1), 1):
        weights = adam.step(weights, g[0], 0.01)
        close(trickle.step(t, g, 0.01, B2, EPS, 0.1), weights)
    np.testing.assert_allclose(trickle.rs, 1.0)


def test_equal_workers_are_one_worker():
    top = each_worker(lambda h: top_k(h, 3))
    one, four = Trickle(start(), 1, top, three), Trickle(start(), 4, top, three)
    for t, g in enumerate(drawn(10, 1), 1):
        close(one.step(t, g, 0.01, B2, EPS, 0.1), four.step(t, g * 4, 0.01, B2, EPS, 0.1))


def test_small_tensors_get_adamw_of_the_mean():
    trickle = Trickle(start(), 3, compressors()["top"], three, small=[False, True])
    adam, weights = AdamW(0.9, B2, EPS, 0.1), start()[1:]
    for t, g in enumerate(drawn(10, 3), 1):
        weights = adam.step(weights, [mean_of([worker[1] for worker in g])], 0.01)
        close(trickle.step(t, g, 0.01, B2, EPS, 0.1)[1:], weights)


def test_r_in_both_orders():
    gradients = drawn(4, 2, [(7,)])
    both = [Trickle([np.zeros(7)], 2, dense, three, delayed) for delayed in (False, True)]
    ratios = []
    for t, g in enumerate(gradients, 1):
        for trickle in both:
            trickle.step(t, g, 0.01, B2, EPS, 0.0)
        a, b = (worker[0][three(0, t)] for worker in g)
        ratios.append((((a + b) / 2) ** 2).sum() / ((a**2 + b**2) / 2).sum())
    running = [ratios[0]]
    for ratio in ratios[1:]:
        running.append(0.9 * running[-1] + 0.1 * ratio)
    np.testing.assert_allclose(both[0].rs, running)
    np.testing.assert_allclose(both[1].rs, [2**-0.5, *running[:-1]])


def test_compressors_on_known_values():
    h = np.array([1.0, -3.0, 3.0, 0.5, -3.0, 2.0])
    np.testing.assert_array_equal(top_k(h, 2), [0, -3, 3, 0, 0, 0])
    np.testing.assert_array_equal(top_k(h.reshape(2, 3), 2), [[0, -3, 3], [0, 0, 0]])
    signs = sign_mean(np.array([1.0, -5.0, 0.0, -4.0, -5.0]), 3)
    np.testing.assert_array_equal(signs, [2, -2, 2, -4.5, -4.5])
    x = np.array([127.0, 0.5, 0.0, 1.5, 2.5, -2.5, 254.0, 3.0])  # scales 1 and 2; the zero is not sent
    np.testing.assert_array_equal(top_k_int8(x, 7, 4), [127, 0, 0, 2, 2, -2, 254, 4])
    np.testing.assert_array_equal(symmetric_integers(np.zeros(3), 127, 2), np.zeros(3))
    assert margin(h, 1) == 0 and margin(h, 3) == pytest.approx(1 / 3)


def rows_apart(density):
    """Own masks row by row, as they are, without a server: a compressor for three workers."""
    return each_worker(lambda h: in_rows(h, 3, lambda row: top_k(row, kept(row.size, density))))


@pytest.mark.parametrize("merged", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("levels", [(127, 127), (7, 7), (127, None), (None, None)])
def test_merged_loses_nothing(levels, merged):
    """Of 30 values in rows of 10, and of 7 in rows of 3, 3 and 1: what was taken was delivered or waits in e or s."""
    steps, workers, wd = 14, 3, 0.1
    gradients, lrs = drawn(steps, workers), [0.01 / t for t in range(1, steps + 1)]
    merge = Merged(workers, 0.2, merged, 4, *levels)
    trickle = Trickle(start(), workers, merge, three, server=merge.server)
    seen = [start()]
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), 1):
        seen.append(trickle.step(t, g, lr, B2, EPS, wd))
        for i in range(2):
            waiting = [e[i] + trickle.s[i] for e in trickle.e]
            assert lost(trickle.taken[i], trickle.delivered[i], waiting) < 1e-12
    for i in range(2):
        taken = taken_by([[worker[i] for worker in step] for step in gradients], lrs, trickle.rs, B2, EPS)
        delivered = delivered_by([weights[i] for weights in seen], lrs, wd)
        assert lost(taken, delivered, [e[i] + trickle.s[i] for e in trickle.e]) < 1e-12
        assert max(np.abs(e[i]).max() for e in trickle.e) > 0
        assert trickle.s[i].any() or (levels[1] is None and merged > 0.2)
    trickle.deliver()
    close(trickle.taken, trickle.delivered)
    assert not any(s.any() for s in trickle.s)


@pytest.mark.parametrize("merged", [0.6, 1.0])  # three workers choose 2 of 10 and 1 of 3, so at most 6 of 10
def test_merged_beyond_the_union_is_own_masks_row_by_row(merged):
    merge = Merged(3, 0.2, merged, 4, None, None)
    both = [Trickle(start()[:1], 3, merge, three, server=merge.server)]
    both.append(Trickle(start()[:1], 3, rows_apart(0.2), three))
    for t, g in enumerate(drawn(10, 3, SHAPES[:1]), 1):
        close(*(trickle.step(t, g, 0.01, B2, EPS, 0.1) for trickle in both))
        assert not both[0].s[0].any()
        for n in range(3):
            close(both[0].e[n], both[1].e[n])


def test_merged_on_one_worker():
    """One row. Unrounded it is own masks; at densities of 1 Adam without beta1; a server may send less."""
    own = each_worker(lambda h: top_k(h, kept(h.size, 0.2)))
    plain = Trickle(start(), 1, own, three)
    merges = [Merged(1, d, m, 4, None, None) for d, m in ((0.2, 0.2), (1.0, 1.0), (0.2, 0.1))]
    same, full, less = (Trickle(start(), 1, merge, three, server=merge.server) for merge in merges)
    adam, weights = AdamW(0.0, B2, EPS, 0.1), start()
    for t, g in enumerate(drawn(10, 1), 1):
        weights = adam.step(weights, g[0], 0.01)
        close(same.step(t, g, 0.01, B2, EPS, 0.1), plain.step(t, g, 0.01, B2, EPS, 0.1))
        close(full.step(t, g, 0.01, B2, EPS, 0.1), weights)
        before, after = less.weights[0], less.step(t, g, 0.01, B2, EPS, 0.0)[0]
        assert np.count_nonzero(before - after) == 3
    assert less.s[0].any() and less.s[1].any() == (kept(7, 0.1) < kept(7, 0.2))


def test_merged_by_hand():
    """Two workers, five values in rows of three and two; two of three are chosen, and one of three is sent on."""

    class Given(Trickle):
        def update(self, n, i, t, g, r, lr, b2, eps):
            return g

    merge = Merged(2, 0.7, 0.4, 2, 7, 7)
    trickle = Given([np.zeros(5)], 2, merge, None, server=merge.server)
    # c_n (7, -2, 0, 14, 0), scales 1 and 2, and (-7, 0, 4, 1, -7), scales 1 and 1; y = (0, -1, 2, 7.5, -3.5)
    g = [[np.array([7, -1.6, 1, 14, 0])], [np.array([-7, 0.5, 3.8, 1, -7])]]
    close(trickle.step(1, g, 1.0, B2, EPS, 0.0), [[0, 0, -2, -7.5, 0]])
    close([trickle.e[0][0], trickle.e[1][0]], [[0, 0.4, 1, 0, 0], [0, 0.5, -0.2, 0, 0]])
    close(trickle.s, [[0, -1, 0, 0, -3.5]])
    # nothing new: c_n (0, 3/7, 1, 0, 0) and (0, 1/2, -3/14, 0, 0), y = (0, 13/28 - 1, 11/28, 0, -3.5)
    close(trickle.step(2, [[np.zeros(5)]] * 2, 1.0, B2, EPS, 0.0), [[0, 15 / 28, -2, -7.5, 3.5]])
    close([trickle.e[0][0], trickle.e[1][0]], [[0, -1 / 35, 0, 0, 0], [0, 0, 1 / 70, 0, 0]])
    close(trickle.s, [[0, 0, 11 / 28, 0, 0]])
    y = np.array([7, -1.6, 1, 14, 0])
    np.testing.assert_array_equal(Merged(2, 0.7, 0.7, 2, 7, 7).server(y), [7, -2, 0, 14, 0])
    np.testing.assert_array_equal(Merged(2, 0.7, 0.7, 2, 7, None).server(y), [7, -1.6, 0, 14, 0])


def test_radius_in_its_limits():
    for make in (lambda: RadiusUpdates(0.1, 1), lambda: RadiusUpdates(1.0, 5)):
        trickle, plain = (Trickle(start(), 3, c, three) for c in (make(), dense))
        for t, g in enumerate(drawn(8, 3), 1):
            close(trickle.step(t, g, 0.01, B2, EPS, 0.0), plain.step(t, g, 0.01, B2, EPS, 0.0))
    radius = RadiusUpdates(0.3, 4, start=3)
    assert [t for t in range(1, 13) if radius.chooses(t)] == [3, 7, 11]
    assert [t for t in range(1, 13) if RadiusUpdates(0.3, 4, 3, True).chooses(t)] == [4, 8, 12]


def test_powersgd_at_full_rank_is_dense():
    """The mean passes; a worker's own part need not."""
    full, h = PowerSGDUpdates({0: np.eye(5)}), [worker[0] for worker in drawn(1, 3, [(6, 5)])[0]]
    close([mean_of(full(0, 1, h))], [mean_of(h)])


def local_run(method, gradients, every, lr=0.01):
    for t, g in enumerate(gradients, 1):
        for n, own in enumerate(g):
            method.inner_step(n, own, lr)
        if t % every == 0:
            method.round()
    return method.weights


def test_h_1_with_sgd_is_dense():
    gradients = drawn(6, 3)
    expected = [w - 0.01 * sum(sum(worker[i] for worker in g) / 3 for g in gradients) for i, w in enumerate(start())]
    close(local_run(DiLoCo(start(), 3, SGD, 1.0, 0.0), gradients, 1), expected)


def test_one_worker_is_the_plain_optimizer():
    gradients = drawn(8, 1)
    adam, weights = AdamW(0.9, B2, EPS, 0.1), start()
    for g in gradients:
        weights = adam.step(weights, g[0], 0.01)

    def inner():
        return AdamW(0.9, B2, EPS, 0.1)

    close(local_run(DiLoCo(start(), 1, inner, 1.0, 0.0), gradients, 4), weights)
    ls1 = LS1(start(), 1, (0.9, B2), EPS, 0.1, None, compress=lambda x: x)
    close(local_run(ls1, gradients, 4), weights)
    for handover in ("own", "scaled", "kept"):
        ls1 = LS1(start(), 1, (0.9, B2), EPS, 0.1, None, compress=lambda x: x, handover=handover)
        for g in gradients[:4]:
            ls1.warm_step(g, 0.01)
        close(local_run(ls1, gradients[4:], 2), weights)


def test_outer_momentum_in_closed_form():
    gradients = drawn(5, 2, [(4,)])
    drifts = [0.01 * (g[0][0] + g[1][0]) / 2 for g in gradients]
    for nesterov in (True, False):  # held against torch.optim.SGD once; its import takes seconds
        expected = np.zeros(4)
        for t in range(5):
            u = sum(0.9 ** (t - s) * drifts[s] for s in range(t + 1))
            expected = expected - 0.7 * (drifts[t] + 0.9 * u if nesterov else u)
        close(local_run(DiLoCo([np.zeros(4)], 2, SGD, 0.7, 0.9, nesterov), gradients, 1), [expected])


def test_ls1_loses_nothing():
    method = LS1(start(), 3, compress=lambda x: sign_mean(x, 4))
    for g in drawn(3, 3, seed=1):
        method.warm_step(g, 0.01)
    before, taken = [w.copy() for w in method.weights], zeros_like(method.weights)
    for t, g in enumerate(drawn(12, 3), 1):
        for n in range(3):
            method.inner_step(n, g[n], 0.01)
        if t % 4 == 0:
            for i, w in enumerate(method.weights):
                taken[i] = taken[i] + mean_of([w - local[i] for local in method.local])
            method.round()
            assert all(np.array_equal(local[0], method.weights[0]) for local in method.local)
    for i in range(2):
        delivered = before[i] - method.weights[i]
        assert lost(taken[i], delivered, [e[i] + method.s[i] for e in method.e]) < 1e-12


def test_ls1_round_by_hand():
    method = LS1([np.zeros(2)], 2)
    method.local = [[-np.array([1.0, 3.0])], [-np.array([2.0, -2.0])]]  # the drifts, negated
    close(method.round(), [[-1.0, -1.0]])  # q_n (2, 2), (2, -2); z (2, 0), q (1, 1)
    close([method.e[0][0], method.e[1][0], method.s[0]], [[-1.0, 1.0], [0.0, 0.0], [1.0, -1.0]])
    close(method.round(), [[-1.5, -0.5]])  # no drift: q_n (-1, 1), (0, 0); z (.5, -.5) = q
    close([method.e[0][0], method.e[1][0], method.s[0]], np.zeros((3, 2)))


def test_ls1_divides_v_by_the_workers():
    one, four = LS1(start(), 1, eps=0.0), LS1(start(), 4, eps=0.0)
    (g,) = drawn(1, 1)
    moves = [w - one_w for w, one_w in zip(start(), one.inner_step(0, g[0], 0.01), strict=True)]
    close([w - own for w, own in zip(start(), four.inner_step(2, g[0], 0.01), strict=True)], [2 * m for m in moves])

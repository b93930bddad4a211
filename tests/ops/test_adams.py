"""AdamS against its formulas in float64, on every kind of tensor."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from programs import check_interpreted, needs_triton
from thinwire import AdamS
from thinwire.base.errors import ThinwireError
from thinwire.ops.adams import cpu, reference

SHAPES = [(7, 5), (33,), (1,), (0,), (4, 3, 2)]


def formulas(weights, gradients, lr, b1, b2, eps, decay, corrected):
    """Plain float64, from METHODS' text: v from the moment before the step."""
    moments = [torch.zeros_like(w) for w in weights]
    for t, step in enumerate(gradients, 1):
        for i, g in enumerate(step):
            v = b2 * moments[i] ** 2 + (1 - b2) * g**2
            moments[i] = b1 * moments[i] + (1 - b1) * g
            c1, c2 = (1 - b1**t, 1 - b2**t) if corrected else (1, 1)
            update = (moments[i] / c1) / ((v / c2).sqrt() + eps)
            weights[i] = weights[i] - lr * (update + decay * weights[i])
    return weights, moments


def drawn(steps: int, seed: int = 0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in range(steps)]


def trained(gradients, dtype=torch.float32, **knobs):
    weights = [torch.nn.Parameter(w.to(dtype)) for w in drawn(1, 9)[0]]
    optimizer = AdamS(weights, **knobs)
    for step in gradients:
        for weight, g in zip(weights, step, strict=True):
            weight.grad = g.to(dtype)
        optimizer.step()
    return weights, optimizer


@pytest.mark.parametrize("corrected", [True, False])
def test_fifty_steps_are_the_formulas(corrected):
    gradients = drawn(50)
    weights, optimizer = trained(gradients, lr=1e-2, bias_correction=corrected, weight_decay=0.1)
    expected, moments = formulas(drawn(1, 9)[0], gradients, 1e-2, 0.9, 0.95, 1e-8, 0.1, corrected)
    for weight, w, m in zip(weights, expected, moments, strict=True):
        assert torch.allclose(weight.double(), w, rtol=1e-5, atol=2e-6)
        assert torch.allclose(optimizer.state[weight]["exp_avg"].double(), m, rtol=1e-5, atol=1e-6)


def test_bfloat16_weights_stay_near_the_formulas():
    gradients = drawn(5)
    weights, _ = trained(gradients, torch.bfloat16, lr=1e-2)
    expected, _ = formulas(drawn(1, 9)[0], gradients, 1e-2, 0.9, 0.95, 1e-8, 0.01, True)
    assert weights[0].dtype == torch.bfloat16
    assert max((w.double() - e).abs().max() for w, e in zip(weights, expected, strict=True) if e.numel()) < 0.05


@pytest.mark.parametrize("b2, moved", [(0.95, 0.447), (0.999, 3.162)])
def test_a_weight_without_moment_moves_by_a_fixed_step(b2, moved):
    """(1-b1)/sqrt(1-b2) of lr, whatever the size of its gradient."""
    for size in (1e-3, 1.0, 1e3):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = AdamS([weight], lr=1.0, betas=(0.9, b2), weight_decay=0, bias_correction=False)
        weight.grad = torch.tensor([size])
        optimizer.step()
        assert weight.item() == pytest.approx(-moved, rel=1e-3)


def test_a_given_moment_takes_the_place_of_the_average():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = AdamS([weight], lr=0.1, weight_decay=0, bias_correction=False, eps=0)
    g = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
    given = torch.tensor([0.1001, 0.1999, 0.0, -0.4])  # 0: off the mask
    optimizer.next_moments[weight], weight.grad = given, g
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["exp_avg"].flatten(), given)
    assert torch.allclose(weight.detach(), 1 - 0.1 * given.view(2, 2) / (0.05**0.5 * g.abs()))
    assert not optimizer.next_moments
    optimizer.next_moments[weight], weight.grad = 0.9 * given + 0.1 * (given != 0), torch.full((2, 2), 0.25)  # clipped
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["exp_avg"].flatten(), 0.9 * given + 0.025 * (given != 0))


def test_a_compiled_step_is_the_step():
    weights, plain = ([torch.nn.Parameter(w.float()) for w in drawn(1, 9)[0]] for _ in range(2))
    optimizers = [AdamS(weights), AdamS(plain)]
    steps = [torch.compile(optimizers[0].step, backend="eager"), optimizers[1].step]
    for gradients in drawn(3):
        for own, step in zip((weights, plain), steps, strict=True):
            for weight, g in zip(own, gradients, strict=True):
                weight.grad = g.float()
            step()
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))


def test_a_saved_state_goes_on_bit_for_bit():
    gradients = drawn(10)
    whole, _ = trained(gradients)
    weights, optimizer = trained(gradients[:5])
    fresh = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    resumed = AdamS(fresh)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in gradients[5:]:
        for weight, g in zip(fresh, step, strict=True):
            weight.grad = g.float()
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, fresh, strict=True))


def test_weights_that_are_not_contiguous():
    base = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    results = []
    for make in (lambda: base.clone(), lambda: base.t().contiguous().t()):
        weight = torch.nn.Parameter(make())
        optimizer = AdamS([weight], lr=0.1)
        for seed in (2, 3):
            weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        results.append(weight.detach())
    assert torch.equal(*results)


def test_dtensors_are_updated_shard_by_shard(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = torch.nn.Parameter(torch.ones(4, 3))
        sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        g = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        for weight, gradient in ((plain, g), (sharded, distribute_tensor(g, mesh, [Shard(0)]))):
            optimizer = AdamS([weight], lr=0.1)
            weight.grad = gradient
            optimizer.step()
        assert torch.equal(sharded.full_tensor(), plain)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("knobs", [{"lr": -1}, {"betas": (0.9,)}, {"betas": (0.9, 1)}, {"eps": -1}])
def test_bad_knobs_are_refused(knobs):
    with pytest.raises(ThinwireError, match="AdamS"):
        AdamS([torch.nn.Parameter(torch.zeros(1))], **knobs)


def operands(n: int, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n, generator=generator).to(dtype).to(device) for _ in range(4)]


KNOBS = (1e-2, 0.9, 0.95, 1e-8, 0.999, 1.5)


def check(module, n: int, dtype: torch.dtype, device: str = "cpu") -> None:
    for use in (False, True):
        results = []
        for which in (reference, module):
            weight, moment, gradient, given = operands(n, dtype, device)
            given[::3] = (KNOBS[1] * moment + 0.1003 * gradient)[::3]  # not clipped; what is given
            given[1::3] = 0
            which.adams(weight, moment, gradient, given if use else None, *KNOBS)
            results.append((weight, moment))
        for actual, expected in zip(results[1], results[0], strict=True):
            exact = 2e-6 if dtype == torch.float32 else 2**-7
            assert torch.allclose(actual.float(), expected.float(), rtol=exact, atol=exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 31, 1000])
def test_kernel_is_the_reference(n, dtype):
    check(cpu, n, dtype)


@needs_triton
def test_triton_interpreted_is_the_reference():
    code = """
import torch
from test_adams import check
from thinwire.ops.adams import triton
for n, dtype in ((1, torch.float32), (1500, torch.float32), (1025, torch.bfloat16)):
    check(triton, n, dtype)
"""
    check_interpreted(code)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_the_reference():
    from thinwire.ops.adams import triton

    for n in (1, 1500):
        check(triton, n, torch.float32, "cuda")

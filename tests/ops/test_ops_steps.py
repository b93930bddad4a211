"""Steps of many tensors in one pass: the same bits as torch's two operations, whatever the shapes and dtypes."""

from __future__ import annotations

import pytest
import torch

from programs import check_interpreted, needs_triton
from thinwire.ops.steps import reference, take


def tensors(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((), (1,), (7, 3), (64, 80), (5000,))
    of = [[torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes] for _ in range(2)]
    of[0][2][0, 0], of[1][3][1, 1] = float("nan"), float("inf")
    return of[0], of[1]


FACTORS = ([1.0] * 5, [0.9, 1.0, 0.123, 0.999, 1 / 3])


def check(module, device: str = "cpu") -> None:
    for factors in FACTORS:
        weights, changes = tensors(device=device)
        expected = [weight.clone() for weight in weights]
        reference.take(expected, changes, factors)
        module.take(weights, changes, factors)
        assert all(
            torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(weights, expected, strict=True)
        )


def test_a_cpu_takes_the_steps_of_the_reference():
    check(pytest.importorskip("thinwire.ops.steps.cpu"))


@pytest.mark.parametrize("odd", ["bfloat16", "apart", "none"])
def test_whatever_cannot_be_taken_in_one_pass_takes_two(odd):
    weights, changes = ([], []) if odd == "none" else tensors(torch.bfloat16 if odd == "bfloat16" else torch.float32)
    if odd == "apart":
        weights[3], changes[3] = weights[3].t(), changes[3].t()
    expected = [weight.clone() for weight in weights]
    factors = FACTORS[1][: len(weights)]
    if odd != "none":
        torch._foreach_mul_(expected, factors)
        torch._foreach_sub_(expected, changes)
    take(weights, changes, factors)
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(weights, expected, strict=True))


@needs_triton
def test_triton_interpreted_is_the_reference():
    check_interpreted("import test_ops_steps\nfrom thinwire.ops.steps import triton\ntest_ops_steps.check(triton)\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_launch_on_a_gpu_is_the_reference():
    from thinwire.ops.steps import triton

    check(triton, "cuda")

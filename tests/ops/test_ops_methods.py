"""Whole methods on Triton's kernels: virtual ranks get what the CPU gives them, whatever methods ask of operations.

The tests of single operations call them as their docstrings say; methods call them as they need to.
"""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from programs import check_interpreted, needs_triton
from thinwire.methods import TABLE, resolve
from thinwire.methods.parts.updates import UpdateSpace
from thinwire.ops import backends, sketch
from thinwire.proof import ranks, record
from thinwire.proof.record import Setup, StepRecord, play, small

MORE = ("trickle(mask='merged', density=0.25, start=1, smallest=0)",
        "trickle(mask='merged', density=0.02, start=1, smallest=0)",
        "scape(density=0.02, warmup=2, smallest=0)", "tagc(feedback='gradients', theta=0.95, smallest=0)",
        "int8(feedback='gradients', smallest=0)", "onebit-adam(warmup=2, warmup_bits=4, smallest=0)")  # fmt: skip
NAMES = (*(cls.name for cls in TABLE if cls.name != "none"), *MORE)
STEPS = 3
NEAR = 1e-5
"""Sums over ranks, blocks and rows of a matrix have another order on each kind of device: of float32, at most so far
apart, as a share of their length. Choices that hang on them can differ later, so a GPU's first two exchanges count."""


def exchanges(name: str, setup: Setup, device: str) -> list[list[StepRecord]]:
    """Play ``name`` with tensors on ``device``: the records by rank and step."""

    def make():
        return resolve(name) if "(" in name else small(next(cls for cls in TABLE if cls.name == name))

    run = ranks.Threads.run

    def normal(seed, numel):
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed), device="cpu").to(device)

    def on_device(threads, function):
        def body(rank):
            torch.set_default_device(device)
            return function(rank)

        return run(threads, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks.Threads, "run", on_device)
        patch.setattr(record, "_normal", normal)
        return play(make, setup, STEPS).ranks


def rounded(ratio):
    """Make both devices measure how alike ranks are to 12 bits, as a server's choice can hang on the last one."""
    return lambda updates, names: (ratio(updates, names) * 4096).round() / 4096


def with_rounds(load, family: str, module: str, needs: str):
    """Load the sketches that stop after as many rounds as a GPU's in place of the CPU's kernels."""
    return load(family, *(("reference", "") if (family, module) == ("thinwire.ops.sketch", "cpu") else (module, needs)))


def apart(there: torch.Tensor, here: torch.Tensor) -> float:
    """The distance of ``there`` from ``here`` as a share of the latter's length; of bits, the share that differs."""
    there, here = there.cpu(), here.cpu()
    if torch.equal(there.nan_to_num(), here.nan_to_num()):
        return 0.0
    if not here.dtype.is_floating_point:
        return float((there != here).double().mean())
    return float((there - here).double().norm() / here.double().norm().clamp_min(1e-30))


def differences(name: str, expected: list[list[StepRecord]], found: list[list[StepRecord]], steps: int) -> list[str]:
    """What differs in the first ``steps`` exchanges, a line each."""
    lines = []
    for rank, (here, there) in enumerate(zip(expected, found, strict=True)):
        for step in range(steps):
            pairs = {"mean": (there[step].mean, here[step].mean), "weights": (there[step].weights, here[step].weights)}
            pairs |= {key: (there[step].state[key], value) for key, value in here[step].state.items()}
            lines += [
                f"{name}: rank {rank}, step {step}, {key}: {gap:.1e}"
                for key, (new, old) in pairs.items() if (gap := apart(new, old)) > NEAR
            ]  # fmt: skip
            if there[step].sent != here[step].sent:
                lines.append(f"{name}: rank {rank}, step {step}: sent {there[step].sent}, not {here[step].sent}")
    return lines


def compare(names: list[str], device: str, shapes: dict | None = None) -> None:
    """Play on the CPU and on ``device``; for "interpreted", on the CPU by Triton's kernels."""
    lines = []
    for name in names:
        for setup in (Setup("all_reduce", 3), Setup("reduce_scatter", 3)):
            cls = type(resolve(name))
            if setup.engine not in cls.engines:
                continue
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(UpdateSpace, "_ratio", rounded(UpdateSpace._ratio))
                if shapes is not None:
                    patch.setattr(record, "SHAPES", shapes)
                load = backends._load
                patch.setattr(sketch, "rounds_on", lambda device: sketch.ROUNDS)  # the CPU's kernels do as many as help
                patch.setattr(backends, "_load", partial(with_rounds, load))
                expected = exchanges(name, setup, "cpu")
                patch.setattr(backends, "_load", load)
                if device == "interpreted":
                    patch.setattr(backends, "_load", lambda family, *_, load=load: load(family, "triton", "triton"))
                found = exchanges(name, setup, "cpu" if device == "interpreted" else device)
            lines += differences(f"{name} on {setup.engine}", expected, found, 2 if device == "cuda" else STEPS)
    assert not lines, "\n".join(lines)


@needs_triton
@pytest.mark.parametrize("part", range(4))
def test_interpreted_kernels_give_methods_what_the_cpu_gives(part):
    names = json.dumps(NAMES[part::4])
    check_interpreted(f"import test_ops_methods\ntest_ops_methods.compare({names}, 'interpreted')\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_methods_what_the_cpu_gives():
    compare(list(NAMES), "cuda", {"a.weight": (300, 257), "b.weight": (65, 70)})

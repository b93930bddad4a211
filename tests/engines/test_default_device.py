"""After ``torch.set_default_device`` and ``set_default_dtype``: what the library makes for itself is what it says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import gpu_cases
import ranks
import thinwire
from breadth import dealt
from engines import build, made, train
from models import flat
from thinwire import methods

SOURCE = Path(thinwire.__file__).parent
MAKERS = {
    "arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros",
}  # fmt: skip
FLOATS = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}
"""Those that make numbers of the default dtype where none is named; ``full`` and ``tensor`` do of Python's floats."""


def unplaced(tree: ast.AST) -> list[int]:
    """Lines that make a tensor without a device."""
    return [
        node.lineno for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS
        and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]  # fmt: skip


def test_every_tensor_is_made_on_a_device_that_is_named():
    """Virtual ranks alone (proof) are where the default device is."""
    files = [file for file in SOURCE.rglob("*.py") if "proof" not in file.parts]
    assert not {str(file): lines for file in files if (lines := unplaced(ast.parse(file.read_text())))}
    assert unplaced(ast.parse("torch.zeros(3)\ntorch.zeros(3, device='cpu')\ntorch.zeros_like(x)")) == [1]


def untyped(tree: ast.AST) -> list[int]:
    """Lines that make floating-point numbers of the default dtype."""
    return [
        node.lineno for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        and not any(keyword.arg in ("dtype", None) for keyword in node.keywords)
        and (node.func.attr in FLOATS or (node.func.attr in ("full", "tensor") and _has_float(node.args)))
    ]  # fmt: skip


def _has_float(arguments: list[ast.expr]) -> bool:
    return any(
        (isinstance(node, ast.Constant) and isinstance(node.value, float))
        or (isinstance(node, ast.Name) and node.id == "float")
        for argument in arguments for node in ast.walk(argument)
    )  # fmt: skip


def test_every_floating_point_tensor_has_a_dtype_that_is_named():
    """Counts in bfloat16 stop at 256: Adam's bias correction did, and with it half of each step."""
    files = [file for file in SOURCE.rglob("*.py") if "proof" not in file.parts]
    assert not {str(file): lines for file in files if (lines := untyped(ast.parse(file.read_text())))}
    lines = "torch.zeros(3)", "torch.zeros(3, dtype=d)", "torch.tensor(0)", "torch.tensor([float(x)])"
    assert untyped(ast.parse("\n".join(lines))) == [1, 4]


def _trained(rank: int, world: int, kind: str) -> dict[str, bool]:
    """By method: are the weights the same on whichever device, in whichever dtype, tensors are made by default?"""
    found: dict[str, bool] = {}
    for spec in dealt(gpu_cases.METHODS, kind, ("ddp", "fsdp2")):
        if {"ddp": "ddp"}.get(kind, "fsdp2") not in methods.resolve(spec).engines:
            continue
        ends = []
        for default, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
            model = build(kind, world)
            optimizer = made(methods.resolve(spec).OPTIMIZER, model)
            train(model, optimizer, rank, range(1))  # the optimizer's own state is made by torch
            torch.set_default_device(default)
            torch.set_default_dtype(dtype)
            wire = thinwire.compress(model, optimizer, spec, steps=100)
            train(model, optimizer, rank, range(1, 6), wire, poison=(2, 0))
            wire.load_state_dict(wire.state_dict())
            train(model, optimizer, rank, range(6, 8), wire)
            wire.close()
            torch.set_default_device("cpu")
            torch.set_default_dtype(torch.float32)
            ends.append(flat(model))
        found[spec] = all(torch.equal(ends[0], end) for end in ends)
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_default_device_or_dtype_changes_nothing(kind):
    found = ranks.run(_trained, 2, kind)[0]
    assert len(found) > 4 and all(found.values()), found

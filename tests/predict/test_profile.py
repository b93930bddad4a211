"""A profile: FLOPs of modules by arithmetic, equal blocks, shared and uncalled parameters, what is kept."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import pretrained_models
from thinwire.base.errors import ThinwireError
from thinwire.cli.simulate import load_model
from thinwire.predict.forecast import on_meta
from thinwire.predict.profile import MORE_FLOPS, profile_of
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.pretrained import load
from thinwire.train.model.shapes import PRESETS, ModelConfig

BATCH, WIDTH, HIDDEN = 3, 16, 40


def meta(make):
    with torch.device("meta"):
        return make()


def tokens(length: int, batch: int = 1) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


def test_flops_of_linear_layers_are_their_arithmetic_per_sequence() -> None:
    model = meta(lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)))
    first, second = profile_of(model, (torch.zeros(BATCH, WIDTH, device="meta"),)).modules
    assert (first.parameters, second.parameters) == (("0.weight", "0.bias"), ("2.weight", "2.bias"))
    assert first.forward_flops == second.forward_flops == 2 * WIDTH * HIDDEN
    assert first.backward_flops == 2 * WIDTH * HIDDEN  # the input needs no gradient
    assert second.backward_flops == 4 * WIDTH * HIDDEN
    assert first.activation_bytes == 4 * (WIDTH + HIDDEN)  # its input, and what ReLU keeps: the second one's input
    assert second.activation_bytes == 0


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_equal_blocks_have_equal_figures_and_the_sum_is_the_usual_formula(family: str) -> None:
    shape = ModelConfig(family=family, layers=3, width=64, heads=4, hidden=160, context=32, vocabulary=96)  # type: ignore[arg-type]
    profile = profile_of(meta(lambda: Decoder(shape)), (tokens(32, 2), tokens(32, 2)))
    blocks: dict[str, list[tuple]] = {}
    for module in profile.modules:
        figures = (module.forward_flops, module.backward_flops, module.input_bytes, module.activation_bytes)
        blocks.setdefault(module.block, []).append((module.name.removeprefix(module.block), *figures))
    assert blocks["blocks.1"] == blocks["blocks.2"]
    matrices = 3 * (4 * 64 * 64 + (3 if family == "llama" else 2) * 64 * 160) + 64 * 96
    forward = sum(module.forward_flops for module in profile.modules)
    assert forward == 32 * 2 * matrices + 3 * 4 * 32 * 32 * 64
    assert sum(module.backward_flops for module in profile.modules) == 2 * forward
    assert profile.parameters == sum(p.numel() for p in meta(lambda: Decoder(shape)).parameters())


def test_a_tied_parameter_is_in_both_of_its_modules() -> None:
    profile = profile_of(meta(lambda: Decoder(PRESETS["tiny"])), (tokens(64), tokens(64)))
    users = [module.name for module in profile.modules if "embedding.weight" in module.parameters]
    assert users == ["embedding", "head"]


def test_bf16_halves_activations_and_no_flops_and_leaves_the_model_alone() -> None:
    model, inputs = meta(lambda: Decoder(PRESETS["small"])), (tokens(128),)
    single, half = profile_of(model, inputs), profile_of(model, inputs, torch.bfloat16)
    assert [module.forward_flops for module in single.modules] == [module.forward_flops for module in half.modules]
    assert 0.45 < half.activations[1] / single.activations[1] < 0.55
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_attention_keeps_what_fused_kernels_keep() -> None:
    """The matrix of attention (here 256 times the input) would be kept on the meta device's own path."""
    shape = ModelConfig(family="llama", layers=1, width=8, heads=4, context=1024, vocabulary=8)
    low, high = profile_of(meta(lambda: Decoder(shape)), (tokens(1024),)).activations
    assert low <= high < 4 * 1024 * 1024


class Strange(nn.Module):
    """A layer called twice, attention whose output matrix is used by its parent, and a scale and buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.register_buffer("table", torch.zeros(7, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.twice(self.twice(x * self.scale))
        return {"logits": self.attention(x, x, x)[0]}


def test_modules_called_twice_never_or_with_parameters_beside_children() -> None:
    profile = profile_of(meta(Strange), (torch.zeros(BATCH, 5, WIDTH, device="meta"),))
    assert [module.name for module in profile.modules] == ["", "twice", "twice", "attention"]
    root, first, second, attention = profile.modules
    assert root.parameters == ("scale",)
    assert first.parameters == second.parameters == ("twice.weight", "twice.bias")
    assert first.forward_flops == second.forward_flops == 2 * 5 * WIDTH * WIDTH
    assert set(attention.parameters) == {
        "attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj.weight", "attention.out_proj.bias"
    }  # fmt: skip


class Experts(nn.Module):
    """Tokens in order of their expert: a group of rows for each matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, WIDTH, HIDDEN, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.zeros(4, dtype=torch.int32, device="meta")
        return torch._grouped_mm(x, self.weight, offs=ends)


def test_a_token_costs_the_experts_that_it_meets() -> None:
    x = torch.zeros(32, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    (module,) = profile_of(meta(Experts), (x,)).modules
    assert (module.forward_flops, module.backward_flops) == (2 * WIDTH * HIDDEN, 4 * WIDTH * HIDDEN)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
        return x


def test_what_the_model_computes_again_is_counted_backward() -> None:
    """Of two linear layers the first is computed again: what the second makes, nobody needs."""
    inputs = (torch.zeros(1, WIDTH, device="meta", dtype=torch.float64, requires_grad=True),)
    profile = profile_of(meta(Checkpointed), inputs, torch.float64)
    assert [module.forward_flops for module in profile.modules] == [2 * WIDTH * WIDTH] * 6
    assert sum(module.backward_flops for module in profile.modules) == (6 * 4 + 3 * 2) * WIDTH * WIDTH


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class Calling(nn.Module):
    """Two layers; the second one is called through ``through``."""

    def __init__(self, through: Callable[[Any], Any] = lambda call: call) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(2))
        self.call = through(lambda module, x: module(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layers[1], self.layers[0](x))


@pytest.mark.parametrize("how", ["model.compile()", "torch.compile(model)", "layer.compile()", "a function", "no"])
def test_a_compiled_model_is_profiled_as_it_was_written_and_stays_compiled(how: str) -> None:
    """Dynamo gives up for good what it meets under a counter of operations: Auto counts before its trials."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *inputs: graphs.append(how) or graph.forward(*inputs)  # type: ignore[func-returns-value]

    compiled = functools.partial(torch.compile, backend=backend)
    torch._dynamo.reset()
    model: Any = Calling(compiled) if how == "a function" else Calling()
    if how == "torch.compile(model)":
        model = compiled(model)
    for module in {"model.compile()": [model], "layer.compile()": model.layers}.get(how, []):
        module.compile(backend=backend)

    def count() -> int:
        before = len(graphs)
        model(torch.zeros(BATCH, WIDTH)).sum().backward()
        return len(graphs) - before

    before = count()
    profile = profile_of(on_meta(model, set(), {}), (torch.zeros(BATCH, WIDTH, device="meta"),))
    assert (before > 0, count()) == (how != "no", before)
    assert profile == profile_of(meta(Calling), (torch.zeros(BATCH, WIDTH, device="meta"),))


class Reader(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean().item()


def test_what_cannot_be_profiled_is_one_line() -> None:
    with pytest.raises(ThinwireError, match="weight is not on the meta device"):
        profile_of(nn.Linear(2, 2), (torch.zeros(1, 2),))
    with pytest.raises(ThinwireError, match="cannot profile Reader") as caught:
        profile_of(meta(lambda: Reader(2, 2)), (torch.zeros(1, 2, device="meta"),))
    assert "\n" not in str(caught.value)
    with pytest.raises(ThinwireError, match="nothing that Linear returns depends on a trained parameter"):
        profile_of(meta(lambda: nn.Linear(2, 2).requires_grad_(False)), (torch.zeros(1, 2, device="meta"),))


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "deepseek"])
def test_a_pretrained_model_costs_what_its_steps_do_by_its_config_and_by_its_double(kind: str, tmp_path: Path) -> None:
    """``simulate`` makes it of its config.json; the doctor and ``auto`` make a double of the one that they train."""
    loaded, (ids, _) = load(str(pretrained_models.make(tmp_path, kind)), None), load_model("tiny", 16)[1]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=MORE_FLOPS) as count:
        loaded(torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long)).backward()
    for model in (on_meta(loaded, set(), {}), load_model(str(tmp_path), 16)[0]):
        modules = profile_of(model, (ids, ids)).modules
        assert sum(module.forward_flops + module.backward_flops for module in modules) == count.get_total_flops()


def test_seven_billion_parameters_take_seconds() -> None:
    """The processor's time: 2.0 s on a core with other work beside it."""
    model = meta(lambda: Decoder(PRESETS["llama-7b"]))
    begin = time.process_time()
    profile = profile_of(model, (tokens(2048), tokens(2048)), torch.bfloat16)
    assert time.process_time() - begin < 6
    assert profile.parameters == sum(p.numel() for p in model.parameters()) == 6_738_415_616

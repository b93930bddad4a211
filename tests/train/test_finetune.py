"""``thinwire train --init``: Hugging Face's models on our loop, instruction data, adapters; what comes out of it."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing

import pretrained_models
import ranks
from breadth import ALL
from thinwire.base.errors import ThinwireError
from thinwire.base.processes import free_port
from thinwire.cli import program as cli
from thinwire.train.checkpoint import trained_model
from thinwire.train.config import Config
from thinwire.train.data.corpus import read_corpus, split
from thinwire.train.data.token_files import find_token_files
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.data.windows import IGNORED, batches
from thinwire.train.job.setup import make_optimizers

needs_hub = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
in_full = pytest.mark.skipif(not ALL, reason="in make test-all and make test-frameworks")
SMALL = ["--eval-sequences", "4", "--batch-size", "2", "--seq-len", "24"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """llama/, gpt2/, deepseek/, text.txt and rows.jsonl."""
    folder = tmp_path_factory.mktemp("pretrained")
    for kind in ("llama", "gpt2", "deepseek"):
        pretrained_models.make(folder / kind, kind)
    (folder / "text.txt").write_text("".join(pretrained_models.TEXT))
    rows = [{"prompt": f"{i} times {i % 7} is ", "completion": str(i * (i % 7))} for i in range(100)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _train(rank: int, world: int, port: int, words: tuple[str, ...]) -> tuple[int, str]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.destroy_process_group()  # that of the tests: a run makes its own
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        status = cli.main(["train", *words])
    return status, said.getvalue()


def _train_and_keep(rank: int, world: int, port: int, words: tuple[str, ...]) -> tuple[int, str]:
    """Train, with buffers that move in every step (as a router's bias does); keep the model as trained in OUT.pt."""
    from thinwire.core.names import bare_name
    from thinwire.train.checkpoint.store import Checkpoints
    from thinwire.train.model.pretrained import Pretrained

    def move(module: torch.nn.Module, *passed: object) -> None:
        if isinstance(module, Pretrained) and module.training:
            for buffer in (buffer for name, buffer in module.named_buffers() if name.endswith("correction_bias")):
                buffer += torch.linspace(-0.1, 0.1, len(buffer))

    save = Checkpoints.save

    def keep(self: Checkpoints, *counts: int, model: torch.nn.Module, **others: object) -> None:
        whole = {bare_name(name): getattr(value, "full_tensor", lambda value=value: value)().clone()
                 for name, value in model.state_dict().items()}  # fmt: skip
        if rank == 0:
            torch.save(whole, f"{words[-1]}.pt")
        save(self, *counts, model=model, **others)

    Checkpoints.save = keep  # type: ignore[method-assign, assignment]
    handle = torch.nn.modules.module.register_module_forward_hook(move)
    try:
        return _train(rank, world, port, words)
    finally:
        Checkpoints.save = save  # type: ignore[method-assign]
        handle.remove()


def train(world: int, *words: str, how: object = _train) -> str:
    """``thinwire train``; what rank 0 says on standard error."""
    found = ranks.run(how, world, free_port(), words, warm="warm_frameworks", LOCAL_WORLD_SIZE=str(world))
    assert [status for status, _ in found] == [0] * world, found
    return found[0][1]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {f"{path.name}/{key}": value for path in sorted(checkpoint.glob("*.safetensors"))
            for key, value in load_file(path).items()}  # fmt: skip


def same_bits(one: Path, other: Path) -> None:
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys() and ours
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens).logits


@in_full
@needs_hub
def test_a_run_on_text_resumes_exactly_is_sampled_and_exported_with_equal_logits(place, tmp_path, capsys):
    """gpt2 has dropout and a tied head; it is trained on token files that its tokenizer made."""
    words = [
        "--init", str(place / "gpt2"), *SMALL, "--steps", "4", "--checkpoint-every", "2", "--lr", "0.01",
        "--method", "int8(smallest=0, feedback='gradients')",
    ]  # fmt: skip
    made = ["--tokenizer", f"folder:{place / 'gpt2'}", "--out", f"{tmp_path}/tokens"]
    assert cli.main(["tokenize", str(place / "text.txt"), *made]) == 0
    words += ["--corpus", f"{tmp_path}/tokens"]
    train(2, *words, "--out", f"{tmp_path}/whole")
    middle, last = tmp_path / "whole/checkpoints/step-000002", "checkpoints/step-000004"
    train(2, *words, "--resume", str(middle), "--out", f"{tmp_path}/again")
    same_bits(tmp_path / "whole" / last, tmp_path / "again" / last)
    summary = json.loads((tmp_path / "whole/summary.json").read_text())
    assert summary["valid_loss"] < summary["first_valid_loss"]

    found = trained_model.read(tmp_path / "whole")
    tokens = torch.arange(5, 60)[None]
    assert cli.main(["export", f"{tmp_path}/whole", f"{tmp_path}/hub"]) == 0
    with torch.no_grad():
        ours = found.model()(tokens)
    assert torch.equal(logits_of(tmp_path / "hub", tokens), ours)
    assert not torch.allclose(logits_of(place / "gpt2", tokens), ours, atol=1e-3)
    import transformers

    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hub").chat_template == pretrained_models.CHAT
    text = read_corpus([str(place / "text.txt")])
    files = find_token_files([f"{tmp_path}/tokens"], (), "bytes", model=(found.tokenizer, 304))
    assert files is not None
    for part, read in zip(split(text), (files.train, files.valid), strict=True):
        assert torch.equal(found.tokenizer.encode(part).long(), read[0 : len(read)])
    capsys.readouterr()
    assert cli.main(["sample", f"{tmp_path}/whole", "--prompt", "3 times", "--tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("3 times")
    assert cli.main(["inspect", f"{tmp_path}/whole"]) == 0
    assert found.init in capsys.readouterr().out
    assert cli.main(["export", f"{tmp_path}/whole", f"{tmp_path}/adapter", "--adapter"]) == 2
    assert "this run trained all weights" in capsys.readouterr().err


@needs_hub
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("llama", [], marks=in_full),
        pytest.param("gpt2", ["--engine", "fsdp2"], marks=in_full),
        ("deepseek", ["--method", "int8(smallest=0)"]),
        pytest.param("deepseek", ["--engine", "fsdp2"], marks=in_full),
        pytest.param("deepseek", ["--lora", "4", "--lora-targets", "q_b_proj"], marks=in_full),
    ],
)
def test_what_is_exported_and_resumed_is_the_model_that_was_trained_with_its_buffers(place, tmp_path, kind, words):
    words = ["--init", str(place / kind), "--data", str(place / "rows.jsonl"), *SMALL, "--lr", "0.01", *words,
             "--steps", "2", "--checkpoint-every", "1"]  # fmt: skip
    train(2, *words, "--out", f"{tmp_path}/run", how=_train_and_keep)
    trained = torch.load(tmp_path / "run.pt")
    model = trained_model.read(tmp_path / "run").model()
    rebuilt = model.state_dict()
    assert rebuilt.keys() == trained.keys()
    assert [name for name, value in trained.items() if not torch.equal(value, rebuilt[name])] == []
    tokens = torch.arange(5, 60)[None]
    with torch.no_grad():
        ours = model(tokens)
    assert cli.main(["export", f"{tmp_path}/run", f"{tmp_path}/hub"]) == 0
    torch.testing.assert_close(logits_of(tmp_path / "hub", tokens), ours, rtol=1e-4, atol=1e-5)
    if kind == "deepseek":
        biases = [name for name in trained if name.endswith("correction_bias")]
        begun = load_file(place / kind / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert biases and begun.any() and not any(torch.equal(begun, trained[name]) for name in biases)
        first, last = tmp_path / "run/checkpoints/step-000001", "checkpoints/step-000002"
        train(2, *words, "--resume", str(first), "--out", f"{tmp_path}/again", how=_train_and_keep)
        same_bits(tmp_path / "run" / last, tmp_path / "again" / last)


def _train_as_before(rank: int, world: int, port: int, words: tuple[str, ...]) -> tuple[int, str]:
    """Train as versions did that knew nothing of buffers."""
    from thinwire.train.checkpoint import state
    from thinwire.train.model import pretrained

    with mock.patch.object(state, "persistent_buffers", lambda model: {}):
        with mock.patch.object(pretrained, "persistent_buffers", lambda model: {}):
            return _train(rank, world, port, words)


@needs_hub
@pytest.mark.parametrize("more", [[], ["--lora", "4", "--lora-targets", "q_b_proj"]], ids=["whole", "lora"])
def test_a_checkpoint_of_a_version_that_saved_no_buffers_is_refused_for_that(place, tmp_path, more):
    words = ["--init", str(place / "deepseek"), "--data", str(place / "rows.jsonl"), *SMALL, *more]
    train(1, *words, "--steps", "1", "--out", f"{tmp_path}/run", how=_train_as_before)
    again = (*words, "--steps", "2", "--resume", "auto", "--out", f"{tmp_path}/run")
    ((status, said),) = ranks.run(_train, 1, free_port(), again, warm="warm_frameworks", LOCAL_WORLD_SIZE="1")
    assert status == 2 and "has buffers, which earlier versions of Thinwire did not save" in said
    with pytest.raises(ThinwireError, match="earlier version of Thinwire, which did not save" if more else "holds no"):
        trained_model.read(tmp_path / "run").model()


@needs_hub
def test_sequences_longer_than_the_model_is_made_for_are_refused(place, tmp_path):
    """gpt2 would end in a traceback, llama train on places that it does not know. By default they are no longer."""
    for kind, more, status in (("gpt2", ["--seq-len", "65"], 2), ("llama", ["--seq-len", "65"], 2), ("gpt2", [], 0)):
        words = ("--init", str(place / kind), "--corpus", str(place / "text.txt"), "--steps", "1", *more)
        found = ranks.run(_train, 1, free_port(), (*words, "--out", f"{tmp_path}/run"), warm="warm_frameworks")
        assert found[0][0] == status, found[0][1]
        assert not status or "--seq-len 65 is longer than the 64 tokens that" in found[0][1]


@needs_hub
def test_rows_longer_than_the_model_is_made_for_are_cut(place, tmp_path):
    rows = tmp_path / "long.jsonl"
    rows.write_text(f"{json.dumps({'prompt': '3 times 3 is ', 'completion': '9 ' * 200})}\n" * 30)
    words = ["--init", str(place / "gpt2"), "--data", str(rows), "--steps", "1", "--batch-size", "2"]
    assert "are longer than 64 tokens" in train(1, *words, "--out", f"{tmp_path}/run")


@needs_hub
def test_the_settings_that_a_run_leaves_repeat_it(place, tmp_path):
    words = ["--init", str(place / "llama"), "--data", str(place / "rows.jsonl"), *SMALL, "--steps", "1"]
    train(1, *words, "--out", f"{tmp_path}/first")
    train(1, "--config", f"{tmp_path}/first/config.yaml", "--out", f"{tmp_path}/again")
    same_bits(tmp_path / "first/checkpoints/step-000001", tmp_path / "again/checkpoints/step-000001")


@needs_hub
def test_evaluations_change_nothing_of_what_is_trained(place, tmp_path):
    """gpt2 has dropout, which draws in every step, also where no evaluation has set the model back to training."""
    words = ["--init", str(place / "gpt2"), "--corpus", str(place / "text.txt"), *SMALL, "--steps", "2"]
    train(1, *words, "--out", f"{tmp_path}/evaluated")
    train(1, *words, "--eval-sequences", "0", "--out", f"{tmp_path}/not")
    last = "checkpoints/step-000002"
    same_bits(tmp_path / "evaluated" / last, tmp_path / "not" / last)


@needs_hub
def test_a_step_is_the_mean_over_the_answers_of_all_ranks_and_micro_batches(place, tmp_path):
    """Held against one process that sees all rows of a step at once; sums of fp32 in another order: rtol 1e-4."""
    from thinwire.train.data import instruction_rows
    from thinwire.train.model import pretrained

    words = ["--init", str(place / "llama"), "--data", str(place / "rows.jsonl"), *SMALL, "--accumulate", "2"]
    train(2, *words, "--steps", "2", "--lr", "0.001", "--out", f"{tmp_path}/run")
    config = Config(init=str(place / "llama"), lr=0.001, steps=2)
    model = pretrained.load(config.init, config.adapters)
    tokenizer = pretrained.load_tokenizer(place / "llama")
    rows, held = instruction_rows.read_rows([str(place / "rows.jsonl")], (), tokenizer, 24, 0, warns=False)
    (optimizer,) = make_optimizers(model, config)
    for step in range(2):
        inputs, targets = rows.batch(8 * step, 8)
        assert rows.count_learnt(8 * step, 8) == int((targets != IGNORED).sum())
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = config.learning_rate(step)
        model(inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = trained_model.read(tmp_path / "run").weights
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weights[name], weight.detach(), rtol=1e-4, atol=1e-6)
    inputs, targets = batches([held.window(i) for i in range(held.count)], held.count)[0]
    with torch.no_grad():
        expected = float(model(inputs, targets))
    assert json.loads((tmp_path / "run/summary.json").read_text())["valid_loss"] == pytest.approx(expected, rel=1e-4)


@needs_hub
@needs_peft
def test_adapters_alone_are_trained_saved_and_merged(place, tmp_path, capsys):
    base = shutil.copytree(place / "gpt2", tmp_path / "base")
    words = [
        "--init", str(base), "--data", str(place / "rows.jsonl"), *SMALL, "--steps", "4", "--checkpoint-every", "2",
        "--lora", "4", "--engine", "fsdp2", "--lr", "0.01", "--method", "int8(smallest=0)",
    ]  # fmt: skip
    train(2, *words, "--out", f"{tmp_path}/whole")
    middle, last = tmp_path / "whole/checkpoints/step-000002", "checkpoints/step-000004"
    train(2, *words, "--resume", str(middle), "--out", f"{tmp_path}/again")
    same_bits(tmp_path / "whole" / last, tmp_path / "again" / last)
    found = trained_model.read(tmp_path / "whole")
    assert found.weights and all(".lora_" in name for name in found.weights)
    assert any(bool(value.any()) for name, value in found.weights.items() if ".lora_B" in name)

    tokens = torch.arange(5, 60)[None]
    with torch.no_grad():
        ours = found.model()(tokens)
    assert not torch.allclose(logits_of(base, tokens), ours, atol=1e-3)
    assert cli.main(["export", f"{tmp_path}/whole", f"{tmp_path}/merged"]) == 0
    torch.testing.assert_close(logits_of(tmp_path / "merged", tokens), ours, rtol=1e-4, atol=1e-5)
    assert cli.main(["export", f"{tmp_path}/whole", f"{tmp_path}/adapter", "--adapter"]) == 0
    import peft

    with torch.no_grad():
        theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()(tokens).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    about = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"]) == (4, 8)

    for change, said in ((shutil.rmtree, f"the model that the run began with is gone: {base} (config.yaml names it)"),
                         (lambda base: pretrained_models.make(base, "gpt2", seed=1),
                          "does not hold the weights that the run began with")):  # fmt: skip
        change(base)
        capsys.readouterr()
        assert cli.main(["export", f"{tmp_path}/whole", f"{tmp_path}/other"]) == 2
        assert said in capsys.readouterr().err
    refused = ranks.run(_train, 1, free_port(), (*words, "--out", f"{tmp_path}/whole", "--resume", "auto"),
                        warm="warm_frameworks", LOCAL_WORLD_SIZE="1")  # fmt: skip
    assert refused[0][0] == 2 and "init" in refused[0][1]


@in_full
@needs_hub
@needs_peft
def test_adapters_are_too_small_for_a_method_s_default_which_is_said(place, tmp_path):
    words = ["--init", str(place / "llama"), "--corpus", str(place / "text.txt"), *SMALL, "--steps", "1"]
    chosen = ["--lora", "2", "--lora-alpha", "3", "--lora-targets", "q_proj", "v_proj"]
    mesh = ["--engine", "hsdp", "--shard-size", "2", "--method", "int8"]
    said = train(4, *words, *chosen, *mesh, "--out", f"{tmp_path}/run")
    assert "int8 compresses 0 of 8 tensors" in said and "lower smallest" in said
    about = json.loads((tmp_path / "run/checkpoints/step-000001/meta.json").read_text())["about"]
    assert about["lora"] == "rank 2, alpha 3, q_proj v_proj" and about["family"] == "llama"


@needs_hub
@pytest.mark.parametrize("data", [("rows.jsonl",), ()])
def test_a_sample_begins_as_what_was_learnt(data, place, monkeypatch, capsys):
    hub = trained_model.pretrained.load_tokenizer(place / "llama")
    hub.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    shown = Tokenizer(f"folder:{place / 'llama'}", hub.backend_tokenizer)
    contexts = []
    run = SimpleNamespace(
        shape=None, run=place, config=Config(data=data), tokenizer=shown, model=lambda: None
    )  # fmt: skip
    monkeypatch.setattr(trained_model, "read", lambda path: run)
    monkeypatch.setattr(trained_model.pretrained, "load_tokenizer", lambda folder: hub)
    monkeypatch.setattr(
        trained_model, "generate", lambda model, context, *_, **__: contexts.append(context) or iter(())
    )
    assert trained_model.sample_main(["run", "--prompt", "3 times"]) == 0
    prompt = shown.encode("3 times").tolist()
    assert contexts[0].tolist() == [0] * bool(data) + prompt and capsys.readouterr().out == "3 times\n"


@needs_hub
def test_answers_are_learnt_and_nothing_else(place, tmp_path):
    from thinwire.train.data import instruction_rows
    from thinwire.train.model import pretrained

    tokenizer = pretrained.load_tokenizer(place / "llama")

    def rows(*objects: object, length: int = 60) -> instruction_rows.InstructionRows:
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, objects)) + "\n\n")
        name = [str(tmp_path / "a.jsonl")]
        return instruction_rows.read_rows(name, name, tokenizer, length, 0, warns=True)[0]

    def learnt(examples: instruction_rows.InstructionRows, index: int = 0) -> tuple[str, str]:
        row = examples.window(index).tolist()
        return tuple(
            tokenizer.decode([token if token >= 0 else ~token for token in row if (token >= 0) == which])
            for which in (False, True)
        )  # type: ignore[return-value]

    plain = {"prompt": "2 times 3 is ", "completion": "6"}
    assert learnt(rows(plain)) == ("2 times 3 is ", "6</s>")
    talk = [{"role": "user", "content": "2 times 3"}, {"role": "assistant", "content": "is 6"},
            {"role": "user", "content": "3 times 3"}, {"role": "assistant", "content": "is 9"}]  # fmt: skip
    asked = "<|user|>2 times 3<|end|><|assistant|><|user|>3 times 3<|end|><|assistant|>"
    assert learnt(rows({"messages": talk})) == (asked, "is 6<|end|>is 9<|end|>")
    beside = [{**talk[0], "weight": 0}, {**talk[1], "tool_calls": [], "function_call": {}, "weight": 1}, *talk[2:]]
    assert learnt(rows({"messages": beside})) == (asked, "is 6<|end|>is 9<|end|>")

    both = rows(plain, {"prompt": "1", "completion": "1"})
    inputs, targets = batches([both.window(0), both.window(1)], 2)[0]
    short = len(both.window(1)) - 1
    assert (targets[1, short:] == IGNORED).all() and (targets[1, :short] != IGNORED).sum() == 2  # 1 and </s>
    assert (inputs >= 0).all()

    long = {"prompt": "7 times 7 is " * 9, "completion": "49"}
    with pytest.warns(UserWarning) as told:
        assert rows(plain, long, length=20).count == 1
    cut = "of 2 rows of --data 1 are longer than 20 tokens (--seq-len, or the model's positions) and are cut; 1 are"
    assert str(told[0].message).startswith(cut)
    for row, line in [
        ({"text": "a"}, "a row has 'prompt' and 'completion'"),
        ({"messages": talk[:1]}, "no message has the role 'assistant'"),
        ({"messages": ["a"]}, "a message has a 'role'"),
        ({"messages": [{**talk[0], "role": None}, talk[1]]}, "a message has a 'role'"),
        ({"messages": talk[1:]}, "the first message is an answer"),
        ({"messages": [talk[0], {**talk[1], "content": [{"type": "text", "text": "6"}]}]}, "writes 'content' as"),
        (
            {"messages": [talk[0], {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "leaves out 'tool_calls'",
        ),
        ({"messages": [talk[0], {**talk[1], "weight": 0}]}, "'weight' of an answer"),
        ({"messages": talk, "tools": [{}]}, "'tools' is not read"),
    ]:
        with pytest.raises(ThinwireError, match=f"line 1.*{line}"):
            rows(row)
    tokenizer.chat_template = pretrained_models.CHAT.replace("<|assistant|>", "<|assistant|><think>")
    with pytest.raises(ThinwireError, match=r"or how it asks: .* or write prompt and completion"):
        rows({"messages": talk[:2]})
    tokenizer.chat_template = pretrained_models.CHAT.replace("m['content']", "loop.length|string + m['content']")
    with pytest.raises(ThinwireError, match="changes earlier turns"):
        rows({"messages": talk})
    tokenizer.chat_template = None
    with pytest.raises(ThinwireError, match="no chat template"):
        rows({"messages": talk})


TURNS = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}#\n{% endfor %}"
TURNS += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def rows_of(tokenizer: Any, folder: Path, row: object) -> list[int]:
    """The tokens of a row of --data."""
    from thinwire.train.data import instruction_rows

    (folder / "row.jsonl").write_text(json.dumps(row))
    name = [str(folder / "row.jsonl")]
    return instruction_rows.read_rows(name, name, tokenizer, 300, 0, warns=True)[0].window(0).tolist()


@needs_hub
@pytest.mark.parametrize("kind", pretrained_models.TOKENIZERS)
@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("2 times 2 is ", "4"), ("2 times 2 is", " 4"), ("2 times 2 is ", " 4"), ("times\n", "    is 4\n"),
     ("is it\n", "\nis"), ("2 times 2 is 1", "4"), ("", "is"), ("\n", "is")],
)  # fmt: skip
def test_a_row_is_its_text_behind_a_prompt_as_generation_sees_it(kind, prompt, answer, tmp_path):
    """Whether the tokenizer begins a text with a space or not. The tokens are the whole's where they may be."""
    import transformers

    made = pretrained_models.make_tokenizer(kind)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    row = rows_of(tokenizer, tmp_path, {"prompt": prompt, "completion": answer})
    asked = [~token for token in row if token < 0]
    tokens, whole = [max(token, ~token) for token in row], made.encode(prompt + answer).ids
    assert asked == tokens[: len(asked)] == made.encode(prompt).ids and tokens[-1] == tokenizer.eos_token_id
    assert made.decode(tokens) == made.decode(whole)
    assert tokens[:-1] == whole or whole[: len(asked)] != asked


@needs_hub
@pytest.mark.parametrize("kind", pretrained_models.TOKENIZERS)
def test_what_precedes_an_answer_of_messages_is_what_the_template_asks_for_it(kind, tmp_path):
    import transformers

    made = pretrained_models.make_tokenizer(kind)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TURNS)
    talk = [{"role": role, "content": f"{turn} times"} for turn, role in enumerate(["user", "assistant"] * 2)]
    row = rows_of(tokenizer, tmp_path, {"messages": talk})
    learnt = [token >= 0 for token in row]
    tokens = [max(token, ~token) for token in row]
    assert tokens == tokenizer.apply_chat_template(talk)["input_ids"]
    asked = tokenizer.apply_chat_template(talk[:3], add_generation_prompt=True)["input_ids"]
    assert tokens[: len(asked)] == asked and all(learnt[len(asked) :]) and not learnt[len(asked) - 1]


@needs_hub
@pytest.mark.parametrize("role", ["user", "system", "developer", "tool"])
@pytest.mark.parametrize("more", ["reasoning_content", "thinking", "reasoning", "tool_calls", ""])
def test_what_a_template_would_not_show_is_refused(role, more, place, tmp_path):
    """A message of a role that it does not know, a thought, a call, or the text beside a call or a thought."""
    from thinwire.train.model import pretrained

    tokenizer = pretrained.load_tokenizer(place / "llama")
    beside = {more: [{}] if more == "tool_calls" else "hm"} if more else {}
    talk = [{"role": role, "content": "it is"}, {"role": "assistant", "content": "so", **beside}]

    def refused(template: str) -> str:
        tokenizer.chat_template = template
        try:
            rows_of(tokenizer, tmp_path, {"messages": talk})
        except ThinwireError as error:
            return str(error).partition("the chat template ")[2]
        return ""

    for known in (["user", "assistant"], ["user", "assistant", "system"]):
        some = TURNS.replace("<|{{", f"{{% if m['role'] in {known} %}}<|{{{{", 1)
        said = f"leaves out '{more}' of role 'assistant'" if more else ""
        assert refused(some.replace("{% endfor", "{% endif %}{% endfor")) == (
            said if role in known else f"leaves out 'content' of role '{role}'"
        )
    either = TURNS.replace("m['content']", "m['reasoning_content'] or m['tool_calls'] or m['content']")
    assert refused(either) == ("leaves out 'content' of role 'assistant'" if more else "")


@needs_hub
def test_a_thought_under_two_names_is_shown_if_one_of_them_is(place, tmp_path):
    """As servers write it for templates of either kind."""
    from thinwire.train.model import pretrained

    tokenizer = pretrained.load_tokenizer(place / "llama")
    tokenizer.chat_template = TURNS.replace("{{ m['content'] }}", "{{ m['reasoning_content'] }}{{ m['content'] }}")
    thought = {"reasoning_content": "hm", "reasoning": "hm"}
    talk = [{"role": "user", "content": "it is"}, {"role": "assistant", "content": "so", **thought}]
    assert rows_of(tokenizer, tmp_path, {"messages": talk})
    talk[1]["reasoning"] = "other"
    with pytest.raises(ThinwireError, match="leaves out 'reasoning'"):
        rows_of(tokenizer, tmp_path, {"messages": talk})


@needs_hub
def test_the_day_changes_nothing_of_a_row(place, tmp_path, monkeypatch):
    from datetime import datetime, timedelta

    from transformers.utils import chat_template_utils

    from thinwire.train.model import pretrained

    tokenizer, rows = pretrained.load_tokenizer(place / "llama"), []
    tokenizer.chat_template = "\n {{ strftime_now('%d %b %Y, %-m') }}|{% if strftime_now('%Y')|int > 2000 %}" + TURNS
    tokenizer.chat_template += "{% endif %}"
    talk = {"messages": [{"role": "user", "content": "it"}, {"role": "assistant", "content": "is"}]}
    for days in range(0, 500, 100):
        clock = SimpleNamespace(now=lambda days=days: datetime.now() + timedelta(days))
        monkeypatch.setattr(chat_template_utils, "datetime", clock)
        rows.append(rows_of(tokenizer, tmp_path, talk))
    assert rows == rows[:1] * 5
    shown = tokenizer.decode([max(token, ~token) for token in rows[0]])
    assert shown == "\n 26 Jul 2024, 7|<|user|>\nit#\n<|assistant|>\nis#\n"


@needs_hub
@pytest.mark.parametrize("empty", [{3}, {39}, {*range(15)}, {19, 39}, {*range(40)}], ids=len)
@pytest.mark.parametrize("valid", [False, True])
def test_each_row_is_learnt_or_evaluated_or_counted_as_left_out(place, tmp_path, recwarn, empty, valid):
    from thinwire.train.data import instruction_rows
    from thinwire.train.model import pretrained

    tokenizer = pretrained.load_tokenizer(place / "llama")
    tokenizer.eos_token = None  # which would be learnt of an empty answer
    (tmp_path / "a.jsonl").write_text("".join(
        json.dumps({"prompt": f"{i} is ", "completion": "" if i in empty else f"{i}."}) + "\n" for i in range(40)
    ))  # fmt: skip
    name = [str(tmp_path / "a.jsonl")]
    try:
        both = instruction_rows.read_rows(name, name * valid, tokenizer, 60, 0, warns=True)
    except ThinwireError as error:
        which = "train on in --data" if len(empty) == 40 else "evaluate on in what is held out of --data (name --valid)"
        assert str(error) == f"no row is left to {which}"
        assert len(empty) == 40 or (empty == {19, 39} and not valid)
        return
    told = [str(warning.message).split() for warning in recwarn if "left out" in str(warning.message)]
    lost = sum(int(words[words.index("left") - 2]) for words in told)
    assert lost == len(empty) * (1 + valid) and sum(rows.count for rows in both) + lost == 40 * (1 + valid)


@needs_hub
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "is not a JSON object in UTF-8: Expecting property name"),
        (b"[" * 100_000, "is not a JSON object in UTF-8: maximum recursion depth"),
        (b"1" * 5000, "is not a JSON object in UTF-8: Exceeds the limit"),
        (b'{"prompt": "a", "completion": "\xff"}', "is not a JSON object in UTF-8: 'utf-8' codec can't decode"),
        (b'{"prompt": "a\\ud83d", "completion": "b"}', "half of a pair of UTF-16"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\\ude00"}]}', "half of a"),
        (b"[1]", "a row has 'prompt' and 'completion'"),
        (b'\xef\xbb\xbf{"prompt": "a\\ud83d\\ude00", "completion": "b"}\r', ""),
    ],
    ids=range(8),
)  # fmt: skip
def test_a_line_that_is_no_row_is_named(place, tmp_path, line, said):
    """Whatever its bytes are, it is read or refused by file and number. Windows' mark of UTF-8 is passed over."""
    from thinwire.train.data import instruction_rows
    from thinwire.train.model import pretrained

    path, good = tmp_path / "a.jsonl", b'{"prompt": "a", "completion": "b"}'
    path.write_bytes(b"\n".join([b"\xef\xbb\xbf" + good, b"", line, good]))
    try:
        rows = instruction_rows.read_rows(
            [str(path)], [str(path)], pretrained.load_tokenizer(place / "llama"), 20, 0, warns=True
        )
        assert rows[0].count == 3 and not said
    except ThinwireError as error:
        assert said and str(error).startswith(f"{path}, line 3") and said in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--data", "a.jsonl"], "--data is for fine-tuning: name a model with --init FOLDER"),
        (["--lora", "4"], "--lora is for fine-tuning"),
        (["--init", "a", "--layers", "3"], "--layers does not go with --init"),
        (["--init", "a", "--preset", "tiny"], "--preset tiny does not go with --init"),
        (["--init", "a", "--tokenizer", "bpe:300"], "--tokenizer bpe:300 does not go with --init"),
        (["--init", "a", "--data", "a.jsonl", "--corpus", "b"], "--data takes the place of --corpus"),
        (["--init", "a", "--lora-alpha", "3"], "--lora-alpha and --lora-targets need --lora"),
        (["--init", "a", "--lora", "4", "--lora-alpha", "0"], "must be above 0"),
        (["--init", "a", "--lora", "0"], "--lora must be 1 or more"),
    ],
)
def test_settings_that_do_not_go_together(words, line, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    monkeypatch.setattr("thinwire.train.cli.start_ranks", None)
    assert cli.main(["train", "--out", f"{tmp_path}/run", *words]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def test_the_learning_rate_is_one_for_what_is_trained():
    assert [Config(**chosen).top_lr for chosen in ({}, {"init": "a"}, {"init": "a", "lora": 8}, {"lr": 1.0})] == [
        2e-3, 2e-5, 2e-4, 1.0,
    ]  # fmt: skip


def test_without_transformers_the_command_that_installs_it_is_said(tmp_path, monkeypatch):
    from thinwire.train.model import pretrained

    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ThinwireError, match=r"pip install 'thinwire\[hf\]'"):
        pretrained.load(str(tmp_path), None)


@needs_hub
def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path):
    """It would learn to copy: its validation loss falls, and it can continue no text."""
    from thinwire.train.model import pretrained

    folder = pretrained_models.make(tmp_path / "bert", "bert")
    with pytest.raises(ThinwireError, match=r"is not causal \(BertLMHeadModel\)"):
        pretrained.load(str(folder), None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_decoder": True}))
    assert pretrained.load(str(folder), None).vocabulary == 304


@needs_hub
def test_folders_that_hold_no_such_model_are_refused(place, tmp_path):
    from thinwire.train.data import token_files
    from thinwire.train.data.tokenizer import Tokenizer
    from thinwire.train.model import pretrained

    with pytest.raises(ThinwireError, match=r"has no config\.json"):
        pretrained.load(str(tmp_path), None)
    broken = shutil.copytree(place / "llama", tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    from safetensors.torch import save_file

    weights.pop("model.norm.weight")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ThinwireError, match=r"has no weights for model.norm.weight \(1 are missing\)"):
        pretrained.load(str(broken), None)
    (broken / "model.safetensors").unlink()
    with pytest.raises(ThinwireError, match="cannot load the model"):
        pretrained.load(str(broken), None)
    ours = Tokenizer(f"folder:{place / 'llama'}", ())
    token_files.tokenize([str(place / "text.txt")], "bytes", tmp_path / "bytes")
    with pytest.raises(ThinwireError, match="was tokenized with bytes, not with the tokenizer of --init"):
        token_files.find_token_files([str(tmp_path / "bytes")], (), "bytes", model=(ours, 304))

"""A trained model outside of Thinwire: transformers gives the same logits."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer as HubTokenizer

import ranks
from pretrained_models import TEXT
from thinwire.base.errors import ThinwireError
from thinwire.base.processes import free_port
from thinwire.cli import program as cli
from thinwire.train.checkpoint import trained_model
from thinwire.train.config import Config
from thinwire.train.data import token_files
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.data.windows import Windows, batches
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.hf_export import export
from thinwire.train.model.shapes import ModelConfig

SHAPES = {
    "gpt": ModelConfig(layers=2, width=48, heads=4, hidden=100, context=24),
    "llama": ModelConfig(family="llama", layers=2, width=48, heads=4, kv_heads=2, hidden=64, context=24),
}


def decoder(family: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SHAPES[family]).eval()
    for parameter in model.parameters():  # biases too
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("family", SHAPES)
def test_transformers_gives_the_same_logits_and_tokens(family, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = decoder(family)
    tokenizer = Tokenizer("bytes", ())
    export(model.shape, dict(model.named_parameters()), tokenizer.as_hub(), tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    text = "Grüße, 17 Ω"
    numbers = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(text, return_tensors="pt").input_ids
    assert numbers[0].tolist() == list(text.encode())
    with torch.no_grad():
        torch.testing.assert_close(theirs(numbers).logits, model(numbers), rtol=1e-5, atol=1e-5)


def test_a_shape_without_counterpart_is_refused(tmp_path):
    hub = Tokenizer("bytes", ()).as_hub()
    with pytest.raises(ThinwireError, match="grouped-query"):
        export(ModelConfig(heads=4, kv_heads=2), {}, hub, tmp_path / "other")


def test_tokens_are_drawn_as_asked():
    model, prompt = decoder("gpt"), torch.tensor([1, 2, 3])
    likeliest = list(trained_model.generate(model, prompt, 40, temperature=0))  # beyond the context of 24
    assert likeliest[0] == int(model(prompt[None])[0, -1].argmax()) and len(likeliest) == 40
    assert list(trained_model.generate(model, prompt, 40, top_k=1)) == likeliest
    drawn = [list(trained_model.generate(model, prompt, 20, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    allowed = set(model(prompt[None])[0, -1].topk(5).indices.tolist())
    assert {next(trained_model.generate(model, prompt, 1, top_k=5, seed=seed)) for seed in range(30)} <= allowed


def test_nothing_is_drawn_from_what_is_not_finite():
    model, ruled_out = decoder("gpt"), torch.full((256,), -torch.inf)
    model.register_forward_hook(lambda module, given, logits: logits + ruled_out)
    for number, drawn in ((0.0, [7, 7]), (torch.nan, None), (torch.inf, None), (-torch.inf, None)):
        ruled_out[7] = number
        if drawn is None:
            with pytest.raises(ThinwireError, match="output is not finite"):
                list(trained_model.generate(model, torch.tensor([1]), 2))
        else:
            assert list(trained_model.generate(model, torch.tensor([1]), 2)) == drawn


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file of this process grow above so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _trained(run: Path) -> trained_model.TrainedModel:
    model = decoder("gpt")
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return trained_model.TrainedModel(run, 0, run, Config(), model.shape, "", weights, Tokenizer("bytes", ()))


@pytest.mark.parametrize("fails", [True, False])
def test_what_others_put_into_the_folder_of_an_export_meanwhile_stays(fails, tmp_path, monkeypatch):
    """An export that failed emptied the folder, whoever had written there."""
    trained, others = _trained(tmp_path), tmp_path / "hf/others/notes"

    def write_beside(*operands):
        others.parent.mkdir(parents=True)
        others.write_text("mine")
        if fails:
            raise OSError(28, "No space left on device")
        return export(*operands)

    monkeypatch.setattr(trained_model, "export", write_beside)
    with pytest.raises(ThinwireError, match="No space left") if fails else nullcontext():
        trained.export(tmp_path / "hf")
    assert others.read_text() == "mine" and sum(1 for _ in (tmp_path / "hf").iterdir()) == (1 if fails else 5)


def test_an_export_takes_the_name_of_no_file_that_others_wrote_meanwhile(tmp_path, monkeypatch):
    trained, others = _trained(tmp_path), tmp_path / "hf/config.json"

    def write_beside(*operands):
        others.write_text("mine")
        return export(*operands)

    monkeypatch.setattr(trained_model, "export", write_beside)
    with pytest.raises(ThinwireError, match=r"hf/config.json came into being meanwhile, and stays"):
        trained.export(tmp_path / "hf")
    assert others.read_text() == "mine" and [path.name for path in (tmp_path / "hf").iterdir()] == ["config.json"]


@pytest.mark.parametrize("size", [0, 500, 100_000])
@pytest.mark.parametrize("there", [True, False])
def test_an_export_that_cannot_be_written_is_one_line_and_leaves_nothing(size, there, tmp_path):
    trained = _trained(tmp_path)
    if there:
        (tmp_path / "hf").mkdir()
    with pytest.raises((ThinwireError, OSError), match=r"hf/\w+\.(safetensors|json)"), files_of_at_most(size):
        trained.export(tmp_path / "hf")
    assert [path.name for path in tmp_path.rglob("*")] == ["hf"] * there
    trained.export(tmp_path / "hf")
    assert sum(1 for _ in (tmp_path / "hf").iterdir()) == 4


def _train(rank: int, world: int, port: int, words: list[str]) -> int:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.destroy_process_group()  # that of the tests: a run makes its own
    return cli.main(["train", *words])


@pytest.mark.parametrize("family, engine", [("gpt", "fsdp2"), ("llama", "ddp")])
def test_a_run_on_token_files_is_read_back_sampled_and_exported(family, engine, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(TEXT[:2000]))
    assert cli.main(["tokenize", str(text), "--tokenizer", "bpe:280", "--out", str(tmp_path / "tokens")]) == 0
    words = [
        "--preset", "tiny", "--family", family, "--layers", "1", "--width", "30", "--heads", "3", "--seq-len", "16",
        "--batch-size", "2", "--steps", "3", "--eval-sequences", "8", "--corpus", str(tmp_path / "tokens"),
        "--engine", engine, "--out", str(out),
    ]  # fmt: skip
    assert ranks.run(_train, 2, free_port(), words, LOCAL_WORLD_SIZE="2") == [0, 0]
    found = trained_model.read(out)
    windows = Windows(token_files.find_token_files([str(tmp_path / "tokens")], (), "bytes").valid, 16)
    with torch.no_grad():
        held = windows.spread(8)
        loss = torch.stack([found.model()(*pair) for pair in batches(held, 8)]).mean()
    torch.testing.assert_close(
        float(loss), json.loads((out / "summary.json").read_text())["valid_loss"], rtol=1e-6, atol=0
    )
    capsys.readouterr()
    assert cli.main(["sample", str(out), "--prompt", "5 times", "--tokens", "9", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("5 times")
    assert cli.main(["export", str(out / "checkpoints" / "step-000003"), str(tmp_path / "hf")]) == 0
    kept = Tokenizer("bpe:280", out).as_hub().to_str()
    assert HubTokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json")).to_str() == kept
    assert sum(1 for _ in (tmp_path / "hf").iterdir()) == 4
    written = [*(tmp_path / "hf").iterdir(), *(out / "checkpoints" / "step-000003").iterdir()]
    assert {file.stat().st_mode for file in written} == {text.stat().st_mode}, "not for their owner alone"
    assert cli.main(["sample", str(tmp_path / "hf")]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    (tmp_path / "best").symlink_to(out / "checkpoints" / "step-000003")
    assert trained_model.read(tmp_path / "best").run.name == "run"
    (out / "checkpoints").rename(tmp_path / "other disk")
    (out / "checkpoints").symlink_to(tmp_path / "other disk")
    assert trained_model.read(out).run == trained_model.read(out / "checkpoints" / "step-000003").run == out
    lines = (out / "config.yaml").read_text().splitlines()
    for lost in (0, next(number for number, line in enumerate(lines) if line.startswith("tokenizer:"))):
        (out / "config.yaml").write_text("\n".join(lines[:lost]))  # what is missing would become the default
        with pytest.raises(ThinwireError, match=r"config.yaml is not this run's any more"):
            trained_model.read(out)


def test_a_run_of_which_no_checkpoint_is_good_says_so(tmp_path, capsys):
    out = tmp_path / "run"
    words = [
        "--preset", "tiny", "--layers", "1", "--width", "16", "--heads", "1", "--seq-len", "16", "--batch-size", "2",
        "--steps", "3", "--lr", "1e15", "--no-guard", "--max-skipped", "0", "--clip", "0", "--eval-every", "0",
        "--corpus", __file__, "--out", str(out),
    ]  # fmt: skip
    ranks.run(_train, 1, free_port(), words, LOCAL_WORLD_SIZE="1")
    newest = out / "checkpoints" / "step-000003"
    for command in (["sample", str(out)], ["export", str(out), str(tmp_path / "hf")], ["inspect", str(out)]):
        assert cli.main(command) == 2
        assert f"{out} has no good checkpoint" in (error := capsys.readouterr().err) and str(newest) in error
    assert cli.main(["sample", str(newest)]) == 2
    assert "output is not finite" in (error := capsys.readouterr().err) and "was saved, steps were skipped" in error
    assert cli.main(["export", str(newest), str(tmp_path / "hf")]) == 0
    assert "was saved, steps were skipped" in capsys.readouterr().err

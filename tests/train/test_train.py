"""The training program: models, data, configuration; and real runs, as a user starts them."""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import gzip
import io
import itertools
import json
import lzma
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import processors

import ranks
from breadth import spread
from patience import PATIENCE
from pretrained_models import TEXT
from thinwire.base.errors import ThinwireError
from thinwire.base.processes import free_port
from thinwire.cli import program as cli
from thinwire.lab.compare import curve
from thinwire.network.comm import CountingComm
from thinwire.network.ledger import Ledger
from thinwire.train import loop
from thinwire.train.config import Config, from_arguments, from_yaml
from thinwire.train.data import corpus
from thinwire.train.data import windows as window_module
from thinwire.train.data.corpus import SPAN, read_corpus, spans, split
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.data.windows import Windows
from thinwire.train.job import held_out, run_folder, scheduler, setup
from thinwire.train.job.run_folder import RunFolder
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS, ModelConfig

SIZES = {
    "gpt-125m": 124e6,
    "gpt-345m": 355e6,
    "gpt-355m": 355e6,
    "gpt-1.3b": 1.31e9,
    "gpt-2.0b": 2.02e9,
    "llama-500m": 513e6,
    "llama-1.8b": 1.83e9,
    "tiny": 0.44e6,
    "small": 0.84e6,
    "net20m": 19e6,
}


@pytest.mark.parametrize("preset", SIZES)
def test_presets_have_the_size_in_their_name(preset):
    with torch.device("meta"):
        model = Decoder(PRESETS[preset])
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(SIZES[preset], rel=0.02)


@pytest.mark.parametrize("preset", ["tiny", "llama-tiny"])
def test_a_decoder_starts_at_the_entropy_of_its_vocabulary_and_looks_only_back(preset):
    torch.manual_seed(0)
    model = Decoder(PRESETS[preset])
    tokens = torch.randint(0, 256, (2, 32))
    assert model(tokens, tokens.roll(-1, 1)).item() == pytest.approx(5.545, abs=0.2)
    changed = tokens.clone()
    changed[:, 20:] = 0
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-5)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-3)


def test_rope_makes_llama_see_distances_only():
    """Without an embedding of the position, the same words elsewhere attend alike: a constant sequence is constant."""
    torch.manual_seed(0)
    model = Decoder(PRESETS["llama-tiny"])
    logits = model(torch.full((1, 16), 7))
    assert torch.allclose(logits[0, 0], logits[0, 15], atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (ModelConfig(width=10, heads=3), "multiple of 3 heads"),
        (ModelConfig(heads=4, kv_heads=3), "share 3 heads"),
        (ModelConfig(family="llama", width=6, heads=2), "even head size"),
        (ModelConfig(layers=0), "1 or more"),
    ],
)
def test_shapes_that_do_not_fit(shape, words):
    with pytest.raises(ThinwireError, match=words):
        shape.check()


@pytest.mark.parametrize("drawn", [window_module.DRAWN, 50], ids=["drawn at once", "one by one"])
def test_batches_are_a_function_of_the_place_and_repeat_nothing_within_an_epoch(drawn, monkeypatch):
    monkeypatch.setattr(window_module, "DRAWN", drawn)
    windows = Windows(torch.arange(1001), 10, seed=3)
    assert windows.count == 100
    inputs, targets = windows.batch(0, 100)
    assert torch.equal(targets, inputs + 1)
    assert inputs[:, 0].unique().numel() == 100
    again = Windows(torch.arange(1001), 10, seed=3)
    assert torch.equal(again.batch(37, 5)[0], inputs[37:42])
    assert not torch.equal(windows.batch(100, 100)[0], inputs)
    assert windows.batch(95, 10)[0].shape == (10, 10)
    assert not torch.equal(Windows(torch.arange(1001), 10, seed=4).batch(0, 100)[0], inputs)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 1000])
def test_an_order_without_memory_has_everything_once_and_looks_like_chance(count):
    order = [window_module.permuted(index, count, 7) for index in range(count)]
    assert sorted(order) == list(range(count))
    assert count < 63 or order != [window_module.permuted(index, count, 8) for index in range(count)]
    if count == 1000:  # neighbours of a random order are a third of it apart; 0.02 is 2.8 standard deviations
        apart = [abs(one - other) for one, other in itertools.pairwise(order)]
        assert sum(apart) / len(apart) / count == pytest.approx(1 / 3, abs=0.02)


def test_all_windows_asked_for_are_evaluated_and_each_rank_has_as_many():
    for count, size, number in itertools.product(range(1, 6), range(1, 5), range(1, 8)):
        valid = Windows(torch.arange(8 * count + 1), 8)
        shares = [held_out.shared_by(size, rank, valid, number) for rank in range(size)]
        assert len({len(share) for share in shares}) == 1 and shares[0]
        every = [index for share in shares for index in share]  # the rows of a window that several ranks have are one
        assert sorted(set(every)) == sorted(valid.positions(min(number, count)))
        assert len(every) - len(set(every)) < size


def test_corpora(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    with gzip.open(tmp_path / "b.gz", "wt") as file:
        file.write("gzip")
    with lzma.open(tmp_path / "c.xz", "wt") as file:
        file.write("xz")
    assert read_corpus([str(tmp_path / "*")]) == "plain\ngzip\nxz"
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_corpus([str(tmp_path / "windows.txt")] * 2) == "one\r\ntwo\rthree\n\none\r\ntwo\rthree\n"
    for name, words in [("nothing.txt", "No such file"), ("*.none", "no file matches")]:
        with pytest.raises(ThinwireError, match=words):
            read_corpus([str(tmp_path / name)])
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ThinwireError, match="no text"):
        read_corpus([str(tmp_path / "empty.txt")])
    for name, opener in (("latin.txt", open), ("latin.gz", gzip.open), ("latin.xz", lzma.open)):
        with opener(tmp_path / name, "wb") as file:
            file.write("ä".encode() * 3 + "ö".encode("latin-1") + b" more")
        with pytest.raises(ThinwireError, match=rf"{name} is not UTF-8 text: byte 6 cannot be read"):
            read_corpus([str(tmp_path / name)])
    (tmp_path / "cut.txt").write_bytes(b"abc" + "ä".encode()[:1])
    with pytest.raises(ThinwireError, match="byte 3 "):
        read_corpus([str(tmp_path / "cut.txt")])
    (tmp_path / "broken.xz").write_text("not xz")
    with pytest.raises(ThinwireError, match="broken"):
        read_corpus([str(tmp_path / "broken.xz")])
    with pytest.raises(ThinwireError, match="too short"):
        Windows(torch.arange(5), 10)


def test_which_text_is_too_short_is_said():
    enough, little = torch.arange(50), torch.arange(5)
    for valid, texts, said in (
        ((), (little, enough), "--corpus a.txt b.txt is too short: 5 tokens"),
        ((), (enough, little), "what is held out of --corpus a.txt b.txt (name --valid) is too short"),
        (("v.txt",), (enough, little), "--valid v.txt is too short"),
    ):
        with pytest.raises(ThinwireError) as caught:
            setup._windows(Config(corpus=("a.txt", "b.txt"), valid=valid, seq_len=10), *texts)
        assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("there", "read"), [("train test validation", "validation"), ("train test", "test"), ("train", "train")]
)
def test_validation_reads_a_held_out_split_of_the_hub_or_says_that_there_is_none(monkeypatch, there, read):
    class Rows(list):
        column_names = ("text",)

    hub = SimpleNamespace(
        get_dataset_split_names=lambda path, config: there.split(),
        load_dataset=lambda path, config, split: Rows([{"text": f"{split} of {path}"}]),
    )
    monkeypatch.setattr("thinwire.base.extras.load", lambda name: hub)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = Config(corpus=("hub:a/b",), valid=("hub:a/b",))
        assert setup._texts(config) == ("train of a/b", f"{read} of a/b")
    assert ["--valid reads its split train" in str(warning.message) for warning in caught] == [True] * (read == "train")


def test_the_standard_library_is_a_corpus():
    text = read_corpus(["stdlib"])
    assert len(text) > 3e6
    train, valid = split(text)
    assert len(train) + len(valid) == len(text)
    assert 0.04 < len(valid) / len(text) < 0.06


def test_no_text_is_on_both_sides_whatever_it_is_called(tmp_path, monkeypatch):
    """A file that both sides read, or that is read twice and held out of, is refused, and no other."""
    (tmp_path / "lib").mkdir()
    for name in ("lib/a.py", "lib/b.py", "other.py"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link.py").symlink_to("lib/a.py")
    (tmp_path / "lib/z.py").symlink_to("a.py")  # as in Debian's library
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    monkeypatch.setattr(corpus, "_read_file", lambda path: [os.path.realpath(path)])
    paths = ("lib/a.py", "lib/[ab].py", "lib/../link.py", "other.py", "*.py")
    names = ["stdlib", *(str(tmp_path / path) for path in paths)]

    def read(*sides: str) -> list[str]:
        return read_corpus(sides).split("\n") if sides else []

    assert len(read("stdlib")) == 2

    for one, other, valid in itertools.product(names, names, [(), *((name,) for name in names)]):
        sources = (one, other) if one != other else (one,)
        files, held = read(*sources), read(*valid)
        twice = not valid and len(set(files)) < len(files)
        try:
            corpus.check_apart(sources, valid)
            assert not twice and not {*files} & {*held}, (sources, valid)
        except ThinwireError:
            assert twice or {*files} & {*held}, (sources, valid)


def test_tokenizers(tmp_path):
    text = "the cat sat on the mat. " * 200 + "ÄÖ 语"
    tokenizer = Tokenizer("bytes", ())
    assert bytes(tokenizer.encode(text).tolist()).decode() == text
    bpe = Tokenizer("bpe:300", spans([text]))
    assert 256 < bpe.vocabulary <= 300
    assert len(bpe.encode(text)) < len(text) / 2
    bpe.save(tmp_path)
    other = Tokenizer("bpe:300", tmp_path)
    assert torch.equal(other.encode(text), bpe.encode(text))
    for name in ("bpe:", "bpe:10", "words", "hub:"):
        with pytest.raises(ThinwireError):
            Tokenizer(name, spans([text]))


def test_a_tokenizer_of_the_hub_gives_the_tokens_of_its_folder(tmp_path, monkeypatch):
    """Not one that begins a text with a token of its own, which would stand before every span."""
    hub = HubTokenizer.from_str(Tokenizer("bytes", ()).as_hub().to_str())
    hub.post_processor = processors.TemplateProcessing(single="a $A", special_tokens=[("a", 97)])
    hub.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(HubTokenizer, "from_pretrained", lambda name: hub)
    monkeypatch.setattr("thinwire.train.data.tokenizer._check_hub", lambda name: None)
    text = "b" * SPAN * 2
    for name in (f"folder:{tmp_path}", "hub:nobody/knows"):
        assert torch.equal(Tokenizer(name, ()).encode(text), Tokenizer("bytes", ()).encode(text)), name


def test_yaml_command_line_and_object_are_the_same(tmp_path):
    config = Config(
        preset="llama-tiny",
        method="int8(group=64)",
        engine="fsdp2",
        corpus=("a b.txt", "c"),
        betas=(0.8, 0.9),
        lr=1e-4,
        two_level=True,
        guard=False,
        resume="latest",
        ranks=3,
        out=Path("some/where"),
        dtype="fp32",
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    words = [
        "--preset",
        "llama-tiny",
        "--method",
        "int8(group=64)",
        "--engine",
        "fsdp2",
        "--corpus",
        "a b.txt",
        "c",
        "--betas",
        "0.8",
        "0.9",
        "--lr",
        "1e-4",
        "--two-level",
        "True",
        "--no-guard",
        "--resume",
        "latest",
        "--ranks",
        "3",
        "--out",
        "some/where",
        "--dtype",
        "fp32",
    ]
    assert from_yaml(path) == from_arguments(words) == from_arguments(["--config", str(path)]) == config
    assert from_arguments(["--config", str(path), "--lr", "1"]) == dataclasses.replace(config, lr=1.0)
    assert from_arguments([]) == Config()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz: 3", "no setting 'stepz'"),
        ("steps: many", "steps"),
        ("- a", "name: value"),
        ("a: [", "not YAML"),
        ("steps:", "needs a value"),
        ("lr: 0.5\nlr: 0.001", "'lr' is there twice"),
    ],
)
def test_yaml_that_cannot_be_used(tmp_path, text, words):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ThinwireError, match=words) as caught:
        from_yaml(path)
    assert "\n" not in str(caught.value)


def test_the_learning_rate_rises_and_falls():
    config = Config(steps=100, warmup=0.1, lr=1.0, lr_end=0.1)
    rates = [config.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0) and rates.index(max(rates)) in (9, 10)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.1, abs=0.01)


def thinwire(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "thinwire", *words],
        capture_output=True, text=True, timeout=300 * PATIENCE, env={**os.environ, **environment}, check=False,
    )  # fmt: skip


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(TEXT))
    return path


def test_the_smallest_full_run(tmp_path):
    words = ["--preset", "tiny", "--method", "bf16", "--steps", "20", "--eval-sequences", "16", "--track", "csv"]
    assert [status for status, _ in train(2, *words, "--out", f"{tmp_path}/run")] == [0, 0]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert from_yaml(tmp_path / "run/config.yaml").method == "bf16"
    assert (summary["method"], summary["world_size"], summary["steps"]) == ("bf16", 2, 20)
    assert summary["valid_loss"] < summary["first_valid_loss"] - 1
    with (tmp_path / "run/valid_losses.csv").open() as file:
        windows = list(csv.DictReader(file))
    targets = sum(int(row["targets"]) for row in windows)
    assert len(windows) > 16 and len({row["window"] for row in windows}) == len(windows)
    assert targets == summary["valid_tokens"] <= 0.51 * summary["tokens_per_parameter"] * summary["parameters"]
    mean = sum(int(row["targets"]) * float(row["loss"]) for row in windows) / targets
    assert mean == pytest.approx(summary["valid_loss"], abs=1e-6)
    assert len([row for row in rows if "loss" in row]) == 20
    with (tmp_path / "run/metrics.csv").open() as file:
        tracked = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["valid_loss"]) for row in tracked] == [
        tuple(str(row.get(name, "")) for name in ("step", "loss", "valid_loss")) for row in rows
    ]
    assert "metrics.csv" in summary["files"]
    for key in (
        "parameters",
        "train_loss",
        "tokens_per_s",
        "step_ms",
        "encode_ms",
        "wire_ms",
        "decode_ms",
        "exposed_ms",
    ):
        assert summary[key] > 0
    # Two ranks: each sends what it has once; half of 4 bytes per parameter, and the guard's flag.
    assert sum(summary["wire_bytes_per_step"].values()) == 2 * summary["parameters"] + 4
    assert summary["dense_bytes_per_step"] == 4 * summary["parameters"]
    assert 100 < summary["peak_memory_mb"] < 4000


def _train(rank: int, world: int, port: int, words: tuple[str, ...]) -> tuple[int, str]:
    torch.distributed.destroy_process_group()  # that of ranks.py: the program makes its own
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        status = cli.main(["train", *words])
    return status, said.getvalue()


def files_of(folder: Path) -> dict[str, bytes]:
    """All files in ``folder`` but the lock, which a refused command may take."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def train(world: int, *words: str) -> list[tuple[int, str]]:
    """``thinwire train`` as torchrun starts it, on ranks that have torch already: what each ends with, and says.

    One that is refused leaves all files of its folder as they were.
    """
    out = Path(words[words.index("--out") + 1]) if "--out" in words else Path("nowhere")
    before = files_of(out)
    found = ranks.run(_train, world, free_port(), words, LOCAL_WORLD_SIZE=str(world))
    if any(status == 2 for status, _ in found):
        assert files_of(out) == before
    return found


def _train_alone(rank: int, world: int, port: int, words: tuple[str, ...], alone_s: float) -> tuple[int, int]:
    """As ``_train``; return the exit status, and how often ranks told each other their losses."""
    loop.ALONE_S, calls, mean = alone_s, list[int](), loop.Trainer._mean
    loop.Trainer._mean = lambda self, row: calls.append(len(row)) or mean(self, row)  # type: ignore[method-assign]
    return _train(rank, world, port, words)[0], len(calls)


def test_ranks_that_step_alone_do_not_meet_for_the_loss_of_each_step(tmp_path, text):
    """They tell each other all losses since the last time: metrics.jsonl has each step's mean over the ranks."""
    losses = {}
    for alone_s, meetings in ((0.0, 12), (1e6, 4)):  # after steps 1 and 2, which they take together, 6 and 12
        out = tmp_path / f"{alone_s}"
        words = (
            "--preset", "tiny", "--layers", "1", "--width", "64", "--corpus", str(text), "--steps", "12",
            "--eval-sequences", "0", "--checkpoint-every", "6", "--method", "local-steps(every=4, start=2)",
            "--out", str(out),
        )  # fmt: skip
        found = ranks.run(_train_alone, 2, free_port(), words, alone_s, LOCAL_WORLD_SIZE="2")
        assert found == [(0, meetings)] * 2
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, 13))
        losses[alone_s] = [row["loss"] for row in rows]
    assert losses[0.0] == losses[1e6]


def test_an_evaluation_in_the_middle_of_a_round_is_said_to_be_of_each_rank_s_own_weights(tmp_path, text):
    words = (*SHORT, "--corpus", str(text), "--steps", "4", "--eval-every", "2", "--out", str(tmp_path / "run"))
    assert [status for status, _ in train(2, *words, "--method", "local-steps(every=4)")] == [0, 0]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row.get("valid_loss_of")) for row in rows if "valid_loss" in row] == [
        (0, None), (2, "each rank's own weights"), (4, None),
    ]  # fmt: skip


def _train_until(rank: int, world: int, port: int, words: tuple[str, ...], last: int) -> int:
    """As ``_train``, on ranks whose step after ``last`` fails."""
    take = loop.Trainer._take_step

    def fail(self: loop.Trainer) -> tuple[torch.Tensor, torch.Tensor]:
        if self.step == last:
            raise ThinwireError("no more")
        return take(self)

    loop.ALONE_S, loop.Trainer._take_step = 1e6, fail  # type: ignore[method-assign]
    return _train(rank, world, port, words)[0]


def test_steps_alone_are_logged_when_an_error_ends_the_run(tmp_path, text):
    words = (
        "--preset", "tiny", "--layers", "1", "--width", "64", "--corpus", str(text), "--steps", "12",
        "--eval-sequences", "0", "--method", "local-steps(every=8)", "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert ranks.run(_train_until, 2, free_port(), words, 5, LOCAL_WORLD_SIZE="2") == [2, 2]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row.get("loss_of") for row in rows] == [None, *["rank 0"] * 4]
    assert all(3 < row["loss"] < 7 for row in rows)


def test_a_disk_that_is_full_is_said_before_a_run_that_diverges():
    def check() -> None:
        raise ThinwireError("the disk is full")

    trainer = object.__new__(loop.Trainer)
    trainer.diverged = (1, 20)
    trainer.display: Any = SimpleNamespace(check=check)
    trainer.collective: Any = SimpleNamespace(do=lambda work: work())
    with pytest.raises(ThinwireError, match="full"):
        trainer._check(loop.StepOutcome(math.nan, 1.0, 0.0, 0.5))


SHARDS = {"ddp": (), "fsdp2": (), "hsdp": ("--shard-size", "2")}


def refused(found: list[tuple[int, str]], line: str) -> bool:
    """By every rank, with one line that says so."""
    return all(status == 2 and line in said and len(said.splitlines()) == 1 for status, said in found)


@pytest.mark.parametrize(
    ("engine", "world", "method"),
    spread(4, [
        ("ddp", 3, "dense"), ("hsdp", 4, "bf16"),
        ("hsdp", 4, "local-steps(every=4, start=1, outer='int8:smallest:1000:feedback:gradients')"),
        # Step 3 is inside the first round.
        ("ddp", 2, "local-steps(every=4, start=1, outer='int8:smallest:1000:feedback:gradients')"),
        ("fsdp2", 2, "int8(smallest=1000, feedback='gradients')"),
    ]),
)  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, text, engine, world, method):
    common = [
        "--preset", "tiny", "--layers", "1", "--width", "64", "--corpus", str(text), "--engine", engine,
        "--method", method, *SHARDS[engine], "--steps", "6", "--checkpoint-every", "3", "--eval-sequences", "0",
        "--batch-size", "2",
    ]  # fmt: skip
    whole, again = tmp_path / "whole/checkpoints", tmp_path / "again/checkpoints"
    third, last = "step-000003", "step-000006"
    for more in (["--out", f"{tmp_path}/whole"], ["--resume", str(whole / third), "--out", f"{tmp_path}/again"]):
        found = train(world, *common, *more)
        assert all(status == 0 for status, _ in found), found
    files = sorted(path.name for path in (whole / last).glob("*.safetensors"))
    assert len(files) == world + (engine == "ddp")
    for name in files:
        one, other = load_file(whole / last / name), load_file(again / last / name)
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key]), f"{name}: {key}"
    beyond = train(world, *common, "--resume", str(whole / last), "--out", f"{tmp_path}/beyond")
    assert refused(beyond, "nothing is left to do")
    if method == "dense":
        fewer = train(2, *common, "--resize", "refuse", "--resume", str(whole / third), "--out", f"{tmp_path}/fewer")
        assert refused(fewer, "made by 3 ranks, this run has 2")


def test_bad_input_gets_one_line_and_a_status(tmp_path, text):
    """As the shell sees it, where one rank says so and the others wait for it; what all see, and what is seen before
    there are ranks, is tried below without a program of its own."""
    (tmp_path / "run/checkpoints/step-000001").mkdir(parents=True)
    (tmp_path / "run/metrics.jsonl").touch()  # of a run, as its first file says
    (tmp_path / "run/tokenizer-bpe-300.json").write_text("{}")  # which rank 0 reads, and hands to the others
    done = thinwire(
        "train", "--preset", "tiny", "--ranks", "2", "--corpus", str(text), "--out", f"{tmp_path}/run",
        "--tokenizer", "bpe:300", "--resume", "auto",
    )  # fmt: skip
    assert done.returncode == 2
    assert "cannot load the tokenizer" in done.stderr
    assert "Traceback" not in done.stderr
    assert all(message.startswith("thinwire: ") for message in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("file", "words", "setting"),
    [("method: auto\nmax_loss: '2%'", "--method trickle", "max_loss"),
     ("engine: hsdp\nshard_size: 2", "--engine ddp", "shard_size"),
     ("optimizer: muon\nmuon_lr: 0.01", "--optimizer adamw", "muon_lr")],
)  # fmt: skip
def test_what_typed_words_make_void_is_not_taken_from_their_file(tmp_path, file, words, setting):
    (tmp_path / "config.yaml").write_text(f"{file}\n")
    config = from_arguments(["--config", str(tmp_path / "config.yaml"), *words.split()])
    config.check()
    assert getattr(config, setting) == getattr(Config, setting)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--method", "int9"], "unknown method 'int9'"),
        (["--preset", "huge"], "unknown preset 'huge'"),
        (["--steps", "0"], "--steps must be 1 or more"),
        (["--bucket-mb", "5", "--engine", "fsdp2"], "--bucket-mb is for --engine ddp"),
        (["--shard-size", "2", "--engine", "fsdp2"], "--shard-size is for --engine hsdp"),
        (["--max-loss", "5%"], "--max-loss is for --method auto"),
        (["--cluster", "l40s-10g", "--method", "int8"], "--cluster is for --method auto"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config is there twice: name one file"),
        (["--optimizer", "lion"], "optimizer"),
        (["--lr", "fast"], "lr"),
        (["--method", "scape", "--optimizer", "adamw"], "scape is built on AdamS: leave --optimizer adamw out"),
        (["--optimizer", "muon", "--lr", "0", "--muon-lr", "0.01"], "--lr 0 does not go with --muon-lr"),
        (["--no-checkpoints", "--checkpoint-every", "5"], "--checkpoint-every does not go with --no-checkpoints"),
        (["--resume", "auto", "--overwrite"], "--resume does not go with --overwrite"),
        (["--track", "csv", "trackio"], "the package 'trackio' is not installed: pip install 'thinwire[trackio]'"),
        (["--frobnicate"], "frobnicate"),
    ],
)
def test_bad_settings_are_refused_before_a_rank_is_started(tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # the program sets it where it is not
    monkeypatch.setattr("thinwire.train.cli.start_ranks", None)
    status = cli.main(["train", "--preset", "tiny", "--ranks", "2", "--out", f"{tmp_path}/run", *words])
    assert refused([(status, capsys.readouterr().err)], line)


@pytest.mark.parametrize(
    ("method", "optimizer"), [("scape(warmup=1)", "adams"), ("dgc", "sgd"), ("int8", "adamw"), ("dense", "adamw")]
)
def test_a_method_brings_its_optimizer(method, optimizer):
    config = Config(method=method).check()
    assert config.optimizer_name == optimizer and config.optimizer is None
    assert Config(method=method, optimizer="adams").check().optimizer_name == "adams"


def test_the_plan_says_which_optimizer_was_chosen(tmp_path, text):
    words = ["--preset", "tiny", "--steps", "1", "--eval-sequences", "0", "--corpus", str(text)]
    assert [code for code, _ in train(1, *words, "--method", "scape", "--out", f"{tmp_path}/run")] == [0]
    assert "optimizer: adams, for which scape is made\n" in (tmp_path / "run/plan.txt").read_text()
    assert from_yaml(tmp_path / "run/config.yaml").optimizer is None  # --config with another method chooses again


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--corpus", "/no/such/text"], "cannot read the corpus"),
        (["--resume", "latest"], "no checkpoint"),
        (["--method", "none", "--engine", "fsdp2"], "runs on ddp only"),
        (["--engine", "hsdp", "--shard-size", "3", "--overwrite"], "does not divide"),
        (["--seq-len", "999999", "--overwrite"], "text.txt is too short"),
        (["--ranks-per-node", "1"], "--ranks-per-node is for ranks started here: this node's launcher has started 2"),
    ],
)
def test_ranks_refuse_what_only_they_can_see(tmp_path, text, words, line):
    """In a folder that holds a run, whose tokenizer belongs to its checkpoints (``train`` looks)."""
    (tmp_path / "run").mkdir()
    if "--overwrite" in words:
        (tmp_path / "run/tokenizer-bpe-300.json").write_text("old")
        (tmp_path / "run/metrics.jsonl").write_text('{"wall_s": 1}')
    common = ["--preset", "tiny", "--corpus", str(text), "--tokenizer", "bpe:300", "--out", f"{tmp_path}/run"]
    assert refused(train(2, *common, *words), line)


SHORT = ("--preset", "tiny", "--layers", "1", "--width", "64", "--seq-len", "32", "--batch-size", "2",
         "--eval-sequences", "4", "--tokenizer", "bpe:300")  # fmt: skip


def test_what_a_run_trains_is_its_settings_alone_and_a_refused_one_changes_nothing(tmp_path, text):
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{word}ly " for word in text.read_text().split()))
    run, fresh = tmp_path / "run", tmp_path / "fresh"
    torn = ["--engine", "hsdp", "--shard-size", "2"]
    assert refused(train(1, *SHORT, "--corpus", str(other), "--out", str(run), *torn), "does not divide")
    for out in (run, fresh):
        assert train(1, *SHORT, "--corpus", str(text), "--steps", "2", "--out", str(out))[0][0] == 0
    summary = [json.loads((out / "summary.json").read_text())["valid_loss"] for out in (run, fresh)]
    assert summary[0] == summary[1]
    goes_on = ["--corpus", str(other), "--steps", "3", "--out", str(run)]
    assert refused(train(1, *SHORT, *goes_on, "--resume", "auto"), "has other data")
    assert refused(train(1, *SHORT, *goes_on, "--overwrite", *torn), "does not divide")
    assert train(1, *SHORT, *goes_on, "--overwrite")[0][0] == 0
    assert (run / "tokenizer-bpe-300.json").read_text() != (fresh / "tokenizer-bpe-300.json").read_text()


@pytest.mark.parametrize("consent", [["--overwrite"], ["--resume", "auto", "--resume-anyway"]])
def test_the_settings_of_a_run_do_not_agree_to_lose_it_or_to_go_on(tmp_path, text, consent):
    run = tmp_path / "run"
    words = [*SHORT, "--corpus", str(text), "--steps", "1", "--out", str(run), *consent]
    assert train(1, *words)[0][0] == 0
    assert refused(train(1, "--config", str(run / "config.yaml"), "--out", str(run)), "holds a run already")


@pytest.mark.parametrize(
    ("engine", "method"),
    spread(5, [
        ("fsdp2", "sdp4bit"), ("ddp", "local-steps(every=4,fragments=2,delay=1)"), ("hsdp", "sdp4bit"),
        ("fsdp2", "zeropp"), ("fsdp2", "dense"),
    ]),
)  # fmt: skip
def test_bytes_are_those_of_the_steps_however_often_they_are_evaluated(tmp_path, text, engine, method):
    """Also of messages under way while an evaluation runs, and of weights that it fetches for the next step."""
    sent = []
    for every in ("0", "1", "3"):
        out = tmp_path / every
        words = ["--corpus", str(text), "--engine", engine, "--method", method, *SHARDS[engine], "--steps", "8"]
        found = train(2, *SHORT, *words, "--eval-every", every, "--no-checkpoints", "--out", str(out))
        assert [status for status, _ in found] == [0, 0], found
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        dense = json.loads((out / "summary.json").read_text())["dense_bytes_per_step"]
        sent.append((sum(sum(row["wire_bytes"].values()) for row in rows if "loss" in row), dense))
    assert sent[0] == sent[1] == sent[2] and sent[0][0] > 0


def _train_and_count(rank: int, world: int, port: int, words: tuple[str, ...]) -> tuple[int, float]:
    """As ``_train`` on a node of two ranks; return the status, and the bytes that this rank sent to the other node."""
    sent, row = list[float](), loop.Trainer._row

    def count(self: loop.Trainer, *facts: Any) -> dict[str, Any]:
        sent.append(self.wire.ledger.last.bytes["inter"])
        return row(self, *facts)

    os.environ["LOCAL_WORLD_SIZE"], loop.Trainer._row = "2", count  # type: ignore[method-assign]
    return _train(rank, world, port, words)[0], sum(sent)


@pytest.mark.parametrize(
    ("engine", "method"),
    spread(4, [
        ("ddp", "dense"), ("ddp", "int8(smallest=0)"), ("ddp", "local-steps(every=4,start=2)"),
        ("ddp", "trickle(smallest=0)"), ("fsdp2", "dense"), ("fsdp2", "sdp4bit"), ("hsdp", "bf16"), ("ddp", "none"),
    ]),
)  # fmt: skip
def test_the_bytes_of_a_node_are_those_of_all_of_its_ranks(tmp_path, text, engine, method):
    """Around a ring one rank of a node sends to the next node, in messages to all peers each does."""
    out = tmp_path / "run"
    words = (*SHORT, "--corpus", str(text), "--engine", engine, "--method", method, "--steps", "6", "--out", str(out))
    found = ranks.run(_train_and_count, 4, free_port(), (*words, "--no-checkpoints"))
    assert [status for status, _ in found] == [0] * 4
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = curve([{"rows": [row for row in rows if "loss" in row]}])
    assert rows[-1]["sent"] == pytest.approx(sum(sent for _, sent in found) / 2, rel=1e-6)


def _train_and_die(rank: int, world: int, port: int, words: tuple[str, ...]) -> int:
    """As ``_train``, on ranks that end in the evaluation behind the last checkpoint."""

    def fail(self: loop.Trainer) -> dict[str, Any]:
        raise ThinwireError("no more")

    loop.Trainer._conclude = fail  # type: ignore[method-assign]
    return _train(rank, world, port, words)[0]


def test_a_run_that_ended_in_its_last_evaluation_gets_its_results_when_it_is_resumed(tmp_path, text):
    """A killed run's folder then has the files of one that was not."""
    run = tmp_path / "run"
    words = (*SHORT, "--corpus", str(text), "--steps", "3", "--out", str(run))
    assert train(2, *words)[0][0] == 0
    results = {name: (run / name).read_text() for name in run_folder.RESULTS}
    longer = (*words, "--steps", "5", "--resume", "auto")
    assert ranks.run(_train_and_die, 2, free_port(), longer, LOCAL_WORLD_SIZE="2") == [2, 2]
    assert not any((run / name).exists() for name in run_folder.RESULTS), "those of three steps"
    for _ in range(2):
        assert [status for status, _ in train(2, *longer)] == [0, 0]
        summary = json.loads((run / "summary.json").read_text())
        assert summary["steps"] == 5 and summary.keys() == json.loads(results["summary.json"]).keys()
        assert summary["train_loss"] > 0 and summary["step_ms"] > 0 and sum(summary["wire_bytes_per_step"].values()) > 0
        assert all((run / name).stat().st_size > 20 for name in results)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5]


def test_a_run_that_went_back_goes_on_from_its_own_past_when_it_is_killed(tmp_path, text):
    run = tmp_path / "run"
    words = (*SHORT, "--corpus", str(text), "--keep", "9", "--out", str(run))
    assert train(1, *words, "--steps", "4", "--checkpoint-every", "1")[0][0] == 0
    back = ("--resume", f"{run}/checkpoints/step-000001", "--lr", "1e-5", "--steps", "4")
    assert ranks.run(_train_until, 1, free_port(), (*words, *back), 3) == [2]
    assert train(1, *words, "--lr", "1e-5", "--steps", "4", "--resume", "auto")[0][0] == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = {row["step"]: row["lr"] for row in rows if "loss" in row}
    assert sorted(rates) == [1, 2, 3, 4] and rates[1] > 1e-4 > 2e-5 > max(rates[2], rates[3], rates[4])


ANOTHERS = {name: b"another's" for name in (".lock", "metrics.jsonl", "config.yaml", "checkpoints/latest")}


def _befall(fate: str, out: Path) -> None:
    """Let ``fate`` befall the folder ``out`` of a run that goes on, which is a link to one where a link is turned."""
    if fate in ("emptied", "unlocked"):  # the shell's * leaves the lock
        for path in out.glob("[!.]*" if fate == "emptied" else ".lock"):
            run_folder._remove([path])
        return
    if fate == "rewritten":  # as by sed -i
        for path in out.glob("metrics.jsonl"):
            path.with_suffix(".new").write_bytes(path.read_bytes())
            path.with_suffix(".new").rename(path)
        return
    if fate == "a turned link":
        out.unlink()
    elif fate == "removed":
        shutil.rmtree(out)
    else:
        out.rename(out.with_name("moved"))
    if fate in ("another's", "a turned link"):
        there = out.with_name("another") if fate == "a turned link" else out
        for name, data in ANOTHERS.items():
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            (there / name).write_bytes(data)
        if there != out:
            out.symlink_to(there)


def _train_elsewhere(rank: int, world: int, port: int, words: tuple[str, ...], fate: str, moment: str) -> Any:
    """As ``_train``, on ranks whose folder meets its ``fate`` while they read their text, or after their first step."""
    read, take, out = loop.read_inputs, loop.Trainer._take_step, Path(words[words.index("--out") + 1])

    def reads(*given: Any) -> Any:
        inputs = read(*given)
        given[1].do(lambda: _befall(fate, out) if rank == 0 else None)
        return inputs

    def takes(self: loop.Trainer) -> tuple[torch.Tensor, torch.Tensor]:
        if self.step == 1:
            self.collective.do(lambda: _befall(fate, out) if rank == 0 else None)
        return take(self)

    if moment == "reading":
        loop.read_inputs = reads  # type: ignore[assignment]
    else:
        loop.Trainer._take_step = takes  # type: ignore[method-assign]
    return _train(rank, world, port, words)


@pytest.mark.parametrize(
    ("fate", "moment"),
    spread(
        5,
        ["moved", "removed", "another's", "a turned link", "emptied", "rewritten", "unlocked"],
        ["saving", "reading", "concluding"],
    ),
)
def test_a_run_writes_nothing_where_its_folder_is_no_more(tmp_path, text, fate, moment):
    """If --out is another folder, all ranks end with one line, and what is there then stays; else the run ends well."""
    run = tmp_path / "run"
    if fate == "a turned link":
        (tmp_path / "own").mkdir()
        run.symlink_to("own")
    saves = {"saving": ("--checkpoint-every", "2"), "concluding": ("--no-checkpoints",), "reading": ()}[moment]
    words = (*SHORT, "--corpus", str(text), "--steps", "4", *saves, "--out", str(run))
    found = ranks.run(_train_elsewhere, 2, free_port(), words, fate, moment, LOCAL_WORLD_SIZE="2")
    if fate in ("emptied", "rewritten", "unlocked"):  # it is the run's still
        assert [status for status, _ in found] == [0, 0], found
        assert (run / "summary.json").exists() and (run / "checkpoints").exists() is (moment != "concluding")
        return
    assert refused(found, f"--out {run} was moved or removed"), found
    left = {name: data for name, data in ANOTHERS.items() if name != ".lock"} if run.exists() else {}
    assert files_of(run) == left
    assert run.exists() is (fate not in ("moved", "removed"))


def test_a_run_that_goes_on_without_the_rows_of_its_past_says_what_its_summary_is_about(tmp_path, text):
    words = (*SHORT, "--corpus", str(text), "--checkpoint-every", "2", "--resume", "auto", "--out", f"{tmp_path}/run")
    assert train(1, *words, "--steps", "4") == [(0, "")]
    rows = tmp_path / "run/metrics.jsonl"
    rows.write_text("".join(line + "\n" for line in rows.read_text().splitlines() if '"step": 3' not in line))
    ((status, said),) = train(1, *words, "--steps", "6")
    assert status == 0 and "metrics.jsonl has 3 of the 4 steps before the checkpoint: losses, seconds" in said
    ((status, said),) = train(1, *words, "--steps", "8")
    assert status == 0 and "has 5 of the 6 steps" in said


def test_auto_does_not_lose_the_results_of_a_run_without_checkpoints(tmp_path, text):
    words = [*SHORT, "--corpus", str(text), "--no-checkpoints", "--steps", "2", "--out", f"{tmp_path}/run"]
    assert train(1, *words)[0][0] == 0
    assert refused(train(1, *words, "--resume", "auto"), "holds a run without checkpoints, which has ended")


@pytest.mark.parametrize(
    ("name", "restarts"),
    spread(2, [("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"), ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")]),
)
def test_overwrite_of_a_job_that_is_started_again_goes_on_from_its_own_checkpoints(tmp_path, text, name, restarts):
    def run(body: Any, job: str, count: str, *more: Any) -> Any:
        found = ranks.run(body, 1, free_port(), words, *more, **{name: job, restarts: count})
        rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        return found, [row for row in rows if '"loss"' in row]

    words = (*SHORT, "--corpus", str(text), "--steps", "4", "--checkpoint-every", "1", "--overwrite",
             "--out", f"{tmp_path}/run")  # fmt: skip
    first = run(_train, "1", "0")[1]
    assert run(_train_until, "2", "0", 0)[1] == first  # not begun: the earlier run is not this job's
    began = run(_train_until, "2", "1", 2)[1]
    assert len(began) == 2 and began != first[:2]
    ended = run(_train, "2", "2")[1]
    assert len(ended) == 4 and ended[:2] == began
    assert run(_train, "3", "1")[1][0] != ended[0]


def _train_as(rank: int, world: int, port: int, words: tuple[str, ...], steps: int | None, own: list[str]) -> int:
    """As ``_train`` (of ``steps``: as ``_train_until``), with this rank's ``own`` value of variables: "NAME=0,1"."""
    for name, _, values in (text.partition("=") for text in own):
        os.environ[name] = values.split(",")[rank]
    return _train(rank, world, port, words)[0] if steps is None else _train_until(rank, world, port, words, steps)


def test_overwrite_goes_on_with_no_run_but_that_of_its_own_launch(tmp_path, text):
    """Two launches in one Slurm job; a run without checkpoints that is started again; a start that is not counted."""

    def run(launch: str, slurm: str, counts: str, steps: int | None = None, *more: str) -> list[str]:
        own = [f"TORCHELASTIC_RESTART_COUNT={counts}"]
        numbers = dict(TORCHELASTIC_RUN_ID=launch, SLURM_JOB_ID="7", SLURM_RESTART_COUNT=slurm, LOCAL_WORLD_SIZE="2")
        found = ranks.run(_train_as, 2, free_port(), (*words, *more), steps, own, **numbers)
        assert found == ([0, 0] if steps is None else [2, 2])
        rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        return [row for row in rows if '"loss"' in row]

    words = (*SHORT, "--corpus", str(text), "--steps", "3", "--overwrite", "--out", f"{tmp_path}/run")
    every = ("--checkpoint-every", "1")
    first = run("a", "0", "0,0", None, *every)
    assert run("b", "0", "0,0", 0, *every) == first  # dies before it has begun
    second = run("b", "0", "1,1", 2, *every)
    assert len(second) == 2 and second != first[:2], "the second launch is not the first"
    third = run("b", "0", "0,0", None, *every)  # not counted, as a node came or went
    assert third[:2] == second and len(third) == 3
    assert run("c", "1", "0,0", None, *every) == third  # Slurm has started the job again
    fourth = run("d", "1", "0,0", None, "--no-checkpoints")
    assert fourth[0] != third[0]
    assert run("d", "2", "0,0", None, "--no-checkpoints") == fourth


def test_an_attempt_of_torchrun_knows_its_launch_behind_a_script():
    ask = "import os; from thinwire.train.job.scheduler import starts_of; print(*starts_of(os.environ))"
    script = [["sh", "-c", '"$0" -c "$1"; :', sys.executable, ask], [sys.executable, "-c", ask]]
    said = [
        subprocess.run(words, env={**os.environ, "TORCHELASTIC_RUN_ID": "none"}, capture_output=True, text=True,
                       check=True).stdout.rpartition(": ") for words in script
    ]  # fmt: skip
    assert said[0][0] == said[1][0] and f"process {os.getpid()} begun at" in said[0][0]
    assert said[0][2] != said[1][2]
    starts = scheduler.starts_of({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "none"})
    assert starts[0] == "Slurm's job 7: start 2" and f": process {os.getpid()} begun at" in starts[1]


def test_a_run_goes_on_with_that_of_another_start_of_its_launch_alone(tmp_path):
    """A script that torchrun starts may train twice into one folder: the second run begins anew."""
    alone = SimpleNamespace(rank=0, share=lambda value: [value], gather=lambda work: [work()], do=lambda work: work())
    folder = RunFolder(tmp_path, (0,), alone, run_folder.read_owner(tmp_path))
    assert not folder.take_over(["job 7: start 0", "torchrun a: 1"])
    folder.mark(["job 7: start 0", "torchrun a: 1"])
    for starts in (["job 7: start 0", "torchrun a: 1"], ["job 7: start 0", "torchrun b: 3"], ["torchrun b: 1"], []):
        assert not folder.take_over(starts)
    for starts in (["job 7: start 0", "torchrun a: 2"], ["job 7: start 1", "torchrun b: 3"], ["torchrun b: 4"]):
        assert folder.take_over(starts) and not folder.take_over(starts)


def test_a_run_killed_before_its_first_step_says_where_the_earlier_one_is_and_gives_it_back(tmp_path, text):
    run = tmp_path / "run"
    words = (*SHORT, "--corpus", str(text), "--out", str(run))
    assert train(1, *words, "--steps", "2")[0][0] == 0
    before = files_of(run)
    run_folder._make_room(run)  # what kill -9 before step 1 leaves
    for command in (["inspect"], ["sample", "--prompt", "1"], ["eval", "--tasks", "x"], ["status"]):
        with redirect_stderr(io.StringIO()) as err:
            assert cli.main([command[0], str(run), *command[1:]]) == 2
        assert f"the run that was there is in {run}/.previous" in err.getvalue(), err.getvalue()
        assert len(err.getvalue().splitlines()) == 1
    assert train(1, *words, "--steps", "2", "--resume", "auto")[0][0] == 0  # nothing is left to do
    assert files_of(run) == before and not (run / ".previous").exists()


def test_a_run_that_ends_before_its_first_step_leaves_the_earlier_one_whole(tmp_path, text):
    run = tmp_path / "run"
    words = (*SHORT, "--corpus", str(text), "--steps", "2", "--out", str(run))
    assert train(1, *words)[0][0] == 0
    before = files_of(run)
    for more in ((), ("--tokenizer", "bpe:290", "--track", "csv")):
        assert ranks.run(_train_until, 1, free_port(), (*words, *more, "--overwrite"), 0) == [2]
        assert files_of(run) == before
    assert ranks.run(_train_until, 1, free_port(), (*words, "--tokenizer", "bpe:290", "--overwrite"), 1) == [2]
    assert not (run / "checkpoints").exists() and not (run / "tokenizer-bpe-300.json").exists()


@pytest.mark.parametrize("rank", spread(2, ["1", "0"]))
def test_a_rank_that_cannot_reach_the_others_says_so(tmp_path, rank):
    done = thinwire(
        "train",
        "--preset",
        "tiny",
        "--timeout",
        "3",
        "--out",
        f"{tmp_path}/run",
        RANK=rank,
        WORLD_SIZE="2",
        LOCAL_RANK=rank,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    assert done.returncode == 2
    assert f"rank {rank} could not reach the other rank at" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def _ranks_of(launcher: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == launcher and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


SLEEPING = """
import sys
from thinwire.cli import program
from thinwire.train.cli import start_ranks

sys.executable = sys.argv[1]
sleep = lambda arguments: start_ranks([], 2, 2)
sys.modules["sleep"] = sys.modules["__main__"]
program.COMMANDS["sleep"] = ("sleep:sleep", "")
sys.exit(program.main(["sleep"]))
"""


def _all_sleep(ranks: list[int]) -> bool:
    return len(ranks) == 2 and all(Path(f"/proc/{rank}/comm").read_text() == "sleep\n" for rank in ranks)


@pytest.mark.parametrize("how", spread(2, ["SIGINT", "SIGTERM", "SIGTERM twice", "rank dies", "SIGKILL"]))
def test_nothing_is_left_behind(tmp_path, text, how):
    """The program itself where its own handling of Ctrl-C matters; elsewhere ranks that only sleep, under
    the same launcher: three processes need not import torch for that."""
    real = how == "SIGINT"
    words = [
        "-m", "thinwire", "train", "--preset", "tiny", "--layers", "1", "--width", "64", "--eval-sequences", "0",
        "--ranks", "2", "--steps", "100000", "--corpus", str(text), "--out", f"{tmp_path}/run",
    ]  # fmt: skip
    if not real:
        rank = tmp_path / "rank"
        ignores = "trap '' TERM\n" if how == "SIGTERM twice" else ""
        rank.write_text(f"#!/bin/sh\n{ignores}exec sleep 600 >/dev/null 2>&1\n")
        rank.chmod(0o755)
        words = ["-c", SLEEPING, str(rank)]
    launcher = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if "SIGTERM" in how else signal.SIG_DFL),
    )  # fmt: skip
    try:
        metrics = tmp_path / "run/metrics.jsonl"
        deadline = time.monotonic() + 240 * PATIENCE
        while not (
            metrics.exists() and metrics.read_text().count("\n") > 3 if real else _all_sleep(_ranks_of(launcher.pid))
        ):
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.1)
        ranks = _ranks_of(launcher.pid)
        assert len(ranks) == 2
        if how == "rank dies":
            os.kill(ranks[1], signal.SIGKILL)
        else:
            launcher.send_signal(getattr(signal, how.removesuffix(" twice")))
        if how == "SIGTERM twice":
            with pytest.raises(subprocess.TimeoutExpired):
                launcher.wait(timeout=0.5)
            launcher.send_signal(signal.SIGTERM)
        status = launcher.wait(timeout=60 * PATIENCE)
        statuses = {"SIGINT": 130, "SIGTERM": 143, "SIGTERM twice": 143, "SIGKILL": -9, "rank dies": status or 1}
        assert status == statuses[how]
        assert (tmp_path / "run/checkpoints/latest").exists() == (how == "SIGINT")
        deadline = time.monotonic() + 60 * PATIENCE
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):
            assert time.monotonic() < deadline, "a rank is still there"
            time.sleep(0.1)
    finally:
        launcher.kill()
        launcher.communicate()


AT_THE_END = """
import sys, threading, torch
from thinwire.cli import program as cli

def busy(arguments):
    def loop():
        a = torch.ones(100)
        while True:
            a + a
    for _ in range(8):
        threading.Thread(target=loop, daemon=True).start()
    print("all work is done")
    return 3

sys.modules["busy"] = sys.modules["__main__"]
cli.COMMANDS["busy"] = ("busy:busy", "")
sys.argv[1:] = ["busy"]
"""


def test_ddp_s_buckets_and_sgd_are_as_the_config_says(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ranks = setup.Ranks(None, 1, torch.device("cpu"))
        for size, held in ((None, 25), (0.5, 0.5)):
            engine = setup.wrap(torch.nn.Linear(4, 4), Config(bucket_mb=size), ranks)
            assert engine.bucket_bytes_cap == held * 2**20
        ranks = setup.Ranks(CountingComm(0, [0, 1], Ledger()), 1, torch.device("cpu"))
        for method, size, held in (("int8", None, 4.0), ("int8", 0.5, 0.5), ("topk(density=0.001)", None, 25)):
            config = Config(method=method, bucket_mb=size)
            engine = setup.wrap(torch.nn.Linear(4096, 4096), config, ranks)
            assert engine.bucket_bytes_cap == int(held * 2**20)
        (optimizer,) = setup.make_optimizers(engine, Config(optimizer="sgd", lr=0.5))
        assert isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"] == 0
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("end", ["cli.program()", "sys.exit(cli.main())"])
def test_the_program_ends_with_its_own_status_whatever_torch_s_threads_still_hold(end):
    program = [sys.executable, "-c", f"{AT_THE_END}\n{end}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300 * PATIENCE)
    assert done.stdout == "all work is done\n"
    if end == "cli.program()":
        assert (done.returncode, done.stderr) == (3, "")
    elif sys.version_info < (3, 14):  # from 3.14 on such threads hang instead, and harm nobody
        assert done.returncode != 3, "torch no longer aborts here: cli.program can end as other programs do"


@pytest.mark.parametrize("said", ["holds a run already: --resume auto", "is a file: name a folder"])
def test_a_folder_that_cannot_be_used_is_refused_before_torch_is_loaded_and_ranks_are_started(said, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('torch was loaded')")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def train(*words):
        command = [sys.executable, "-m", "thinwire", "train", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    refused = train("--out", "run/metrics.jsonl" if "file" in said else "run")
    assert refused.returncode == 2 and said in refused.stderr and len(refused.stderr.splitlines()) == 1, refused
    if "run" in said:
        assert "torch was loaded" in train("--out", "run", "--overwrite").stderr


WITHOUT_TORCH = """if True:
    import json, sys
    from thinwire.cli.program import main

    for words in json.loads(sys.argv[1]):
        print(main(words), *words, flush=True)
        assert "torch" not in sys.modules, words
"""


def test_what_is_not_there_is_refused_before_torch_is_loaded(tmp_path, text):
    """In the words of the ranks, which read the same files with the same functions."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('torch was loaded')")
    (tmp_path / "empty").mkdir()
    wrong = {
        "--corpus nowhere.txt": "cannot read the corpus nowhere.txt: No such file or directory",
        "--corpus *.none": "no file matches the corpus '*.none'",
        "--corpus empty": "--corpus empty is a folder without token files (tokens.json: No such file or directory)",
        "--corpus nowhere.bin --tokenizer ids:9": "cannot read the corpus nowhere.bin: No such file or directory",
        "--corpus nowhere.npy --tokenizer ids:9": "cannot read the corpus nowhere.npy: No such file or directory",
        f"--corpus {text} --valid nowhere.txt": "cannot read the corpus nowhere.txt: No such file or directory",
        "--tokenizer words": "unknown tokenizer 'words'; there are: bytes, bpe:SIZE, folder:PATH, hub:NAME, ids:SIZE",
        "--tokenizer bpe:many": "bpe:many: the size is a number of tokens, 257 or more",
        "--tokenizer folder:empty": "cannot load the tokenizer empty/tokenizer.json: No such file or directory",
        "--init empty": "--init empty is no Hugging Face folder: it has no config.json",
        "--method auto --cluster moon": "there is no cluster 'moon'",
        "--preset huge": "unknown preset 'huge'",
        "--track trackio": "the package 'trackio' is not installed: pip install 'thinwire[trackio]'",
    }
    commands = [["train", *words.split()] for words in wrong]
    commands.append(["tokenize", str(text), "--tokenizer", "bpe:300", "--out", "tokens"])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)], cwd=tmp_path, env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(wrong), said
    for line, expected in zip(said, wrong.values(), strict=True):
        assert line.startswith("thinwire: ") and expected in line
    printed = done.stdout.splitlines()
    assert [line[0] for line in printed if line[1:].startswith(" train")] == ["2"] * len(wrong)
    assert printed[-1].startswith("0 tokenize") and not (tmp_path / "runs").exists()


def test_what_the_ranks_would_not_read_is_not_refused(tmp_path, text, monkeypatch):
    """A tokenizer that an earlier run has kept, and a cluster of a run that has chosen."""
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "checkpoints/step-000001").mkdir(parents=True)
    kept = Config(corpus=(str(text),), tokenizer="folder:gone", out=tmp_path, resume="auto")
    for resume in ("auto", "latest", f"{tmp_path}/checkpoints/step-000001"):
        dataclasses.replace(kept, resume=resume).check_files()
    for resume in (None, f"{tmp_path}/other/checkpoints/step-000001"):
        with pytest.raises(ThinwireError, match="cannot load the tokenizer gone"):
            dataclasses.replace(kept, resume=resume).check_files()
    chosen = Config(corpus=(str(text),), method="auto", cluster="gone.toml", resume="auto")
    chosen.check_files()
    with pytest.raises(ThinwireError, match=r"gone\.toml"):
        dataclasses.replace(chosen, resume=None).check_files()
    of_hub = Config(corpus=("hub:nobody/knows", "stdlib"), tokenizer="hub:nobody/knows")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ThinwireError, match=r"pip install 'thinwire\[hub\]'"):
        of_hub.check_files()
    monkeypatch.setattr(corpus.extras, "package_folder", Path)
    of_hub.check_files()


def test_of_a_folder_in_use_and_of_one_that_cannot_be_asked_the_ranks_say_what_is_wrong(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with (tmp_path / ".lock").open("w") as lock:
        with pytest.raises(ThinwireError, match="holds a run already"):
            run_folder.refuse(tmp_path, anew=False, goes_on=False)
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_folder.refuse(tmp_path, anew=False, goes_on=False)
    run_folder.refuse(tmp_path / ("a" * 300), anew=False, goes_on=False)

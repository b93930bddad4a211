"""Laws of all commands: what a user's own files, numbers and disk may bring about."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from thinwire.base.errors import ThinwireError
from thinwire.cli import program as cli
from thinwire.train.checkpoint.trained_model import TrainedModel
from thinwire.train.job import run_folder
from thinwire.train.job.run_folder import hold_run_folder, open_run_folder
from thinwire.train.model.shapes import PRESETS

USERS = [
    *("metrics.jsonl", "metrics.csv", "tracked.json", "summary.json", "report.txt", "valid_losses.csv", "plan.txt"),
    *("config.yaml", "replicas/x", "checkpoints/epoch-1.pt", "checkpoints/step-000001/weights.pt", "tokenizer.json"),
    *("hf/config.json", "train.bin", "valid.bin", "tokens.json", "model.safetensors", "tokenizer_config.json"),
    *("config.json", "tokenizer-bpe-300.json"),
]
"""Names that commands give their files, which the user may have used before."""
ALONE = SimpleNamespace(rank=0, size=1, share=lambda value: [value], gather=lambda work: [work()],
                        do=lambda work: work())  # fmt: skip


def _on_ranks(out, anew: bool, goes_on: bool) -> None:
    with open_run_folder(out, ALONE) as folder:
        if not (goes_on or anew):
            folder.check_free()
        folder.make_room()
        for name in run_folder._RUN_FILES:  # what the run would write
            (out / name).write_text("a run's")


def _by_launcher(out, anew: bool, goes_on: bool) -> None:
    run_folder.refuse(out, anew=anew, goes_on=goes_on)
    _on_ranks(out, anew, goes_on)


def _elastic(out, anew: bool, goes_on: bool) -> None:
    with hold_run_folder(out, None, anew=anew, goes_on=goes_on):
        (out / "replicas/0.jsonl").write_text("a run's")


def _export(out, anew: bool, goes_on: bool) -> None:
    model = TrainedModel(out, 1, out, None, PRESETS["tiny"], "", {}, SimpleNamespace(as_hub=None))
    model.export(out)


def _tokenize(out, anew: bool, goes_on: bool) -> None:
    (out.parent / "text.txt").write_text("some text " * 50)
    if cli.main(["tokenize", str(out.parent / "text.txt"), "--tokenizer", "bpe:300", "--out", str(out)]):
        raise ThinwireError("refused")


@pytest.mark.parametrize(("anew", "goes_on"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("command", [_on_ranks, _by_launcher, _elastic, _export, _tokenize])
def test_no_command_removes_or_replaces_a_file_that_no_command_wrote(command, anew, goes_on, tmp_path):
    for number, name in enumerate(USERS):
        path = tmp_path / str(number) / name
        path.parent.mkdir(parents=True)
        path.write_text('{"mine": 1}\n')
        try:
            command(tmp_path / str(number), anew, goes_on)
        except ThinwireError as error:
            assert len(str(error).splitlines()) == 1
        assert path.exists() and path.read_text() == '{"mine": 1}\n', name

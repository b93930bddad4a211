"""``thinwire eval``: run tasks of EleutherAI's lm-evaluation-harness on a trained model or any Hugging Face folder.

A run is exported to a temporary folder, which the harness loads through transformers with the run's own tokenizer.
If the tokenizer has no end-of-text token (bytes, bpe), the token of a line's end takes its place.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from thinwire.base import extras
from thinwire.base.errors import ThinwireError
from thinwire.base.files import refuse_unwritable, write
from thinwire.base.options import read_options
from thinwire.base.terminal import ends_at_once, note, say
from thinwire.train.job.run_folder import where_set_aside


@dataclass(frozen=True)
class Options:
    """Evaluate a trained model on tasks of lm-evaluation-harness."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, of one of its checkpoints, or of a Hugging Face model."""
    tasks: tuple[str, ...]
    """Names of tasks or of groups of tasks, or files (.yaml) that describe a task."""
    include: Path | None = None
    """A folder with the files of your own tasks, so that --tasks can name them."""
    fewshot: int | None = None
    """Examples before each question. Default: the task's."""
    limit: int | None = None
    """Questions per task (lower: faster, with larger errors). Default: all."""
    batch_size: int = 8
    """Questions that are answered together."""
    device: str = "cpu"
    """cpu, cuda, or cuda:NUMBER."""
    chat: bool = False
    """Ask the questions through the tokenizer's chat template."""
    out: Path | None = None
    """JSON file to write the results to."""


def main(argv: list[str]) -> int:
    options: Any = read_options(Options, argv, "thinwire eval")
    if min(options.batch_size, 1 if options.limit is None else options.limit) < 1 or (options.fewshot or 0) < 0:
        raise ThinwireError("--batch-size and --limit must be 1 or more, --fewshot must not be negative")
    if options.out is not None:
        refuse_unwritable(options.out, "--out")
    note("looking for the model and the tasks")
    refuse(options)
    note("loading torch, lm-evaluation-harness and the model")
    results = evaluate(options)
    print(extras.load("lm_eval.utils").make_table(results), flush=True)
    if options.out is not None:
        sections = ("results", "groups", "versions", "n-shot", "n-samples")
        selected = {name: results[name] for name in sections if name in results}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write(options.out, json.dumps(selected, indent=2, default=str) + "\n")
    return 0


def refuse(options: Options) -> None:
    """Refuse at once what would otherwise be found out after torch and the harness are loaded, which takes long.

    Raises:
        ThinwireError: there is no such model, folder or task, or lm_eval is not installed.
    """
    if not any(next(options.run.glob(name), None) for name in ("config.json", "checkpoints", "step-*", "meta.json")):
        aside = where_set_aside(options.run)
        raise ThinwireError(f"{options.run} is not a checkpoint, nor the folder of a run or Hugging Face model{aside}")
    if options.include is not None and not options.include.is_dir():
        raise ThinwireError(f"--include takes a folder with tasks, and {options.include} is none")
    names = {name for name in options.tasks if not _is_file(name)}
    harness = extras.package_folder("lm_eval") / "tasks"
    for folder in filter(None, (options.include, harness)):
        # A name stands as it is in the file that describes the task, or in one which that file includes.
        for path in folder.rglob("*"):
            if not names:
                return
            if path.suffix not in (".py", ".md") and path.is_file():
                text = path.read_bytes()
                names = {name for name in names if name.encode() not in text}
    for name in options.tasks:
        if name in names:
            raise _unknown(name)


def evaluate(options: Options) -> dict[str, Any]:
    """Run the harness; return its results.

    Raises:
        ThinwireError: there is no such model or task, or lm_eval is not installed.
    """
    with ends_at_once():
        from thinwire.train.checkpoint import trained_model
        from thinwire.train.model import pretrained

        lm_eval = extras.load("lm_eval")
        evaluator: Any = extras.load("lm_eval.evaluator")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # The harness asks git for the working folder's commit, and git complains if the folder is not in a repository.
    evaluator.get_git_commit_hash = lambda: None
    with tempfile.TemporaryDirectory(prefix="thinwire-eval-") as exported:
        folder = options.run
        if not (folder / "config.json").exists():
            trained, folder = trained_model.read(options.run), Path(exported)
            trained.export(folder)
            say(f"{trained.path} (step {trained.step})", sys.stderr)
        manager = _index_tasks(options)
        harness = extras.load("lm_eval.models.huggingface")
        tokenizer = pretrained.load_tokenizer(folder)
        if tokenizer.eos_token is None:
            line_end = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(line_end)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        model = harness.HFLM(
            pretrained=str(folder), tokenizer=tokenizer, device=options.device, batch_size=options.batch_size,
            dtype="float32",
        )  # fmt: skip
        results = lm_eval.simple_evaluate(
            model=model, tasks=list(options.tasks), num_fewshot=options.fewshot, limit=options.limit,
            task_manager=manager, apply_chat_template=options.chat, log_samples=False, bootstrap_iters=1000,
        )  # fmt: skip
    return dict(results)


def _index_tasks(options: Options) -> Any:
    """Make the harness's index of tasks; include the harness's thousands of own tasks only if one is asked for."""
    folder, unknown = options.include and str(options.include), list[str]()
    names = [name for name in options.tasks if not _is_file(name)]
    for defaults in (False, True):
        if defaults:
            note("looking through the harness's own tasks, which are thousands")
        manager = extras.load("lm_eval.tasks").TaskManager(include_path=folder, include_defaults=defaults)
        unknown = [name for name in names if name not in manager.all_tasks]
        if not unknown:
            return manager
    raise _unknown(unknown[0])


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml")) and Path(task).is_file()


def _unknown(task: str) -> ThinwireError:
    return ThinwireError(f"lm-evaluation-harness has no task '{task}': --include FOLDER adds your own")

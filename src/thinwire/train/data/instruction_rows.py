"""Instruction data: JSONL files of questions and answers, of which the answers are learnt.

    {"prompt": "2 + 2 = ", "completion": "4"}
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

A row is one sequence: no other row's text is in it. In a batch, shorter rows are padded behind their end to the
longest, where no token of theirs sees the padding. A token that is not learnt is written ``~token``, which is negative.

Prompt and answer are tokenized apart, as they will be when the answer is generated. After a completion comes the
tokenizer's end-of-text token, before the prompt its begin-of-text token if it puts one there; a chat template writes
both itself.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.train.data.corpus import HELD_OUT, is_held_out, paths_of
from thinwire.train.data.windows import Windows

Part = tuple[str, bool]
"""Some text, and whether it is learnt."""


class Examples(Windows):
    """Rows in an order per epoch. A row is (n,) int32 with n up to ``length`` + 1."""

    def __init__(self, rows: Sequence[Tensor], length: int, seed: int = 0) -> None:
        self._starts = [0, *itertools.accumulate(map(len, rows))]
        super().__init__(torch.cat(list(rows)), length, seed)

    def __post_init__(self) -> None:
        self.count = len(self._starts) - 1
        self.each = (len(self.tokens) - self.count) / self.count
        self._epoch, self._order = -1, torch.empty(0)

    def at(self, index: int) -> Tensor:
        return self.tokens[self._starts[index] : self._starts[index + 1]]

    def learnt(self, first: int, count: int) -> int:
        return sum(int((self.at(index)[1:] >= 0).sum()) for index in self.places(first, count))


def read(names: Sequence[str], valid: Sequence[str], tokenizer: Any, length: int, seed: int, *, tell: bool) -> tuple[
    Examples, Examples
]:  # fmt: skip
    """The rows to train on, and those to evaluate on: of ``valid``, or every 20th (of fewer than 20 the last).

    Args:
        names, valid: files or globs.
        tokenizer: transformers'.
        length: tokens of a row that are trained on, at most; what is longer is cut.
        tell: warn of rows that were cut.

    Raises:
        ThinwireError: a file cannot be read, a row is neither of the two kinds, or no row is left.
    """
    train = list(_rows(names, tokenizer))
    if valid:
        held = list(_rows(valid, tokenizer))
    elif len(train) < HELD_OUT:
        train, held = train[:-1], train[-1:]
    else:
        held = [row for i, row in enumerate(train) if is_held_out(i)]
        train = [row for i, row in enumerate(train) if not is_held_out(i)]
    found = []
    for rows, what in ((train, "--data"), (held, "--valid")):
        cut = [row[: length + 1] for row in rows]
        kept = [row for row in cut if (row[1:] >= 0).any()]
        longer = sum(len(row) > length + 1 for row in rows)
        if longer and tell:
            line = (f"{longer} of {len(rows)} rows of {what} are longer than --seq-len {length} and are cut; "
                    f"{len(rows) - len(kept)} are left out, because nothing of their answer is left")  # fmt: skip
            warnings.warn(line, ThinwireWarning, stacklevel=2)
        if not kept:
            raise ThinwireError(f"there is no row to {'train' if what == '--data' else 'evaluate'} on in {what}")
        found.append(Examples(kept, length, seed if what == "--data" else 0))
    return found[0], found[1]


def _rows(names: Sequence[str], tokenizer: Any) -> Iterator[Tensor]:
    plain = tokenizer("a")["input_ids"]
    begins = [tokenizer.bos_token_id] if tokenizer.bos_token_id in plain[:1] else []
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for where, row in _objects(names):
        parts, chat = _parts(row, tokenizer, where)
        tokens = [] if chat else [~token for token in begins]
        for text, learnt in parts:
            found = tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens += found if learnt else [~token for token in found]
        yield torch.tensor(tokens if chat else [*tokens, *ends], dtype=torch.int32)


def _objects(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for path in (path for name in names for path in paths_of(name)):
        try:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}, line {number}", json.loads(line)
        except OSError as error:
            raise ThinwireError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:
            raise ThinwireError(f"{path} is not JSONL: each line holds one JSON object") from None


def _parts(row: Any, tokenizer: Any, where: str) -> tuple[list[Part], bool]:
    """A row's text in parts, and whether a chat template wrote it."""
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return list(_turns(row["messages"], tokenizer, where)), True
    if isinstance(row, dict) and all(isinstance(row.get(name), str) for name in ("prompt", "completion")):
        return [(row["prompt"], False), (row["completion"], True)], False
    raise ThinwireError(f"{where}: a row has 'prompt' and 'completion' (text), or 'messages' (a list)")


def _turns(messages: list[Any], tokenizer: Any, where: str) -> Iterator[Part]:
    """Each answer as the template writes it behind what comes before it."""
    if not getattr(tokenizer, "chat_template", None):
        raise ThinwireError(f"{where} has 'messages', the tokenizer no chat template: use prompt and completion")

    def written(count: int, asks: bool) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=asks)

    done = ""
    for turn, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= {*message}:
            raise ThinwireError(f"{where}: a message has a 'role' and a 'content'")
        if message["role"] != "assistant":
            continue
        try:
            before, after = written(turn, True), written(turn + 1, False)
        except Exception as error:  # whatever the template raises
            raise ThinwireError(f"{where}: the chat template refuses it: {str(error).splitlines()[0]}") from None
        if not (before.startswith(done) and after.startswith(before)):
            raise ThinwireError(f"{where}: the chat template writes earlier turns anew: give each answer its own row")
        yield before[len(done) :], False
        yield after[len(before) :], True
        done = after
    if not done:
        raise ThinwireError(f"{where}: no message has the role 'assistant'")

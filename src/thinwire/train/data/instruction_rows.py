"""Instruction data: JSONL files of questions and answers. Only the answers are learnt.

    {"prompt": "2 + 2 = ", "completion": "4"}
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

A sequence holds one row. A batch pads rows behind their end, where no token of theirs sees the padding. A token that is
not learnt is written ``~token``, which is negative.

Prompt and answer are tokenized apart, as when an answer is generated; the answer as what it is, not as the beginning of
a text, which some tokenizers begin with a space. The tokenizer's end-of-text token follows the completion, and its
begin-of-text token (if it uses one) precedes the prompt; a chat template writes both itself.
"""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError, ThinwireWarning, first_line
from thinwire.train.data.corpus import HELD_OUT, match_paths, reading
from thinwire.train.data.tokenizer import adds_space, encode_behind
from thinwire.train.data.windows import Windows

Passage = tuple[str, bool]  # a text, and whether it is learnt
HALF_PAIR = re.compile("[\ud800-\udfff]")
REASONING = ("reasoning_content", "thinking", "reasoning")  # transformers' names
DAY = datetime(2024, 7, 26)  # Llama 3's template takes it where it knows no clock
# With today's date a run that goes on tomorrow, or a rank behind midnight, would have another text. As transformers
# passes no function to templates, a macro takes the place of its clock.
CODES = [f"%{padding}{letter}" for letter in ascii_letters for padding in ("", "-")]
CLOCK = "".join(f" | replace({code!r}, {DAY.strftime(code)!r})" for code in CODES)
CLOCK = f"{{% macro strftime_now(format) %}}{{{{ format{CLOCK} }}}}{{% endmacro %}}\n"


class InstructionRows(Windows):
    """Rows in an order per epoch. A row is (n,) int32 with n up to ``length`` + 1."""

    def __init__(self, rows: Sequence[Tensor], length: int, seed: int = 0) -> None:
        self.tokens, self.length, self.seed = torch.cat(list(rows)), length, seed
        self._starts = [0, *itertools.accumulate(map(len, rows))]
        self.count = len(rows)
        self.targets_per_window = (len(self.tokens) - self.count) / self.count

    def window(self, index: int) -> Tensor:
        return self.tokens[self._starts[index] : self._starts[index + 1]]

    def count_learnt(self, first: int, count: int) -> int:
        return sum(int((self.window(index)[1:] >= 0).sum()) for index in self.indices(first, count))


def read_rows(
    names: Sequence[str], valid: Sequence[str], tokenizer: Any, length: int, seed: int, *, warns: bool
) -> tuple[InstructionRows, InstructionRows]:
    """Read the rows to train on, and those to evaluate on: of ``valid``, or every 20th (of fewer than 20 the last).

    The names are files or globs, ``tokenizer`` is transformers'. A row is cut to ``length`` targets (if ``warns``, with
    a warning).

    Raises:
        ThinwireError: a file cannot be read, a row is neither of the two kinds, or no row is left.
    """
    train = list(_tokenized(names, tokenizer))
    if valid:
        held_out = list(_tokenized(valid, tokenizer))
    else:
        first = min(HELD_OUT, len(train)) - 1
        held_out = train[first::HELD_OUT]
        del train[first::HELD_OUT]
    apart = "--valid" if valid else "what is held out of --data (name --valid)"
    return _cut(train, length, seed, "--data", warns), _cut(held_out, length, 0, apart, warns)


def _cut(rows: Sequence[Tensor], length: int, seed: int, option: str, warns: bool) -> InstructionRows:
    """Cut rows to ``length`` + 1 tokens, and leave out those with nothing left to learn."""
    learnt = [row for row in (row[: length + 1] for row in rows) if (row[1:] >= 0).any()]
    longer, lost = sum(len(row) > length + 1 for row in rows), len(rows) - len(learnt)
    cut = f"{longer} are longer than {length} tokens (--seq-len, or the model's positions) and are cut; " * bool(longer)
    if (longer or lost) and warns:
        line = f"of {len(rows)} rows of {option} {cut}{lost} are left out, because nothing of their answer is learnt"
        warnings.warn(line, ThinwireWarning, stacklevel=3)
    if not learnt:
        raise ThinwireError(f"no row is left to {'train' if option == '--data' else 'evaluate'} on in {option}")
    return InstructionRows(learnt, length, seed)


def opening_tokens(tokenizer: Any) -> list[int]:
    """Return the token with which transformers' ``tokenizer`` begins a text, if it has one."""
    begins = tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1]
    return [tokenizer.bos_token_id] if begins else []


def _tokenized(names: Sequence[str], tokenizer: Any) -> Iterator[Tensor]:
    """Yield the tokens of each row, (n,) int32, with ``~token`` for those that are not learnt."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    opening, spaced = opening_tokens(tokenizer), adds_space(encode)
    for source, row in _read_objects(names):
        row = row if isinstance(row, dict) else {}
        passages: Iterable[Passage]
        if unread := [key for key in ("tools", "functions") if row.get(key)]:
            raise ThinwireError(f"{source}: '{unread[0]}' is not read: write it into a message")
        if chat := isinstance(row.get("messages"), list):
            passages = _chat_passages(row["messages"], tokenizer, source)
        elif all(isinstance(row.get(name), str) for name in ("prompt", "completion")):
            passages = [(row["prompt"], False), (row["completion"], True)]
        else:
            raise ThinwireError(f"{source}: a row has 'prompt' and 'completion' (text), or 'messages' (a list)")
        tokens, before = [] if chat else [~token for token in opening], ""
        for text, learnt in passages:
            if HALF_PAIR.search(text):
                raise ThinwireError(f"{source}: half of a pair of UTF-16, as in \\ud83d without \\ude00, is no text")
            ids = encode_behind(encode, before, text) if spaced else encode(text)
            tokens += ids if learnt else [~token for token in ids]
            before = text or before
        if not chat and tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
        yield torch.tensor(tokens, dtype=torch.int32, device="cpu")


def _read_objects(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield ("FILE, line NUMBER", value) for each line of JSON."""
    for path in (path for name in names for path in match_paths(name)):
        with reading(path), path.open("rb") as file:
            for number, line in enumerate(file, 1):
                source = f"{path}, line {number}"
                try:
                    text = line.decode("utf-8-sig").strip()  # Windows begins a file with a mark
                    row = json.loads(text) if text else None
                except (ValueError, RecursionError) as error:
                    raise ThinwireError(f"{source} is not a JSON object in UTF-8: {first_line(error)}") from None
                if text:
                    yield source, row


def _write(messages: list[Any], tokenizer: Any, asks: bool = False) -> str:
    """Write messages as the chat template does; if it ``asks``, up to where an answer begins."""
    template = CLOCK + tokenizer.get_chat_template()
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=asks)


def _chat_passages(messages: list[Any], tokenizer: Any, source: str) -> Iterator[Passage]:
    """Yield the text before each answer and then the answer, both as the chat template writes them."""
    if not getattr(tokenizer, "chat_template", None):
        raise ThinwireError(
            f"{source} has 'messages', but the tokenizer has no chat template: use prompt and completion"
        )
    text, end = "", 0
    for turn, message in enumerate(messages):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            raise ThinwireError(f"{source}: a message has a 'role' and a 'content'")
        if message["role"] != "assistant":
            continue
        if not turn:
            raise ThinwireError(f"{source}: the first message is an answer, which no chat template asks for: ask first")
        try:
            prompt, answered = _write(messages[:turn], tokenizer, True), _write(messages[: turn + 1], tokenizer)
        except Exception as error:  # whatever the template raises
            raise ThinwireError(f"{source}: the chat template refuses it: {first_line(error)}") from None
        if message.get("weight", 1) != 1:
            raise ThinwireError(f"{source}: 'weight' of an answer is not read: leave the answer out, or its row")
        if not (prompt.startswith(text) and answered.startswith(prompt)):
            line = "changes earlier turns, or how it asks: give each answer its own row, or write prompt and completion"
            raise ThinwireError(f"{source}: the chat template {line}")
        yield prompt[len(text) :], False
        yield answered[len(prompt) :], True
        text, end = answered, turn + 1
    if not text:
        raise ThinwireError(f"{source}: no message has the role 'assistant'")
    for number, message in enumerate(messages[:end]):
        for key in ("content", "tool_calls", "function_call", *REASONING):
            if message.get(key) or (key == "content" and not isinstance(message[key], str)):
                _check_shown(messages[:end], text, number, key, tokenizer, source)


def _check_shown(messages: list[Any], text: str, number: int, key: str, tokenizer: Any, source: str) -> None:
    """Refuse a value of message ``number`` that the chat template leaves out of ``text``, or writes as Python does."""
    message, value = messages[number], messages[number][key]
    # In place of an empty text a template may write its own, which may be this one.
    other = f"{value}a" if isinstance(value, str) else ""
    alike = [name for name in REASONING if message.get(name) == value] if key in REASONING else [key]
    try:
        other_message = message | dict.fromkeys(alike, other)
        changed = _write([*messages[:number], other_message, *messages[number + 1 :]], tokenizer)
    except Exception:  # whatever the template raises: it reads the value
        changed = ""
    if value and changed == text:
        raise ThinwireError(f"{source}: the chat template leaves out '{key}' of role '{message['role']}'")
    if changed != text and not isinstance(value, str) and str(value) in text:
        raise ThinwireError(f"{source}: the chat template writes '{key}' as Python does: {value}")

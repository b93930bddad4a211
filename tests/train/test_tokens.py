"""Token files: the same tokens as where the text is read whole, and memory that does not grow with them."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from unittest import mock

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import models, normalizers, pre_tokenizers

import pretrained_models
from thinwire.base.errors import ThinwireError
from thinwire.base.processes import free_port
from thinwire.train.data import token_files
from thinwire.train.data.corpus import SPAN, read_corpus, spans, split
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.data.windows import Windows

LONG = "".join(f"{i} times {i % 7} is {i * (i % 7)}: grüß Ω.\n" for i in range(30_000))
assert len(LONG) > 22 * SPAN


@pytest.mark.parametrize(
    "length, tokenizer",
    [(20 * SPAN, "bytes"), (19 * SPAN, "bytes"), (19 * SPAN + 1, "bytes"), (5 * SPAN + 17, "bytes"),
     (2 * SPAN, "bpe:300"), (21 * SPAN, "bpe:260")],
)  # fmt: skip
def test_files_hold_what_the_text_is_tokenized_to(length, tokenizer, tmp_path):
    few_words = tokenizer == "bpe:260"  # BPE takes its time over many
    text = (f"{LONG[:2000]}\n" * 400 if few_words else LONG)[:length]
    corpus = tmp_path / "text.txt"
    corpus.write_text(text)
    token_files.tokenize([str(corpus)], tokenizer, tmp_path / "out")
    found = token_files.find_token_files([str(tmp_path / "out")], (), "bytes")
    train, valid = split(read_corpus([str(corpus)]))
    made = Tokenizer(tokenizer, spans([train]))
    for part, files in ((train, found.train), (valid, found.valid)):
        assert torch.equal(files[0 : len(files)], made.encode(part).long())
    windows, files = Windows(made.encode(train), 32, seed=3), Windows(found.train, 32, seed=3)
    for ours, theirs in zip(windows.batch(5, 9), files.batch(5, 9), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", pretrained_models.TOKENIZERS)
def test_a_text_of_several_spans_begins_once(kind, tmp_path, monkeypatch):
    """So do both sides of token files, which have more spans than one: no space is added in the middle of a word."""
    monkeypatch.setattr("thinwire.train.data.corpus.SPAN", 256)
    made, corpus = pretrained_models.make_tokenizer(kind), tmp_path / "text.txt"
    made.save(str(tmp_path / "tokenizer.json"))
    corpus.write_text(text := ("\n\nit is 11 times\n" * (43 * 256 // 17))[2:])
    ours = Tokenizer(name := f"folder:{tmp_path}", ())
    token_files.tokenize([str(corpus)], name, tmp_path / "out")
    found = token_files.find_token_files([str(tmp_path / "out")], (), "bytes")
    for part, files in zip(split(text), (found.train, found.valid), strict=True):
        tokens = ours.encode(part)
        assert torch.equal(files[0 : len(files)], tokens.long())
        assert made.decode(tokens.tolist()) == made.decode(made.encode(part).ids)


def test_a_span_behind_a_lead_that_is_stripped_holds_no_other_text():
    """As RemBert's tokenizer does, which begins texts with a space, and ends them without one."""
    pieces = [("<unk>", 0.0), *((letter, -4.0) for letter in "\u2581\nabesy0"), ("\u2581yes", -1.0), ("yes", -1.0)]
    made = HubTokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    made.normalizer = normalizers.Strip(left=False, right=True)
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    given = list(Tokenizer("hub:stripping", made).encode_spans(["yes yes", "yes a", "b yes"]))
    assert ["".join(made.id_to_token(token) for token in span) for span in given] == [
        "\u2581yes\u2581yes", "yes\u2581a", "b\u2581yes"
    ]  # fmt: skip


def test_a_tokenizer_may_leave_numbers_out(tmp_path):
    made = HubTokenizer(models.WordLevel({"a": 0, "b": 7, "[UNK]": 300}, unk_token="[UNK]"))
    tokenizer = Tokenizer("hub:gaps", made)
    assert tokenizer.vocabulary == 301 and tokenizer.encode("x").tolist() == [300]


@pytest.mark.parametrize("cached", [True, False])
def test_a_tokenizer_of_the_hub_that_nobody_answers_for_is_refused_at_once(cached, monkeypatch):
    """The hub's client tried again for a minute and a half before it gave up; what it has in its cache needs no hub."""
    asked, made = [], HubTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    client = type("Client", (), {"from_pretrained": staticmethod(lambda name: asked.append(name) or made)})
    monkeypatch.setattr("thinwire.train.data.tokenizer.HubTokenizer", client)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "a file" if cached else None)
    refused = pytest.raises(ThinwireError, match=r"load the tokenizer a/b: http://127.* does not answer .*folder:PATH")
    with nullcontext() if cached else refused:
        assert Tokenizer("hub:a/b", ()).vocabulary == 1
    assert asked == ["a/b"] * cached


def test_pieces_of_several_documents_are_the_text():
    cut = list(spans(["a" * 7, "", "b" * (2 * SPAN), "c"]))
    assert "".join(cut) == "a" * 7 + "b" * (2 * SPAN) + "c" and [len(span) for span in cut] == [SPAN, SPAN, 8]


def test_nanogpt_and_numpy_files_are_read_as_they_are(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 50257, 5000)
    for shard, part in enumerate(np.array_split(numbers, 3)):
        part.astype("<u2").tofile(tmp_path / f"train-{shard}.bin")
    np.save(tmp_path / "valid.npy", numbers[:700].astype(np.int32))
    found = token_files.find_token_files([str(tmp_path / "train-*.bin")], [str(tmp_path / "valid.npy")], "ids:50257")
    assert found.train[0:5000].tolist() == numbers.tolist() and len(found.train) == 5000
    assert found.train[1600:1700].tolist() == numbers[1600:1700].tolist()  # across two files
    assert found.valid[0:700].tolist() == numbers[:700].tolist()
    held = token_files.find_token_files([str(tmp_path / "train-*.bin")], (), "ids:50257")
    assert [*held.train[0:5000].tolist(), *held.valid[0:5000].tolist()] == numbers.tolist() and len(held.valid) == 250
    assert found.train.digest() != held.train.digest()


def test_what_is_damaged_or_does_not_fit_is_refused(tmp_path):
    corpus, out = tmp_path / "text.txt", tmp_path / "out"
    corpus.write_text(LONG[:SPAN])
    token_files.tokenize([str(corpus)], "bpe:300", out)
    (tmp_path / "a.bin").write_bytes(bytes(100))
    (tmp_path / "odd.bin").write_bytes(bytes(99))
    for corpora, tokenizer, why in (
        ([str(tmp_path)], "bytes", "is a folder without token files"),
        ([str(out)], "bpe:400", "was tokenized with bpe:300"),
        ([str(tmp_path / "a.bin")], "bytes", "ids:SIZE"),
        ([str(tmp_path / "a.bin"), str(corpus)], "ids:9", "not both"),
        ([str(tmp_path / "none-*.bin")], "ids:9", "no file matches"),
        ([str(tmp_path / "a.bin")], "ids:65537", "16 bits, and ids:65537 has larger ones"),
        ([str(tmp_path / "odd.bin")], "ids:9", "ends within a token"),
    ):
        with pytest.raises(ThinwireError, match=why):
            token_files.find_token_files(corpora, (), tokenizer)
    for name in ("tokens.json", "train.bin", "valid.bin", "tokenizer-bpe-300.json"):
        own = tmp_path / f"own-{name}"
        own.mkdir()
        (own / name).write_text("my own")
        for given in (str(corpus), str(tmp_path / "nowhere.txt")):
            with pytest.raises(ThinwireError, match=rf"{name} is there already: name another folder"):
                token_files.tokenize([given], "bpe:300", own)
        assert [(path.name, path.read_text()) for path in own.iterdir()] == [(name, "my own")]
    (tmp_path / "other").mkdir()
    with pytest.raises(ThinwireError, match="cannot read the corpus"):  # behind the first piece
        token_files.tokenize([str(corpus), str(tmp_path / "nowhere.txt")], "bytes", tmp_path / "other")
    assert not any((tmp_path / "other").iterdir())
    np.array([1, 2, 9], "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(ThinwireError, match="token 9, but the tokenizer has only 9"):
        token_files.find_token_files([str(tmp_path / "a.bin")], (), "ids:9").train[0:3]
    for side in token_files.SIDES:
        whole = bytearray((out / f"{side}.bin").read_bytes())
        (out / f"{side}.bin").write_bytes(whole[:70] + bytes([whole[70] ^ 1]) + whole[71:])
        with pytest.raises(ThinwireError, match=rf"{side}.bin is damaged: its bytes are others than were written"):
            token_files.find_token_files([str(out)], (), "bytes")
        (out / f"{side}.bin").write_bytes(whole)
    token_files.find_token_files([str(out)], (), "bytes")
    (out / "train.bin").write_bytes(b"short")
    with pytest.raises(ThinwireError, match="is damaged: it has 5 bytes"):
        token_files.find_token_files([str(out)], (), "bytes")
    (out / "tokens.json").write_text(json.dumps([1]))
    with pytest.raises(ThinwireError, match="is damaged: tokenize the text anew"):
        token_files.find_token_files([str(out)], (), "bytes")
    with pytest.raises(ThinwireError, match="numbers without text"):
        Tokenizer("ids:9", ()).decode([1])


@pytest.mark.parametrize("kept", [False, True])
def test_a_full_disk_leaves_nothing_of_a_folder_of_tokens(tmp_path, kept):
    corpus, out = tmp_path / "text.txt", tmp_path / "out"
    corpus.write_text(LONG[:SPAN])
    if kept:
        out.mkdir()
        (out / "own").touch()
    full = OSError(28, "No space left on device")
    for place, name in ((Tokenizer, "encode_spans"), (token_files, "write"), (os, "fsync")):
        with mock.patch.object(place, name, side_effect=full), pytest.raises(ThinwireError, match="No space left"):
            token_files.tokenize([str(corpus)], "bpe:300", out)
        assert [path.name for path in (out.iterdir() if out.exists() else ())] == ["own"] * kept
        assert out.exists() == kept
    token_files.tokenize([str(corpus)], "bpe:300", out)


def test_of_two_that_tokenize_into_one_folder_at_once_the_first_to_end_keeps_its_files(tmp_path, monkeypatch):
    """The other had opened the same files, and removed them as it failed."""
    texts, out, encode_spans = [tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out", Tokenizer.encode_spans
    for text, letter in zip(texts, "ab", strict=True):
        text.write_text(letter * (25 * SPAN))

    def encode_slowly(self, *given, **named):
        monkeypatch.undo()
        token_files.tokenize([str(texts[1])], "bytes", out)
        return encode_spans(self, *given, **named)

    monkeypatch.setattr(Tokenizer, "encode_spans", encode_slowly)
    with pytest.raises(ThinwireError, match="came into being meanwhile"):
        token_files.tokenize([str(texts[0])], "bytes", out)
    assert {path.name for path in out.iterdir()} == {"train.bin", "valid.bin", "tokens.json"}
    found = token_files.find_token_files([str(out)], (), "bytes")
    assert set(found.train[0 : 24 * SPAN].tolist()) == {ord("b")}

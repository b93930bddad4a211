"""Whatever comes from the wire or from a state: values or a ThinwireError, never a signal, never another's memory.

A search: every codec that a method uses decodes bytes that are random, zero from some place on, or wrong in one bit, a
thousand of each; and whole methods take such messages on virtual ranks. Each in a process of its own.
"""

from __future__ import annotations

import random
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

import ranks
import thinwire
from breadth import ALL, dealt
from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.codecs.base import Codec
from thinwire.codecs.sparse import Positions
from thinwire.ops import mask
from thinwire.ops.mask import reference
from thinwire.ops.rows import CopyTable
from thinwire.proof.ranks import ThreadComm
from thinwire.proof.record import Setup, play, small

BY_NAME = {cls.name: cls for cls in methods.TABLE}
KNOBS = [
    *((name, {}) for name in BY_NAME if name != "dense"), ("topk", {"density": 0.02, "feedback": "gradients"}),
    ("trickle", {"mask": "merged"}), ("trickle", {"mask": "merged", "bits": 4}),
    ("scape", {"density": 0.02, "warmup": 0}),
    ("dgc", {"density": 0.02}),
]  # fmt: skip
PLACES = (Setup("all_reduce", 2), Setup("reduce_scatter", 3))
EACH = 1000 if ALL else 50
"""Of each kind of damage, for each message that was recorded."""
WITHOUT_CODEC = ("none", "powersgd", "local-steps", "scape")
"""Methods that decode nothing by a codec of their own in what is played: they have factors, an outer method's, or
values at a mask as they are (scape). Whole steps of theirs are spoilt below."""
PLAYS = 20
PATTERN, MARGIN = 0x5A, 4096  # bytes before and behind what is written to


def damaged(wire: Tensor, kind: str, rng: random.Random) -> Tensor:
    """A copy of ``wire`` (any shape and dtype) with other bytes."""
    wrong = wire.clone().contiguous()
    octets = wrong.view(-1).view(torch.uint8)
    if kind == "random":
        octets.copy_(torch.randint(0, 256, octets.shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))))
    elif kind == "truncated":
        octets[rng.randrange(len(octets)) :] = 0
    else:
        octets[rng.randrange(len(octets))] ^= 1 << rng.randrange(8)
    return wrong


KINDS = ("random", "truncated", "one bit")


class Guarded:
    """Memory of some shape, of which the bytes before and behind are watched."""

    def __init__(self, like: Tensor) -> None:
        size = like.numel() * like.itemsize
        self._all = torch.full((2 * MARGIN + size,), PATTERN, dtype=torch.uint8)
        self.inside = self._all[MARGIN : MARGIN + size].view(like.dtype).view(like.shape)
        self.inside.copy_(like)
        self._size = size

    def whole(self) -> bool:
        before, behind = self._all[:MARGIN], self._all[MARGIN + self._size :]
        return bool((before == PATTERN).all() and (behind == PATTERN).all())


def recorded(make, where: Setup) -> list:
    """(what decodes, its name, the message, what it writes to, other arguments), of a run of ``make()``."""
    calls: dict[tuple, tuple] = {}

    def watch(cls: type, name: str):
        original = getattr(cls, name)

        def watched(self, wire, out, *args, **more):
            key = (type(self).__name__, name, tuple(wire.shape))
            # What settles a bucket of SCAPE's as it decodes needs that bucket: it is in the whole steps below.
            if wire.numel() and len(calls) < 12:
                calls.setdefault(key, (self, original, wire.clone(), out.clone(), args))
            return original(self, wire, out, *args, **more)

        return mock.patch.object(cls, name, watched)

    with watch(Codec, "decode"), watch(Codec, "decode_sum"), watch(Codec, "encode_sum"), watch(Positions, "read"):
        play(make, where, 6)
    return list(calls.values())


def searched(name: str, knobs: dict) -> list[str]:
    """What a method's codecs do that they must not."""
    torch.set_num_threads(1)
    rng, found, make = random.Random(f"{name}{knobs}"), [], partial(small, BY_NAME[name], **knobs)
    for where in PLACES:
        if where.engine not in BY_NAME[name].engines:
            continue
        calls = recorded(make, where)
        if not calls and not (name in WITHOUT_CODEC and "payload" not in knobs):
            found.append(f"{where}: no codec was seen, so nothing was searched")
        for codec, function, wire, out, args in calls:
            for kind in KINDS:
                for _ in range(EACH):
                    target, message = Guarded(out), Guarded(damaged(wire, kind, rng))
                    more = {} if function.__name__ != "read" else {"space": scratch}
                    try:
                        function(codec, message.inside, target.inside, *args[: None if not more else 0], **more)
                    except ThinwireError:
                        pass
                    except Exception as error:
                        found.append(f"{codec}: {kind}: {type(error).__name__}: {error}"[:200])
                    if not (target.whole() and message.whole()):
                        found.append(f"{codec}: {kind}: memory of others was written to")
                if len(found) > 5:
                    return found
    return found


def scratch(use, shape, dtype):
    return torch.zeros(*shape, dtype=dtype)


def spoilt_plays(name: str, knobs: dict) -> list[str]:
    """Whole steps in which what the last rank receives is damaged once: they end, or say why they do not."""
    torch.set_num_threads(1)
    found, make = [], partial(small, BY_NAME[name], **knobs)
    for number in range(PLAYS):
        where = PLACES[number % len(PLACES)]
        if where.engine not in BY_NAME[name].engines:
            continue
        rng = random.Random(f"{name}{knobs}{number}")
        hit, seen = rng.randrange(1, 12), [0]

        def spoil(out: Tensor, rank: int, where=where, rng=rng, hit=hit, seen=seen, number=number) -> None:
            if rank == where.size - 1 and not out.dtype.is_floating_point:
                seen[0] += 1
                if seen[0] == hit:
                    out.copy_(damaged(out, KINDS[number % len(KINDS)], rng))

        def spoiling(original, spoil=spoil):
            def damaging(self, out, *args, **more):
                work = original(self, out, *args, **more)
                spoil(out, self._world_rank)
                return work

            return damaging

        verbs = {verb: spoiling(getattr(ThreadComm, verb)) for verb in ("_all_gather", "_all_to_all")}
        try:
            with mock.patch.multiple(ThreadComm, **verbs):
                play(make, where, 6)
        except ThinwireError:
            pass
        except Exception as error:
            found.append(f"{where}: {KINDS[number % len(KINDS)]}: {type(error).__name__}: {error}"[:300])
    return found


@pytest.mark.parametrize(("name", "knobs"), dealt(KNOBS, 0, range(4)), ids=lambda of: str(of).replace(" ", ""))
def test_no_message_makes_a_codec_leave_its_memory(name, knobs):
    assert not ranks.alone(searched, name, knobs)


@pytest.mark.parametrize(("name", "knobs"), dealt(KNOBS, 2, range(4)), ids=lambda of: str(of).replace(" ", ""))
def test_no_message_ends_a_method_without_a_word(name, knobs):
    assert not ranks.alone(spoilt_plays, name, knobs)


@pytest.mark.parametrize("by", [mask, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize(
    "positions", [[3, 70, 256], [3, 70, 1 << 30], [-1, 3, 70], [3, 3, 70], [70, 3, 200], [3, 70 - (1 << 31), 200]]
)
def test_positions_that_are_none_are_refused_by_every_backend(by, positions):
    memory = torch.zeros(8, dtype=torch.int64)
    words, given = memory[2:6].view(1, 4), torch.tensor([positions], dtype=torch.int32)
    with pytest.raises(ThinwireError, match="do not rise, or one is outside the 256 columns"):
        by.from_lists([(given, slice(0, 4))], words)
    if not 0 <= min(positions) <= max(positions) < 256:
        with pytest.raises(ThinwireError, match="outside the 256 columns"):
            by.from_indices(given, words)
    assert not memory[:2].any() and not memory[6:].any()
    by.from_lists([(torch.tensor([[3, 70, 255]], dtype=torch.int32), slice(0, 4))], words)
    assert int(mask.popcount(words)) == 3


def masks_searched() -> list[str]:
    """Masks with other bits than they should have, of parts that do not end with a word, in all that reads one."""
    torch.set_num_threads(1)
    rng, found = random.Random(0), []
    for number in range(10 * EACH):
        columns, rows, k = rng.randrange(1, 200), rng.randrange(1, 4), rng.randrange(1, 40)
        width = -(-columns // 64) * 64
        k = min(k, columns)
        flags = torch.zeros(rows, width, dtype=torch.bool)
        for row in flags:
            row[torch.tensor(rng.sample(range(columns), k))] = True
        words = mask.pack(flags, torch.zeros(rows, width // 64, dtype=torch.int64))
        wrong = damaged(words, KINDS[number % len(KINDS)], rng)
        payload = torch.randn(rows, k)
        part, kept = mask.MaskedSegment(0, columns, width, k, 0.9), CopyTable([], torch.device("cpu"))
        uses = {
            "scatter": (torch.zeros(rows, width), partial(mask.scatter, payload, wrong)),
            "renew": (torch.ones(rows, columns), partial(mask.renew, payload, wrong, [part], kept)),
        }
        for use, (like, act) in uses.items():
            target = Guarded(like)
            try:
                act(target.inside)
            except ThinwireError:
                pass
            except Exception as error:
                found.append(f"{use}: {type(error).__name__}: {error}"[:200])
            if not target.whole():
                found.append(f"{use}: {columns} columns: memory of others was written to")
        if len(found) > 5:
            break
    return found


def test_no_mask_makes_a_kernel_leave_its_memory():
    assert not ranks.alone(masks_searched)


def _loaded(rank: int, world: int) -> dict[str, str]:
    """Masks of a saved state with one bit, one position, or another order; the wire stays as it was."""
    from engines import build, train

    said = {}
    for spec in ("scape(density=0.02, smallest=100, warmup=0)", "scape(density=0.2, smallest=100, warmup=0)",
                 "radius(density=0.2, T=2, start=0, smallest=100)"):  # fmt: skip
        model = build("ddp", world)
        method = methods.resolve(spec)
        optimizer = type(method).OPTIMIZER(model.parameters(), lr=1e-3)
        wire = thinwire.compress(model, optimizer, method, steps=50)
        train(model, optimizer, rank, range(4), wire)
        state = wire.state_dict()
        key = next(key for key in sorted(state) if "=mask/" in key)
        for what, other in {
            "bit": lambda mask: mask.view(torch.uint8).view(-1)[1:2].bitwise_xor_(64),
            "far": lambda mask: mask.view(torch.uint8).view(-1)[3:4].fill_(0x40),
            "order": lambda mask: mask.view(torch.uint8).copy_(mask.view(torch.uint8).flip(-1)),
        }.items():
            changed = {name: value.clone() for name, value in state.items()}
            other(changed[key])
            try:
                wire.load_state_dict(changed)
                said[f"{spec}, {what}"] = "taken"
            except ThinwireError as error:
                said[f"{spec}, {what}"] = str(error)
        wire.load_state_dict(state)
        train(model, optimizer, rank, range(4, 6), wire)
        wire.close()
    return said


def test_a_saved_mask_that_is_none_is_refused_by_key():
    for said in ranks.run(_loaded, 2):
        assert len(said) == 9
        for case, message in said.items():
            if "order" in case and "0.02" not in case:
                continue  # other bits of the same number are another mask, which nobody can tell
            assert "the saved state is damaged: =mask/" in message, (case, message)

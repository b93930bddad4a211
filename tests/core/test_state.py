"""What a method remembers: held against a plain dict of values, over random steps in random buckets."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.core.bucket import Bucket, Piece
from thinwire.core.state import (
    State,
    dump_state,
    find_entries,
    load_state,
    next_exchange,
    put_back,
    read_existing,
)

CPU = torch.device("cpu")
SPANS = {"x": 5, "y": 12, "z": 9}
ROWS = 2
LAYOUTS = (("xy", "z"), ("xyz",), ("x", "zy"), ("xy",), ("z", "x"), ("y",))
"""Names side by side are in one bucket; those that are missing had no gradient in that exchange."""
KINDS = {"wide": None, "one": 1, "slow": None}
"""Kind -> rows, where not the bucket's. "slow" is offloaded."""


def bucket_of(names: str) -> Bucket:
    pieces, offset = [], 0
    for name in names:
        pieces.append(Piece(name, offset, ROWS * SPANS[name]))
        offset += ROWS * SPANS[name]
    return Bucket(pieces, rows=ROWS, owner=False, group=8, dtype=torch.float32, device=CPU)


def parts(bucket: Bucket, values: Tensor) -> dict[str, Tensor]:
    """By name, without padding."""
    return {of.name: values[:, of.start : of.start + of.span].clone() for of in bucket.segments}


class Plain:
    """What :class:`State` means, without its memory: values by (kind, name); ``small``: those that were put."""

    def __init__(self) -> None:
        self.committed: dict[tuple[str, str], Tensor] = {}
        self.earlier: dict[tuple[str, str], Tensor] = {}
        self.written: dict[tuple[str, str], Tensor] = {}
        self.small: list[dict[str, Tensor | None]] = [{}, {}, {}]

    def read(self, kind: str, name: str) -> Tensor:
        key, zeros = (kind, name), torch.zeros(KINDS[kind] or ROWS, SPANS[name])
        return self.earlier.get(key, self.committed.get(key, zeros))

    def again(self) -> None:
        self.earlier |= self.written
        self.small[1] |= self.small[2]
        self.written, self.small[2] = {}, {}

    def rollback(self, names: str, kinds: tuple[str, ...] | None) -> None:
        """Of these ``names`` alone, and ``kinds``: the step counts for the others."""
        self.again()
        for kind, name in self.earlier:
            if name in names and (kinds is None or kind in kinds):
                self.earlier[kind, name] = self.committed.get((kind, name), torch.zeros_like(self.earlier[kind, name]))
        if kinds is None:
            self.small[1] = {name: value for name, value in self.small[1].items() if name not in names}

    def end(self, *, counts: bool) -> None:
        self.again()
        if counts:
            self.committed |= self.earlier
            self.small[0] |= self.small[1]
            self.small[0] = {name: value for name, value in self.small[0].items() if value is not None}
        self.earlier, self.small[1] = {}, {}


def same(found: dict[str, Tensor], plain: Plain) -> bool:
    """``found``: a state_dict. Of what was read, and never written, there are zeros."""
    expected = {f"{kind}/{name}": values for (kind, name), values in plain.committed.items()}
    expected |= {f"=note/{name}": value for name, value in plain.small[0].items() if value is not None}
    zeros = {key for key in found if key not in expected and not found[key].any()}
    return found.keys() - zeros == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def exchange(state: State, plain: Plain, layout: tuple[str, ...], draw: random.Random) -> None:
    for names in layout:
        bucket = bucket_of(names)
        for kind, rows in KINDS.items():
            values = state.read(kind, bucket, rows)
            given = parts(bucket, values)
            assert all(torch.equal(given[name], plain.read(kind, name)) for name in names), (kind, names)
            held = read_existing(state, kind, bucket)
            assert held is not None and torch.equal(held, values)
            if draw.random() < 0.25:
                continue
            out = state.write(kind, bucket, rows)
            out.copy_(torch.randn(out.shape))
            values = state.read(kind, bucket, rows)  # writing has not changed it
            assert all(torch.equal(part, given[name]) for name, part in parts(bucket, values).items())
            put_back(state, kind, bucket)
            plain.written |= {(kind, name): part for name, part in parts(bucket, out).items()}
        for name in names:
            value = draw.choice([None, torch.randn(3)])
            assert (note := state.get("note", name)) is plain.small[1].get(name, plain.small[0].get(name)), note
            state.put("note", name, value)
            plain.small[2][name] = value


@pytest.mark.parametrize("seed", range(12))
def test_a_state_is_a_dict_by_parameter_whatever_the_buckets(seed):
    """In random buckets, with steps that exchange twice, that do not count, that are saved and loaded."""
    torch.manual_seed(seed)
    draw, state, plain = random.Random(seed), State({"slow"}), Plain()
    for _ in range(12):
        exchange(state, plain, draw.choice(LAYOUTS), draw)
        while draw.random() < 0.4:
            next_exchange(state)
            plain.again()
            exchange(state, plain, draw.choice(LAYOUTS), draw)
        if draw.random() < 0.4:
            some = draw.choice(["x", "yz", "xyz", ""]), draw.choice([None, ("one", "slow"), ()])
            state.rollback(*some)
            plain.rollback(*some)
        counts = draw.random() < 0.7
        if counts:
            state.commit()
        else:
            state.rollback()
        plain.end(counts=counts)
        saved = dump_state(state)
        assert same(saved, plain)
        assert all(state.get(*key.split("/")).equal(saved[key]) for key in saved if "=" not in key)
        assert state.get("wide", "nobody") is None
        assert {(name, value) for _, name, value in find_entries(state, "no")} == set(plain.small[0].items())
        if draw.random() < 0.2:
            state = State({"slow"}) if draw.random() < 0.5 else state
            loads = state.loads
            load_state(state, saved)
            assert state.loads == loads + 1 and same(dump_state(state), plain)
            assert all(state.get(*key.split("/")).equal(saved[key]) for key in saved if "=" not in key)
            plain.small[0] = {name: state.get("note", name) for name in plain.small[0]}
            for values in saved.values():
                values.fill_(torch.nan)  # it is the reader's own


def filled(state: State, kind: str, names: str, value: float) -> Bucket:
    bucket = bucket_of(names)
    state.read(kind, bucket)
    state.write(kind, bucket).fill_(value)
    return bucket


def test_what_is_dropped_is_forgotten_with_its_memory_and_nothing_else():
    state = State()
    bucket = filled(state, "wide", "xy", 1.0)
    filled(state, "other", "xy", 2.0)
    state.commit()
    saved = dump_state(state)
    for of in (state, State()):
        if of is not state:
            load_state(of, saved)
        of.drop("wide")
        assert dump_state(of).keys() == {"other/x", "other/y"}
        assert read_existing(of, "wide", bucket) is None and read_existing(of, "other", bucket) is not None
        assert {kind for kind, _ in of._current} == {"other"}
        assert not of.read("wide", bucket).any()


def test_what_belongs_to_no_step_counts_at_once_and_is_discarded_at_once():
    state = State()
    state.keep("note", "x", torch.ones(2))
    state.rollback()
    assert state.get("note", "x") is not None
    state.put("note", "x", torch.zeros(2))
    next_exchange(state)
    state.put("note", "x", torch.zeros(2))
    state.keep("note", "x", None)
    assert state.get("note", "x") is None
    state.commit()
    assert state.get("note", "x") is None and not dump_state(state)
    state.keep("note", "x", None)


@pytest.mark.parametrize("kind", ["wide", "slow"])
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("exchanges", [1, 2, 4])
def test_memory_is_used_again_whether_steps_count_or_not(kind, counts, exchanges):
    """Two buffers take turns. A step that exchanges more than once needs a third, which it does not keep."""
    state, bucket = State({"slow"}), bucket_of("xyz")

    def step(*, counts: bool) -> None:
        for number in range(exchanges):
            if number:
                next_exchange(state)
            state.read(kind, bucket)
            state.write(kind, bucket).fill_(1.0)
            put_back(state, kind, bucket)
        (state.commit if counts else state.rollback)()

    for _ in range(2):
        step(counts=True)
    for number in range(5):
        with mock.patch.object(State, "_new", side_effect=state._new) as new, mock.patch.object(torch, "empty", None):
            step(counts=counts or number % 2 == 0)
        assert new.call_count == (exchanges > 1)
    held = [values for store in (state._current, state._spare, state._earlier, state._staged) for values in store]
    assert len(held) == 2


def test_what_is_offloaded_lives_in_host_memory_and_nothing_else():
    """Pinned, where there is a device; filled with zeros."""
    state, bucket = State({"slow"}), bucket_of("xy")
    with mock.patch.object(devices, "host_memory", side_effect=devices.host_memory) as host:
        for kind, calls in (("wide", 0), ("slow", 1)):
            assert not state.read(kind, bucket).any() and host.call_count == calls
            state.write(kind, bucket)
            assert host.call_count == 2 * calls
    assert all(call.args == (bucket.shape, bucket.device) for call in host.call_args_list)


def test_one_buffer_for_reading_and_one_for_writing_serve_all_buckets_of_what_is_offloaded():
    """Each as large as the largest bucket, and float32 whatever torch's default is."""
    state, usual = State({"slow"}), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for names in ("x", "xyz", "y"):
            bucket = bucket_of(names)
            read, out = state.read("slow", bucket), state.write("slow", bucket)
            assert read.shape == out.shape == tuple(bucket.shape) and out.dtype == read.dtype == torch.float32
    finally:
        torch.set_default_dtype(usual)
    assert {use for use, _ in state._stages} == {"read", "write"}
    largest = bucket_of("xyz").shape
    assert {stage.numel() for stage in state._stages.values()} == {largest[0] * largest[1]}

"""What ``make test`` leaves out, it leaves out evenly."""

from __future__ import annotations

import itertools

import pytest

import breadth


@pytest.fixture(params=[False, True], ids=["dealt", "all"])
def everything(request, monkeypatch):
    monkeypatch.setattr(breadth, "ALL", request.param)
    return request.param


@pytest.mark.parametrize("of", [2, 3])
def test_every_case_falls_on_one_place_or_on_all(everything, of):
    hands = [breadth.dealt("abcdefg", place, range(of)) for place in range(of)]
    if everything:
        assert hands == [list("abcdefg")] * of
    else:
        assert sorted(itertools.chain(*hands)) == list("abcdefg")
        assert max(map(len, hands)) - min(map(len, hands)) <= 1


@pytest.mark.parametrize(("of", "axes"), [(2, (5, 2, 3)), (3, (2, 2, 3, 2)), (2, (7, 2)), (2, (4,))])
def test_every_value_of_every_axis_is_there(everything, of, axes):
    found = breadth.spread(of, *(range(values) for values in axes))
    every = list(itertools.product(*map(range, axes))) if len(axes) > 1 else list(range(axes[0]))
    if everything:
        assert found == every
    else:
        assert set(found) < set(every) and len(found) <= len(every) / of + len(every) / max(axes)
        for axis, values in enumerate(axes if len(axes) > 1 else ()):
            assert {cell[axis] for cell in found} == set(range(values))


def test_two_turns_see_every_engine_and_each_sees_ddp(everything):
    worlds = [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]
    seen = [breadth.alternating(turn, worlds) for turn in (0, 1)]
    assert seen == ([worlds] * 2 if everything else [worlds[:2], [worlds[0], worlds[2]]])

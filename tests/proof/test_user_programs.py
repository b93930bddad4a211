"""Programs of the search for an innocent act that is felt; the search itself, which must find planted faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest

import ranks
from breadth import ALL
from thinwire.core.state import State
from thinwire.wire import Wire
from user_programs import ACTS, METHODS, WORLDS, Act, draw, judge, search

CHUNK = 14
CHUNKS = 20 if ALL else 1


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_innocent_act_is_felt(chunk):
    verdicts = search(range(chunk * CHUNK, chunk * CHUNK + (CHUNK if ALL else 6)))
    assert not [f"{verdict.program}\n{verdict.problem}" for verdict in verdicts if verdict.problem]
    assert sum(bool(verdict.refusal) for verdict in verdicts) <= 2


def test_the_programs_are_many_kinds():
    programs = [draw(seed) for seed in range(20 * CHUNK)]
    assert {program.method for program in programs[: 2 * CHUNK]} == set(METHODS)
    assert {program.engine for program in programs} == set(WORLDS)
    acts = Counter(act.name for program in programs for act in program.acts)
    assert set(acts) == set(ACTS) and min(acts.values()) >= 10
    assert draw(7) == draw(7) != draw(8)
    assert "--case 7:" in str(draw(7))


FAULTS = {
    "a state that is not loaded": (
        (Wire, "load_state_dict", lambda *_, **__: None),
        Act(3, "after", "start anew"),
    ),
    "a step that is not taken back": (
        (State, "rollback", lambda state, *_, **__: state.commit()),
        Act(3, "after", "discard step"),
    ),
}


def _with_fault(rank, world, fault):
    what, act = FAULTS[fault]
    program = replace(
        draw(METHODS.index("topk(smallest=100, density=0.1)")),
        engine="ddp", optimizer="adamw", scaler=False, spoilt={}, rates={}, acts=(act,),
    )  # fmt: skip
    with mock.patch.object(*what):
        return judge(rank, world, program).problem


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    assert all(ranks.run(_with_fault, 2, fault))

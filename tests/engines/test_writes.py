"""Weights that a program writes by itself, on one rank alone or on all: a gather brings them, or all ranks say why not.

Ranks choose what a gather sends. Modules are equal here, so that gloo lets a rank read another module's message.
"""

from __future__ import annotations

import threading
import time

import pytest

import ranks
from breadth import dealt, spread
from thinwire.base.errors import ThinwireError
from writes import DATA, METHODS, MODULE, OTHER, SENDS_ALL, Program

BETWEEN = ("forward", "unshard", "unshard before", "prefetched", "step", "second step", "skipped step", "evaluations")
"""Before what of each step weights are written; "unshard before": after a module was asked for between two steps."""
WORLDS = {"fsdp2": 2, "fsdp2-keep": 2, "hsdp": 4}
WRITERS = ("fsdp2", {1}), ("fsdp2", {0, 1}), ("hsdp", {1, 3}), ("fsdp2-keep", {1})
"""Engines, and the ranks that write."""


def _between(rank, world, kind, writers):
    """By how much the outputs of each method are off after each place of the writes."""
    off = {}
    for method in dealt(METHODS, WRITERS.index((kind, writers)) % 3, range(3)):
        program = Program(kind, rank, world, method, writers)
        for number, place in enumerate(["unshard", *BETWEEN, ""]):  # the very first pass makes what others follow
            program.step(number, place)
            off[method, number, place], program.off = program.off, 0.0
        program.wire.close()
    return off


@pytest.mark.parametrize(("kind", "writers"), spread(2, WRITERS))
def test_the_next_forward_pass_has_what_was_written(kind, writers):
    for off in ranks.run(_between, WORLDS[kind], kind, writers):
        assert {key: by for key, by in off.items() if not by <= METHODS[key[0]]} == {}


def _refused(rank, world, kind, ways):
    """By how much outputs are off, or the error, by method, place of the write, way, and whether ranks were told."""
    outcomes = {}
    for method in spread(3, METHODS):
        for place, data, told in ways:
            program = Program(kind, rank, world, method, {1})
            try:
                for number, where in enumerate((place, "", "")):
                    program.step(number, where, data=data, told=told)
                outcomes[method, place, data, told] = program.off
            except ThinwireError as error:
                outcomes[method, place, data, told] = str(error)
            program.wire.close()
    return outcomes


UNTOLD = (("forward", True, False), ("step", True, False))


def test_what_no_gather_can_bring_is_refused_on_all_ranks():
    """A write through .data, of which nobody told; and, of weights that stay, one inside a pass or before another."""
    places = ("micro-batch", "backward")
    ways = [*UNTOLD, ("step", True, True), *((place, False, told) for place in places for told in (False, True))]
    one, other = ranks.run(_refused, 2, "fsdp2", ways)
    for key in one:
        method, place, data, told = key
        if method != "dense" and data and not told:
            assert one[key] == other[key] == DATA, key
        elif method not in SENDS_ALL and place in places and not told:
            assert one[key] == OTHER and other[key].startswith(MODULE), key
        else:
            assert one[key] <= METHODS[method] and other[key] <= METHODS[method], key


def test_a_node_that_others_refuse_is_told():
    """The ranks of one node share the shards; those of another say that somebody has a reason."""
    by_rank = ranks.run(_refused, 4, "hsdp", UNTOLD[:1])
    for key in by_rank[0]:
        if key[0] in ("zeropp(smallest=0)", "qsdp(smallest=0)", "sdp4bit(smallest=0)"):  # others send gradients there
            assert [said[key] for said in by_rank] == [DATA, DATA, OTHER, OTHER], key


def _uneven(rank, world, kind, keep):
    """By how much outputs are off where ranks take unlike numbers of micro-batches, and of batches at the end."""
    off = {}
    for method in METHODS:
        if method in SENDS_ALL and not keep:
            continue
        program = Program(kind, rank, world, method, {1})
        for number in range(6):
            program.uneven_step(number, keep=keep)
            if number % 2:
                program.write()
        program.evaluate(6, 1 + rank if keep else 1)
        off[method] = program.off
        program.wire.close()
    return off


@pytest.mark.parametrize(("kind", "keep"), [("fsdp2-keep", True), ("fsdp2", False)])
def test_ranks_may_take_unlike_numbers_of_micro_batches(kind, keep):
    """Where torch itself gathers nothing between them, or the method sends nothing there."""
    for off in ranks.run(_uneven, 2, kind, keep):
        assert {method: by for method, by in off.items() if not by <= METHODS[method]} == {}


def _raises(rank, world):
    """Rank 1 is late with its reductions while a backward pass raises; return by how much the next passes are off."""
    off = {}
    for method in METHODS:
        program = Program("fsdp2", rank, world, method, {1})
        reduce, late = program.wire.engine.worker.submit, threading.Event()

        def submit(job, *arguments, reduce=reduce, late=late, **more):
            def slow():
                if late.is_set() and rank:
                    time.sleep(0.3)
                return job()

            return reduce(slow, *arguments, **more)

        program.wire.engine.worker.submit = submit
        for number in range(3):
            program.step(number)
        handle = program.model.blocks[3].register_full_backward_pre_hook(lambda *of: 1 / 0)
        loss = program.forward(3)
        late.set()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        for optimizer in program.optimizers:
            optimizer.zero_grad()
        program.evaluate(4)
        off[method] = program.off
        late.clear()
        program.wire.close()
    return off


def test_a_backward_pass_that_raises_is_waited_for():
    """Else two threads talk in one group, in another order on each rank."""
    for off in ranks.run(_raises, 2, seconds=60):
        assert {method: by for method, by in off.items() if not by <= METHODS[method]} == {}

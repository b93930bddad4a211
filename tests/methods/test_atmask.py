"""Weights gathered at a shared mask are those of whole gathers, bit for bit, whatever the steps were like."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import ranks
import test_edges as edges
import thinwire
from breadth import spread
from engines import build, train
from models import flat, loss_of
from test_dry_run import exchange_of
from thinwire.base.errors import ThinwireError
from thinwire.core.run import Run
from thinwire.methods import resolve
from thinwire.methods.parts.atmask import WeightsAtMask

SPECS = ["trickle(mask='merged', density=0.05, bits=4, {})", "trickle(mask='merged', density=0.05, start=2, {})",
         "trickle(mask='merged', density=0.02, server_density=0.02, {})",
         "trickle(mask='merged', density=0.05, {}, feedback='updates(beta1=0.5)')"]  # fmt: skip


def _wired(kind: str, world: int, spec: str, weights: str, **more):
    model = build(kind, world, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.3, fused=True)
    return model, optimizer, thinwire.compress(model, optimizer, spec.format(f"smallest=100, weights='{weights}'"))


def _micro_batches(model, optimizer, rank: int, step: int, wire) -> float:
    for micro in range(2):
        with wire.accumulate(last=micro == 1):
            loss = loss_of(model, 100 * step + micro, rank)
            (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _life(rank: int, world: int, kind: str, spec: str, weights: str):
    """Losses, the weights after them, and bytes in a steady step, of the weights and in all: sent, and planned."""
    model, optimizer, wire = _wired(kind, world, spec, weights)
    losses = train(model, optimizer, rank, range(4), wire)
    wire.reset_stats()
    losses += train(model, optimizer, rank, range(4, 6), wire)
    stats, plan = wire.ledger.stats(), wire.plan
    sent = stats["weight_bytes_per_step"], sum(stats["wire_bytes_per_step"].values())
    planned = plan.weight_bytes, plan.wire_bytes + plan.weight_bytes
    losses += train(model, optimizer, rank, range(6, 9), wire, poison=(6, 1))
    train(model, optimizer, rank, [9], wire, poison=(9, 0))
    wire.flush(with_next=True)  # of a step that a mask was chosen for before, and which did not count
    losses += train(model, optimizer, rank, range(10, 13), wire)
    wire.flush()
    losses += train(model, optimizer, rank, range(13, 15), wire)
    losses += [_micro_batches(model, optimizer, rank, step, wire) for step in range(15, 17)]
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    moments, state = optimizer.state_dict(), wire.state_dict()
    wire.close()
    model, optimizer, wire = _wired(kind, world, spec, weights)
    model.load_state_dict(saved)
    optimizer.load_state_dict(moments)
    wire.load_state_dict(state)
    losses += train(model, optimizer, rank, range(17, 20), wire)
    wire.close()
    return losses, flat(model), sent, planned


def _lives(rank: int, world: int) -> list[str]:
    found = []
    for spec, kind in spread(5, SPECS, ("fsdp2", "fsdp2-keep")):
        masked, dense = (_life(rank, world, kind, spec, weights) for weights in ("auto", "dense"))
        if masked[0] != dense[0] or not torch.equal(masked[1], dense[1]):
            found.append(f"{kind} {spec}: losses at the mask {masked[0]}, whole {dense[0]}")
        if masked[2] != pytest.approx(masked[3], abs=1e-6):
            found.append(f"{kind} {spec}: sent {masked[2]}, planned {masked[3]}")
        if masked[2][0] > 0.35 * dense[2][0]:  # of few values: what is dense by policy travels whole
            found.append(f"{kind} {spec}: {masked[2][0]} bytes of weights at the mask, whole {dense[2][0]}")
    return found


def test_weights_are_those_of_whole_gathers():
    """After dense, skipped, flushed, accumulated and loaded steps; with the bytes that were planned."""
    for found in ranks.run(_lives, 3):
        assert not found, "\n".join(found)


TURNS = ("012", "012", "012", "01", "12", "012-", "012", "12", "12", "012!", "0", "012", "012?", "0", "012")
"""Which parameters have a gradient; "-": it is taken from the first before the step; "!": it is not finite; "?": it is
thrown away."""


def _turns(rank: int, world: int, spec: str, weights: str):
    """What every forward pass saw of the weights: with no gradients where there are none, and with zeros."""
    found = []
    for zeros in (False, True):
        torch.manual_seed(0)
        model = build("fsdp2", world, net=edges.Given)
        kind = thinwire.AdamS if spec.startswith("scape") else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.3)
        wire = thinwire.compress(model, optimizer, spec.format(f"density=0.1, smallest=0, weights='{weights}'"))
        generator = torch.Generator().manual_seed(rank)
        for turn in TURNS:
            scale = torch.nan if turn.endswith("!") else 1.0
            shapes = {name: shape for name, shape in edges.SHAPES.items() if name[-1] in turn}
            with wire.accumulate():
                drawn = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
                model(drawn).backward()
            found.append(model.seen)
            if turn.endswith("-"):
                model.w0.grad = None
            if not turn.endswith("?"):
                optimizer.step()
            optimizer.zero_grad(set_to_none=not zeros)
        assert wire.skipped == 2
        wire.close()
    return found


def _by_turns(rank: int, world: int) -> list[tuple[str, int]]:
    found = []
    for spec in ("trickle(mask='merged', start=2, {})", "scape(warmup=2, {})"):
        passes = zip(*(_turns(rank, world, spec, weights) for weights in ("masked", "dense")), strict=True)
        for number, (ours, theirs) in enumerate(passes):
            if not all(torch.equal(ours[name], theirs[name]) for name in ours):
                found.append((spec, number))
    return found


def test_weights_without_a_gradient_are_those_of_whole_gathers():
    assert ranks.run(_by_turns, 2) == [[], []]


def _narrow(rank: int, world: int):
    policy, errors = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), []
    for weights in ("auto", "masked"):
        try:
            _, _, wire = _wired("fsdp2", world, SPECS[0], weights, policy=policy)
        except ThinwireError as error:
            errors.append(str(error))
            continue
        errors.append((wire.method.card.encodes_weights, " ".join(str(wire.plan).split())))
        wire.close()
    return errors


def test_few_bits_are_gathered_whole_or_refused():
    for (encodes, plan), masked in ranks.run(_narrow, 2):
        assert not encodes and "FSDP2 gathers them in torch.bfloat16: they are gathered whole" in plan
        assert "FSDP2 gathers them in torch.bfloat16: use weights='auto'" in masked


@pytest.mark.parametrize(("kind", "hop"), [("fsdp2", 1), ("fsdp2", 2), ("ddp", 1)])
def test_weights_go_at_the_mask_where_a_rank_knows_all_masks_of_sharded_rows(kind, hop):
    run = Run({}, exchange_of(kind, 4), hop=hop, gathers=frozenset([torch.float32]))
    gathered = [WeightsAtMask("trickle", knob, run) for knob in ("auto", "masked", "dense")]
    assert [of.encoded for of in gathered] == ([True, True, False] if (kind, hop) == ("fsdp2", 1) else [False] * 3)
    assert [bool(of.why_whole) for of in gathered] == [hop == 2, hop == 2, False], "nobody asked for whole gathers"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("trickle(weights='masked')", "mask='own'"), ("tagc(weights='dense')", "no knob 'weights'"),
        ("trickle:merged(feedback='gradients', weights='masked')", "optimizer moves all weights"),
        ("lhc(weights='dense')", "no knob 'weights'"), ("trickle:merged(weights='some')", "weights is"),
    ],
)  # fmt: skip
def test_where_no_mask_is_shared_it_is_refused(spec, words):
    with pytest.raises(ThinwireError, match=words):
        resolve(spec)

"""What of the steps that are sent should be delivered at once? Variants of feedback="updates", one change at a time.

    python benchmarks/loss/waiting.py --corpora DIR --lr 8e-3 density=0.01 density=0.05 density=0.05,portion=0.25

Each word is a variant: fields of ``Variant`` with their values. It trains a model of ``regimes.py`` for the first
--steps of a run of 800 steps, and prints the validation loss every 100 steps. This is not the library: the
values of all ranks are rows of one tensor, sent as they are, so that a variant is a line of code and a run ten seconds.
What came of it is in docs/log.md, "why a portion"; what is in the library was then run with ``regimes.py``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import regimes
import virtual
from thinwire.train.data.windows import batches

STEPS, SAMPLE = 800, 64


@dataclass
class Variant:
    """One way to send steps.

    Attributes:
        density: of the values. mask: each rank its "own"; or of each of N rows the same for all, chosen by a few ranks
            ("shared", ``choosers``), by everybody's sum ("sum") or in turn ("cycle"); "all" values.
        late: a shared mask is chosen one step before, by what then "waits" or by all that the rank "had", sent or not
            (as SCAPE does). turn: others choose in every step. fresh: this step's own u_n is sent, too, and not just
            what has waited.
        portion: of what is sent, delivered, in the first ``until`` steps (then all). clamp: in place of it, at most so
            many lr of a value; 0: no bound.
        spike: at most so many lr of a rank's step before it is sent. beta1: of an average of gradients above sqrt(v).
        behind: of an average of what has arrived. beta2: of v. r: whether it is measured, or 1.
    """

    density: float = 0.05
    mask: str = "own"
    choosers: int = 1
    late: str = ""
    turn: bool = True
    fresh: bool = True
    portion: float = 1.0
    until: int = STEPS
    clamp: float = 0.0
    spike: float = 0.0
    beta1: float = 0.0
    behind: float = 0.0
    beta2: float = 0.95
    r: bool = True


def chosen(of: Variant, h: Tensor, by: Tensor, t: int) -> Tensor:
    """What each rank sends of ``h`` (N, n), chosen by the largest of ``by``: zeros elsewhere."""
    if of.mask == "all":
        return h.clone()
    ranks, n = h.shape
    if of.mask == "own":
        places = by.abs().topk(max(int(of.density * n), 1), 1, sorted=False).indices
        return torch.zeros_like(h).scatter_(1, places, h.gather(1, places))
    rows = by.view(ranks, ranks, -1)  # rank, row, column
    k = max(int(of.density * rows.shape[2]), 1)
    mask = torch.zeros_like(rows[0])
    for i, row in enumerate(mask):
        if of.mask == "shared":
            choosers = [(i - t * of.turn - j) % ranks for j in range(of.choosers)]
            largest = rows[choosers, i].abs().topk(max(k // of.choosers, 1), 1, sorted=False).indices
            row.scatter_(0, largest.flatten(), 1.0)
            row.scatter_(0, row.topk(k).indices, 1.0)  # where they agree, some more
        elif of.mask == "sum":
            row.scatter_(0, rows[:, i].sum(0).abs().topk(k, sorted=False).indices, 1.0)
        else:
            row.scatter_(0, (torch.arange(k) + t * k) % len(row), 1.0)
    return h * mask.view(-1)


@dataclass
class AdamW:
    """Of the tensors that stay dense; also what steps are held against."""

    first: Tensor
    second: Tensor
    steps: int = field(default=0)

    def step(self, gradient: Tensor, lr: float) -> Tensor:
        """What to subtract from the weights."""
        self.steps += 1
        self.first.lerp_(gradient, 0.1)
        self.second.lerp_(gradient.square(), 0.05)
        return lr * self.first / (1 - 0.9**self.steps) / ((self.second / (1 - 0.95**self.steps)).sqrt() + 1e-8)


def train(of: Variant, args: argparse.Namespace) -> list[float]:
    """Validation losses, every 100 steps."""
    job = regimes.Job("scratch", args.text, args.model, args.ranks, "dense", args.lr, args.seed, STEPS)
    config = job.config()
    texts, held_out = (
        regimes.windows_of(args.corpora, name, config.sequence_length, config.seed) for name in regimes.TEXTS[args.text]
    )
    model = virtual.Replica(config, 256, None).model
    gradients = virtual.Gradients(args.ranks, model, virtual.buckets_of(model, *texts.batch(0, config.batch_size)))
    together, g = virtual.Together(model, gradients), gradients.rows
    places = {piece.name: piece.offset + where.start for where, pieces in gradients.buckets for piece in pieces}
    weights, parts = torch.empty(g.shape[1]), []
    decays, small = torch.zeros_like(weights), torch.ones_like(weights, dtype=torch.bool)
    for name, weight in model.named_parameters():
        at = slice(places[name], places[name] + weight.numel())
        weights[at] = weight.detach().flatten()
        weight.data = weights[at].view(weight.shape)
        decays[at] = config.weight_decay * (weight.dim() >= 2)
        if weight.dim() >= 2 and weight.numel() >= regimes.SMALLEST:
            parts.append(at)
            small[at] = False
    drawn = torch.Generator().manual_seed(0)
    sample = torch.cat([torch.randint(at.start, at.stop, (SAMPLE,), generator=drawn) for at in parts])
    first, second, waiting = (torch.zeros_like(g) for _ in range(3))
    behind, r, losses, had = torch.zeros_like(weights), None, [], waiting
    adamw = AdamW(torch.zeros(int(small.sum())), torch.zeros(int(small.sum())))
    looks = batches(held_out.spread(64), 16)
    for t in range(args.steps):
        lr = config.learning_rate(t)
        together.take(*texts.batch(t * regimes.SEQUENCES, regimes.SEQUENCES))
        dense = g.mean(0)[small]
        change = torch.zeros_like(weights)
        change[small] = adamw.step(dense * min(1.0, config.clip / (float(dense.norm()) + 1e-6)), lr)

        first.lerp_(g, 1 - of.beta1)
        second.lerp_(g.square(), 1 - of.beta2)
        of_sample = g[:, sample]
        measured = float(of_sample.mean(0).square().sum() / of_sample.square().mean(0).sum()) if of.r else 1.0
        r = measured if r is None else r
        unbiased = second / (1 - of.beta2 ** (t + 1))
        u = lr / (1 - of.beta1 ** (t + 1)) * first / ((r * unbiased).sqrt() + 1e-8)
        r = 0.9 * r + 0.1 * measured
        h = waiting + (u.clamp(-of.spike * lr, of.spike * lr) if of.spike else u)
        for at in parts:
            by = {"": h, "waits": waiting, "had": had}[of.late]
            sent = chosen(of, (h if of.fresh else waiting)[:, at], by[:, at], t)
            if of.clamp:
                sent.clamp_(-of.clamp * lr, of.clamp * lr)
            sent *= of.portion if t < of.until else 1.0
            waiting[:, at] = h[:, at] - sent
            change[at] = sent.mean(0)
        had = h
        behind.lerp_(change, 1 - of.behind)
        weights.mul_(1 - lr * decays).sub_(torch.where(small, change, behind))
        if (t + 1) % 100 == 0:
            losses.append(virtual.evaluate(model, looks))
    return losses


def variant(word: str) -> Variant:
    """ "density=0.05,mask=shared" as it is meant; "" is the default."""
    found = Variant()
    for pair in filter(None, word.split(",")):
        name, _, value = pair.partition("=")
        kind = type(getattr(found, name))
        setattr(found, name, kind(int(value)) if kind is bool else kind(value))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--corpora", type=Path, required=True, help="the folder of the texts")
    parser.add_argument("--model", choices=regimes.MODELS, default="tiny")
    parser.add_argument("--text", choices=regimes.TEXTS, default="peps")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for word in args.variants:
        print(word, *(f"{loss:.3f}" for loss in train(variant(word), args)), flush=True)


if __name__ == "__main__":
    main()

"""Many runs at once, as one batch: the ladder's runs on a GPU.

A small model's step is too short for a GPU: what it waits for is the host. So runs that differ in rates, seeds, betas
or clips alone are stacked, (J, ...), as are their N ranks, (J * N, ...), and a whole step (text, forward, backward,
exchange, optimizers) is one CUDA graph, which is replayed. The host reads nothing until a length is over.

What a step does is written here a second time, in plain torch over stacks. ``tests/benchmarks/test_stacked.py`` holds
it against the library's own methods, played by ``virtual.py``, step by step. Left out is the guard, which skips steps
whose gradients are not finite: such a run ends without a loss.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.base.random import seed_of
from thinwire.core.method import count_of
from thinwire.core.names import describe
from thinwire.methods import resolve
from thinwire.methods.ours.trickle import Trickle
from thinwire.ops.quant.reference import SMALLEST_SCALE
from thinwire.train.config import Config
from thinwire.train.data.windows import Windows
from thinwire.train.model.decoder import Decoder

CHUNK = 50
"""Steps that are handed to a device at once."""
OUTLIER, LEFT, NORM_DECAY = 10.0, 2.0, 0.9
"""Of ``core/outliers.py``: times the usual norm that is cut, times it that a cut leaves, decay of the usual norm."""
SAMPLE, R_DECAY, MOMENTUM = 64, 0.9, 0.95
"""The last: of torch.optim.Muon, as it is by default."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Way:
    """How the ranks of all runs of a stack exchange what they have; the knobs are those of ``trickle``.

    Attributes:
        density: 0: dense. delivered: the share of Adam's steps that is; delivered_muon: of Muon's. kept: patterns of
            the names of parameters that stay dense. owner: decay of a momentum of what arrives, kept once; 0: none.
            momentum: Muon's decay. shared: after so many steps all ranks take the mean of their Muon's momenta, in
            float32; 0: never. late: times the densities, of ranks and servers, while the rate falls. second: what v
            of Adam is a mean of: each rank's "own" squared gradients, those of "all" ranks, or the squares of the
            ranks' "mean" gradient. every: it takes them once in so many steps. beta2: its decay; 0: that of all runs.
            What v ranks have in common is exchanged in float32. These, and owner, are no knobs of the library's method.
    """

    density: float = 0.0
    merged: bool = False
    server_density: float = 0.1
    bits: int = 8
    group: int = 64
    delivered: float = 1.0
    delivered_muon: float = 1.0
    kept: tuple[str, ...] = ()
    owner: float = 0.0
    momentum: float = MOMENTUM
    shared: int = 0
    late: float = 1.0
    second: str = "own"
    every: int = 1
    beta2: float = 0.0

    @property
    def decaying(self) -> Way:
        """The way while the rate falls."""
        density, server = (min(self.late * share, 1.0) for share in (self.density, self.server_density))
        return replace(self, density=density, server_density=server)


def way_of(spec: str, ranks: int, **besides: Any) -> Way:
    """The way of the library's method ``spec`` on so many ranks: dense, or trickle with steps. ``besides``: no knob of
    it."""
    method = resolve(spec)
    if method.name == "dense":
        return Way(**besides)
    if not isinstance(method, Trickle) or method.updates is None or method.start or method.updates.beta1:
        raise ThinwireError(f"no stack plays {spec}: it plays dense, and trickle with steps from the first step on")
    muon = method.updates.delivered_share
    return Way(
        method.density, method.mask == "merged", method.density_of_servers(ranks), method.bits, method.group,
        method.delivered_share, 1.0 if muon is None else muon, tuple(method.dense), **besides,
    )  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A run of a stack: what may differ. ``rate``: AdamW's by step; ``share``: Muon's rate over AdamW's."""

    seed: int
    rate: Callable[[int], float]
    share: float
    beta1: float
    clip: float


def member(job: Any, length: int | None) -> Member:
    """A ``ladder.Job`` as a run of a stack, of ``length`` steps; None: its trunk."""
    share = job.lr / job.beside if job.optimizer == "muon" else 1.0
    return Member(job.seed, job.rate(length), share, job.beta1, job.clip)


class Piece(NamedTuple):
    """A parameter's place in the flat row. kind: "adam", "muon" (both dense) or "sent"."""

    name: str
    shape: tuple[int, ...]
    kind: str
    muon: bool
    start: int
    numel: int


class Block(NamedTuple):
    """Parameters side by side that are alike: ``count`` of ``numel`` values each, from ``start`` on."""

    start: int
    count: int
    numel: int
    shape: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """(R, P) -> (R, count, numel), a view."""
        return flat[:, self.start : self.start + self.count * self.numel].unflatten(1, (self.count, self.numel))


def blocks_of(pieces: Sequence[Piece], key: Callable[[Piece], Any], origin: int = 0) -> list[Block]:
    found = []
    for _, run in groupby(pieces, key=key):
        alike = list(run)
        found.append(Block(alike[0].start - origin, len(alike), alike[0].numel, alike[0].shape))
    return found


class Stack:
    """J runs under way.

    Attributes:
        turn: steps that are done. weights: (J, P).
    """

    def __init__(
        self, config: Config, way: Way, members: Sequence[Member], train: Windows, steps: int, device: torch.device,
        decays: tuple[float, float] = (0.95, 0.1),
    ) -> None:  # fmt: skip
        """``config``: of any of the runs. ``steps``: the longest length. ``decays``: AdamW's beta2, and of weights."""
        self.config, self.way, self.members, self.device = config, way, list(members), device
        self.runs, self.ranks = len(self.members), config.ranks or 1
        self.own = self.ranks if way.density else 1  # ranks that have gradients of their own
        self.batch, self.length = config.batch_size * self.ranks, config.sequence_length
        self.beta2, self.decay = decays
        self.shape = config.shape(256)
        self.turn, self._graph = 0, None  # type: int, Any
        self._lay_out()
        self._make_state()
        self._take_text(train, steps)

    def _lay_out(self) -> None:
        model = Decoder(self.shape)
        roles = describe(model)
        muon = self.config.optimizer == "muon"
        self._names = [name for name, _ in model.named_parameters()]
        found = []
        for name, weight in model.named_parameters():
            hidden = muon and weight.dim() == 2 and roles[id(weight)].role == "matrix"
            sent = bool(self.way.density) and weight.dim() >= 2 and weight.numel() >= 1024
            sent = sent and not any(fnmatchcase(name, pattern) for pattern in self.way.kept)
            kind = "sent" if sent else "muon" if hidden else "adam"
            found.append((kind, weight.numel(), hidden, tuple(weight.shape), name))
        found.sort(key=lambda of: (("adam", "muon", "sent").index(of[0]), *of[1:4]))
        self.pieces, start = [], 0
        for kind, numel, hidden, shape, name in found:
            self.pieces.append(Piece(name, shape, kind, hidden, start, numel))
            start += numel
        self.numel = start
        starts = {kind: next((p.start for p in self.pieces if p.kind == kind), None) for kind in ("muon", "sent")}
        self.sent_from = self.numel if starts["sent"] is None else starts["sent"]
        self.adam_to = self.sent_from if starts["muon"] is None else starts["muon"]
        self.sent = [piece for piece in self.pieces if piece.kind == "sent"]
        self._all_blocks = blocks_of(self.pieces, lambda p: p.numel)
        self._dense_muon = blocks_of([p for p in self.pieces if p.kind == "muon"], lambda p: p.shape)
        self._sent_blocks = blocks_of(self.sent, lambda p: p.numel, self.sent_from)
        self._sent_muon = blocks_of([p for p in self.sent if p.muon], lambda p: p.shape, self.sent_from)
        self._sent_adam = blocks_of([p for p in self.sent if not p.muon], lambda p: p.numel, self.sent_from)

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self.device).unsqueeze(1)

    def _make_state(self) -> None:
        weights = []
        for member in self.members:
            torch.manual_seed(member.seed)
            of = dict(Decoder(self.shape).named_parameters())
            weights.append(torch.cat([of[piece.name].detach().reshape(-1) for piece in self.pieces]))
        device, runs, rows = self.device, self.runs, self.runs * self.own
        self.weights = torch.stack(weights).to(device)
        dense, sent = self.sent_from, self.numel - self.sent_from
        zeros = lambda *shape: torch.zeros(shape, device=device)  # noqa: E731
        self.state = {
            "weights": self.weights, "first": zeros(runs, dense), "second": zeros(runs, self.adam_to),
            "turn": torch.zeros(1, dtype=torch.int64, device=device),
        }  # fmt: skip
        if sent:
            self.state |= {
                "v": zeros(rows, sent), "waits": zeros(rows, sent), "r": zeros(runs),
                "usual": zeros(rows, len(self.pieces)),
            }  # fmt: skip
            if self.way.merged:
                self.state["served"] = zeros(runs, sent)
            if self.way.owner:
                self.state["owner"] = zeros(runs, sent)
        self.beta1 = self._column([member.beta1 for member in self.members], torch.float64)
        self.clip = self._column([member.clip or math.inf for member in self.members])
        self.muon_share = self._column([member.share for member in self.members])
        sizes = torch.tensor([float(piece.numel) for piece in self.pieces])
        self._shares = (sizes / sizes.sum()).sqrt().to(device)
        self._piece_of = torch.repeat_interleave(torch.arange(len(self.pieces)), sizes.long()).to(device)
        of_muon = torch.tensor([float(piece.muon) for piece in self.pieces], device=device)
        self._muon_columns = of_muon[self._piece_of][dense:]
        by_matrix = [float(len(piece.shape) >= 2) for piece in self.pieces]
        self._decayed = (self.decay * torch.tensor(by_matrix)).to(device)[self._piece_of]
        positions, shares = [], torch.ones(sent)
        for piece in self.sent:
            at = piece.start - self.sent_from
            rows_of = self.ranks if self.way.merged else 1
            seeds = [seed_of(member.seed, piece.name) for member in self.members]
            drawn = [
                torch.randint(piece.numel // rows_of, (SAMPLE,), generator=torch.Generator().manual_seed(seed))
                + seed % rows_of * (piece.numel // rows_of) + at
                for seed in seeds
            ]  # fmt: skip
            positions.append(torch.stack(drawn))
            shares[at : at + piece.numel] = self.way.delivered_muon if piece.muon else self.way.delivered
        if self.sent:
            self._sampled = self._for_each_rank(torch.cat(positions, 1).to(device))
            self._portion = None if bool((shares == 1).all()) else shares.to(device)

    def _take_text(self, train: Windows, steps: int) -> None:
        self._text = torch.as_tensor(train.tokens).to(torch.uint8).to(self.device)
        seeds = dict.fromkeys(member.seed for member in self.members)
        starts = {
            seed: torch.tensor(list(Windows(train.tokens, train.length, seed).indices(0, steps * self.batch)))
            for seed in seeds
        }
        of_runs = torch.stack([starts[member.seed].view(steps, self.batch) for member in self.members])
        self._starts = (of_runs * self.length).to(self.device)
        self._span = torch.arange(self.length + 1, device=self.device)
        self._rates = torch.zeros(self.runs, steps, device=self.device)
        self.losses = torch.zeros(self.runs, steps, device=self.device)

    def _for_each_rank(self, values: Tensor) -> Tensor:
        """(J, ...) -> (J * N, ...), or ``values`` where gradients are taken for all ranks at once."""
        if self.own == 1:
            return values
        return values.unsqueeze(1).expand(-1, self.own, *values.shape[1:]).flatten(0, 1)

    def set_rates(self, rates: Sequence[Callable[[int], float]]) -> None:
        """Of each run by step, from now on."""
        table = [[rate(step) for step in range(self._rates.shape[1])] for rate in rates]
        self._rates.copy_(torch.tensor(table))

    def change(self, way: Way) -> None:
        """Exchange in another ``way`` with the same state from now on."""
        if way != self.way:
            self.way, self._graph = way, None

    def snapshot(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.state.items()}

    def restore(self, saved: dict[str, Tensor]) -> None:
        for name, value in saved.items():
            self.state[name].copy_(value)
        self.turn = int(saved["turn"])

    # A step.

    def run(self, until: int) -> None:
        """Go on until ``until`` steps are done."""
        for _ in self.go(until):
            pass
        devices.wait(self.device)

    def go(self, until: int) -> Iterator[Any]:
        """Go on until ``until`` steps are handed to the device, CHUNK at a time, so that others can go on beside it.

        Yields the event that has to be over before it goes on; None: at once. On CUDA all is done on the current
        stream, the same each time, with up to two chunks under way."""
        if self.device.type == "cuda" and self._graph is None:
            self._capture()
        under_way: list[Any] = []
        while self.turn < until:
            for _ in range(min(CHUNK, until - self.turn)):
                self._step() if self._graph is None else self._graph.replay()
                self.turn += 1
            under_way.append(devices.mark(self.device))
            chunk = under_way.pop(0) if len(under_way) > 1 else None
            yield chunk
            if chunk is not None:
                chunk.synchronize()

    def _capture(self) -> None:
        """Make the graph; the steps that warm it up do not count."""
        stream = torch.cuda.current_stream(self.device)
        saved = self.snapshot()
        for _ in range(3):
            self._step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._step()
        self._graph = graph
        self.restore(saved)
        stream.synchronize()

    def _step(self) -> None:
        turn = self.state["turn"]
        windows = self._starts.index_select(1, turn).view(self.runs, self.batch, 1) + self._span
        tokens = self._text[windows].long().view(self.runs * self.own, -1, self.length + 1)
        rate = self._rates.index_select(1, turn)  # (J, 1)
        whole = self._for_each_rank(self.weights)
        leaves = {
            p.name: whole[:, p.start : p.start + p.numel].unflatten(1, p.shape).detach().requires_grad_()
            for p in self.pieces
        }
        with torch.enable_grad():
            losses = self._mean_losses(leaves, tokens)
            found = torch.autograd.grad(losses.sum(), list(leaves.values()))
        with torch.no_grad():
            gradients = torch.cat([of.flatten(1) for of in found], 1)
            mean = losses.detach().view(self.runs, -1).mean(1, keepdim=True)
            self.losses.index_copy_(1, turn, mean)
            if self.sent:
                self._exchange(gradients, rate)
            else:
                power = gradients.square().sum(1, keepdim=True)
                self._optimize(gradients, power, rate)
            turn.add_(1)

    def _mean_losses(self, leaves: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """The mean loss of each row of (R, B, T + 1) tokens on its own weights, (R,)."""
        logits = forward(self.shape, leaves, tokens[..., :-1])
        picked = F.log_softmax(logits, 2).gather(2, tokens[..., 1:].reshape(len(tokens), -1, 1))
        return -picked.squeeze(2).mean(1)

    def _optimize(self, gradients: Tensor, power: Tensor, rate: Tensor) -> None:
        """AdamW, and Muon, of the dense parameters, whose mean ``gradients`` (J, D) are clipped by ``power``."""
        gradients = gradients * (self.clip / (power.sqrt() + 1e-6)).clamp(max=1.0)
        state, to, weights = self.state, self.adam_to, self.weights
        count = state["turn"].double() + 1
        first, second = state["first"][:, :to], state["second"]
        g = gradients[:, :to]
        first.lerp_(g, (1 - self.beta1).float())
        second.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        size = (rate.double() / (1 - self.beta1**count)).float()
        root = (1 - self.beta2**count).sqrt().float()
        moved = weights[:, :to]
        moved.mul_(1 - rate * self._decayed[:to]).sub_(size * first / (second.sqrt() / root + 1e-8))
        for block in self._dense_muon:
            rows, columns = block.shape
            momentum, g = block.of(state["first"]), block.of(gradients)
            momentum.lerp_(g, 1 - self.way.momentum)
            ahead = g.lerp(momentum, self.way.momentum).unflatten(2, block.shape).flatten(0, 1).bfloat16()
            step = orthogonal(ahead).view(self.runs, block.count, -1).float()
            lr = (rate * self.muon_share).unsqueeze(2)
            block.of(weights).mul_(1 - lr * self.decay).sub_(lr * 0.2 * math.sqrt(max(rows, columns)) * step)

    def _exchange(self, gradients: Tensor, rate: Tensor) -> None:
        """Trickle's step of (J * N, P) gradients."""
        state, at, runs = self.state, self.sent_from, self.runs
        norms = self._bound(gradients)
        by_rank = gradients.view(runs, self.own, -1)
        first_of_sent = next(i for i, piece in enumerate(self.pieces) if piece.kind == "sent")
        power = norms.view(runs, self.own, -1)[:, :, first_of_sent:].square().mean(1).sum(1)
        begins = state["turn"] == 0
        ratio = self._ratio(gradients[:, at:])
        r = torch.where(begins, self.own**-0.5, state["r"])
        dense = by_rank[:, :, :at].mean(1)
        total = (dense.square().sum(1) + r * power).unsqueeze(1)
        steps = self._steps(gradients[:, at:], r, rate)
        change = self._meet(steps)
        sent = self.weights[:, at:]
        lr = rate * self._rate_of_sent()
        self._optimize(dense, total, rate)
        sent.mul_(1 - lr * self._decayed[at:]).sub_(change)
        state["r"].copy_(torch.where(begins, ratio, R_DECAY * state["r"] + (1 - R_DECAY) * ratio))

    def _rate_of_sent(self) -> Tensor:
        """(J, Q) or (J, 1): of AdamW's rate."""
        return 1 + self._muon_columns * (self.muon_share - 1)

    def _bound(self, gradients: Tensor) -> Tensor:
        """Cut what is an outlier (``core/outliers.py``); the norms after, (J * N, pieces)."""
        usual = self.state["usual"]
        norms = torch.cat([torch.linalg.vector_norm(block.of(gradients), dim=2) for block in self._all_blocks], 1)
        largest = OUTLIER * torch.maximum(usual, self._shares * torch.linalg.vector_norm(usual, dim=1, keepdim=True))
        counted = norms > 0
        exceeds = (norms > largest) & (usual > 0) & counted
        cut = LEFT / OUTLIER * largest
        norm = torch.where(exceeds, largest, torch.where(counted, norms, usual))
        usual.copy_(torch.where(usual > 0, NORM_DECAY * usual + (1 - NORM_DECAY) * norm, norm))
        gradients.mul_((cut / norms).masked_fill(~exceeds, 1.0)[:, self._piece_of])
        return torch.where(exceeds, cut, norms)

    def _ratio(self, sent: Tensor) -> Tensor:
        """r of the samples of this step, (J,)."""
        samples = sent.gather(1, self._sampled).view(self.runs, self.own, -1)
        ratio = samples.mean(1).square().sum(1) / samples.square().mean(1).sum(1)
        return ratio.nan_to_num(1.0, 1.0).clamp(min=0.25 / self.own)

    def _steps(self, gradients: Tensor, r: Tensor, rate: Tensor) -> Tensor:
        """g_n -> u_n, (J * N, Q)."""
        v = self.state["v"]
        steps = torch.empty_like(gradients)
        of_mean, updates = self.way.second == "mean", self.state["turn"] // self.way.every + 1
        scale = ((1.0 if of_mean else r.double()) / (1 - self.beta2 ** updates.double())).float().expand_as(r)
        scale = self._for_each_rank(scale).view(-1, 1, 1)
        lr = self._for_each_rank(rate).unsqueeze(2)
        for block in self._sent_adam:
            second, g = block.of(v), block.of(gradients)
            taken = self._mean_over_ranks(g) if of_mean else g
            added = (1 - self.beta2) * taken * taken
            if self.way.second == "all":
                added = self._mean_over_ranks(added)
            due = self.state["turn"] % self.way.every == 0
            second.copy_(torch.where(due, second * self.beta2 + added, second))
            block.of(steps).copy_(lr * g / ((second * scale).sqrt() + 1e-8))
        share = self._for_each_rank(self.muon_share).unsqueeze(2)
        for block in self._sent_muon:
            momentum, g = block.of(v), block.of(gradients)
            momentum.lerp_(g, 1 - self.way.momentum)
            ahead = g.lerp(momentum, self.way.momentum).unflatten(2, block.shape).flatten(0, 1)
            if self.way.shared:
                self._share(momentum)
            step = orthogonal(ahead).view(len(g), block.count, -1)
            block.of(steps).copy_(lr * share * (0.2 * math.sqrt(max(block.shape))) * step)
        return steps

    def _share(self, momentum: Tensor) -> None:
        """Every so many steps: give each of (J * N, ...) ranks the mean over its run's."""
        due = (self.state["turn"] + 1) % self.way.shared == 0
        momentum.copy_(torch.where(due, self._mean_over_ranks(momentum), momentum))

    def _mean_over_ranks(self, values: Tensor) -> Tensor:
        """(J * N, ...) -> the mean over each run's ranks, (J * N, ...)."""
        mean = values.unflatten(0, (self.runs, self.own)).mean(1, keepdim=True)
        return mean.expand(-1, self.own, *mean.shape[2:]).flatten(0, 1)

    def _meet(self, steps: Tensor) -> Tensor:
        """Send the largest of u_n + e_n; what arrives, (J, Q)."""
        way, waits = self.way, self.state["waits"]
        h = steps.add_(waits)
        chosen = self._largest(h, way.density)
        mean = chosen.view(self.runs, self.own, -1).mean(1)
        if self._portion is None:
            torch.sub(h, chosen, out=waits)
        else:
            torch.addcmul(h, chosen, self._portion, value=-1, out=waits)
            mean.mul_(self._portion)
        if way.merged:
            served = self.state["served"]
            total = mean + served
            mean = self._largest(total, way.server_density)
            torch.sub(total, mean, out=served)
        if way.owner:
            mean = self.state["owner"].lerp_(mean, 1 - way.owner).clone()
        return mean

    def _largest(self, h: Tensor, density: float) -> Tensor:
        """What a sparse codec makes of each row of (R, Q)."""
        result, rows = torch.zeros_like(h), self.ranks if self.way.merged else 1
        for block in self._sent_blocks:
            values = block.of(h).unflatten(2, (rows, -1)).flatten(0, 2)  # (R * count * rows, n)
            k = count_of(density, values.shape[1])
            at = values.abs().topk(k, dim=1, sorted=False).indices.sort(1).values
            decoded = rounded(values.gather(1, at), self.way.group, self.way.bits)
            block.of(result).copy_(torch.zeros_like(values).scatter_(1, at, decoded).view(len(h), block.count, -1))
        return result

    # Its end.

    @torch.no_grad()
    def stretches(self, valid: Windows, indices: Sequence[int], each: int, size: int = 256) -> list[list[float]]:
        """For each run the mean losses of stretches of ``each`` of the windows ``indices``."""
        text = torch.as_tensor(valid.tokens).to(torch.uint8).to(self.device)
        leaves = {p.name: self.weights[:, p.start : p.start + p.numel].unflatten(1, p.shape) for p in self.pieces}
        starts = torch.tensor(list(indices), device=self.device) * valid.length
        found = []
        for at in range(0, len(starts), size):
            tokens = text[starts[at : at + size, None] + self._span].long()
            logits = forward(self.shape, leaves, tokens[:, :-1].expand(self.runs, -1, -1))
            targets = tokens[:, 1:].reshape(1, -1, 1).expand(self.runs, -1, 1)
            nats = -F.log_softmax(logits, 2).gather(2, targets).view(self.runs, len(tokens), -1)
            found.append(nats.double().mean(2))
        losses = torch.cat(found, 1).tolist()
        return [[statistics.fmean(row[at : at + each]) for at in range(0, len(row), each)] for row in losses]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, at):  # type: ignore[override]
        ctx.save_for_backward(at)
        ctx.shape = table.shape
        return table.index_select(0, at)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        (at,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_add_(0, at, grad), None


def forward(shape: Any, of: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits (R, B * T, V) of (R, B, T) tokens, on weights ``of`` (R, ...) of each row's own: ``Decoder``'s, gpt."""
    rows, batch, length = tokens.shape
    width, heads = shape.width, shape.heads

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.baddbmm(of[f"{name}.bias"].unsqueeze(1), x, of[f"{name}.weight"].transpose(1, 2))

    def norm(x: Tensor, name: str) -> Tensor:
        x = F.layer_norm(x, (width,), eps=1e-5)
        return torch.addcmul(of[f"{name}.bias"].unsqueeze(1), x, of[f"{name}.weight"].unsqueeze(1))

    def split(x: Tensor) -> Tensor:
        return x.view(rows * batch, length, heads, width // heads).transpose(1, 2)

    embedding = of["embedding.weight"]
    offsets = torch.arange(rows, device=tokens.device).view(-1, 1, 1) * embedding.shape[1]
    x = _Lookup.apply(embedding.flatten(0, 1), (tokens + offsets).flatten()).view(rows, batch, length, width)
    x = (x + of["positions.weight"][:, :length].unsqueeze(1)).flatten(1, 2)
    for number in range(shape.layers):
        block = f"blocks.{number}"
        y = norm(x, f"{block}.attention_norm")
        query, key, value = (split(linear(y, f"{block}.attention.{part}")) for part in ("query", "key", "value"))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(rows, batch * length, width), f"{block}.attention.output")
        y = linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.up")
        x = x + linear(F.gelu(y, approximate="tanh"), f"{block}.mlp.output")
    return torch.bmm(norm(x, "norm"), embedding.transpose(1, 2))


def orthogonal(x: Tensor) -> Tensor:
    """``methods/parts/muon.py``'s O of (R, rows, columns) matrices, in their dtype."""
    a, b, c = NEWTON_SCHULZ
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.transpose(1, 2)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.transpose(1, 2)).flatten(1)


def rounded(values: Tensor, group: int, bits: int) -> Tensor:
    """What integers of ``bits`` with a scale per ``group`` make of (R, k) values."""
    k, levels = values.shape[1], 127 if bits == 8 else 7
    whole = F.pad(values, (0, -k % group)).unflatten(1, (-1, group))
    largest = whole.abs().amax(2, keepdim=True)
    step = (largest * (1 / levels)).clamp_min(SMALLEST_SCALE).masked_fill(largest == 0, 1.0)
    # As the library's: a server's sums of integers are often halves of a step, which rounding alone decides.
    return ((whole * step.reciprocal()).round() * step).flatten(1)[:, :k]

"""Data-parallel training of N virtual ranks in one process: the real methods, roads, guards and optimizers.

Ranks are threads that run one at a time, from one meeting to the next. Their sums are gloo's, chunk by chunk of its
ring, so that a run with ``batched=False`` has the bits of a run of ``thinwire train`` on N processes with DDP
(``python benchmarks/loss/regimes.py --check``). ``batched=True`` takes the gradients of all ranks in one forward and
backward pass: the same up to rounding, and faster, the more so the fewer tokens a rank has.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from thinwire.core.bucket import Piece
from thinwire.core.exchange import AllReduce
from thinwire.core.method import Run, Step
from thinwire.core.names import describe
from thinwire.core.outliers import STEP, OutlierClip
from thinwire.core.road import Road, Stage
from thinwire.core.run import find_holders
from thinwire.core.selection import dense_among
from thinwire.core.state import State, dump_state, load_state
from thinwire.methods import Method, resolve
from thinwire.methods.parts.feedback import Lossy
from thinwire.network.guard import Guard
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadComm, Threads
from thinwire.train.config import Config
from thinwire.train.data.windows import Windows, batches
from thinwire.train.job.setup import make_optimizers, set_rate
from thinwire.train.model.decoder import Decoder

FIRST_BUCKET, BUCKET = 1024 * 1024, 25 * 1024 * 1024
"""Bytes of DDP's first bucket, and of the others."""
CPU = torch.device("cpu")
SEGMENT = 1024 * 1024
"""Bytes of the longest message of gloo's ring."""
GIVE_UP = 20
"""Steps in a row whose gradients are not finite: the run has diverged."""


class World(Threads):
    """Virtual ranks that make what all of them need once."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._made_at, self._made = -1, torch.empty(0)

    def together(self, rank: int, value: Tensor, make: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """``make(everybody's value)``, a new tensor, the same for all. Nobody may write to it."""
        everybody = self.swap(rank, value)
        if self._made_at != self._meetings:
            self._made_at, self._made = self._meetings, make(everybody)
        return self._made


class Ring(ThreadComm):
    """Between the virtual ranks of a :class:`World`, each on a node of its own; sums in the order of gloo's ring."""

    _world: World

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        tensor.copy_(self._world.together(self.rank, tensor, lambda values: reduced(values, op)))

    def _reduce_scatter(self, out: Tensor, rows: Tensor, op: str) -> None:
        whole = self._world.together(self.rank, rows, lambda values: reduced([v.view(-1) for v in values], op))
        out.copy_(whole.view(self.size, -1)[self.rank].view_as(out))

    def _all_gather(self, out: Tensor, row: Tensor, async_op: bool) -> None:
        out.copy_(self._world.together(self.rank, row.reshape(-1), torch.stack).view_as(out))

    def _all_to_all(self, out: Tensor, rows: Tensor) -> None:
        out.copy_(self._world.together(self.rank, rows, torch.stack)[:, self.rank])


def reduced(values: Sequence[Tensor], op: str) -> Tensor:
    """What gloo's all-reduce makes of ``values`` (1-D, one for each rank), bit for bit.

    Of N chunks, chunk c starts at rank c - 1 and goes down the ring to rank c: x_c + (x_c+1 + (... + x_c-1)).
    """
    size, numel = len(values), values[0].numel()
    if values[0].is_cuda and op != "max":  # where gloo has no ring to agree with, few launches
        total = torch.stack(list(values)).sum(0)
        return total.div_(size) if op == "mean" else total
    if op == "max":
        return torch.stack(list(values)).amax(0)
    of, result = values[0].element_size(), torch.empty_like(values[0])
    segments = -(-max(-(-numel * of // SEGMENT), 2 * size) // size)  # of each chunk
    width = -(-numel * of // (segments * size * of)) * segments
    for chunk in range(size):
        here = slice(chunk * width, min((chunk + 1) * width, numel))
        if here.start >= numel:
            break
        into = torch.add(values[(chunk - 2) % size].view(-1)[here], values[(chunk - 1) % size].view(-1)[here])
        for back in range(3, size + 1):
            into.add_(values[(chunk - back) % size].view(-1)[here])
        result.view(-1)[here] = into
    return result.div_(size) if op == "mean" else result


class Replica:
    """A model and its optimizer: one for all ranks where nobody but the optimizer writes to them, else one for each."""

    def __init__(
        self, config: Config, vocabulary: int, start: dict[str, Tensor] | None, device: torch.device = CPU
    ) -> None:
        torch.manual_seed(config.seed)
        self.model = Decoder(config.shape(vocabulary)).to(device)
        self.weights = dict(self.model.named_parameters())
        self.optimizers = make_optimizers(self.model, config)
        self.norm = self.factor = torch.empty(())
        self._clipped = self._stepped = -1
        self.load(start or {})

    def rate(self, rate: float) -> None:
        set_rate(self.optimizers, rate)

    def clip(
        self, turn: int, gradients: dict[str, Tensor], most: float, moves: Collection[str] = (),
        power: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Take up ``gradients`` as :meth:`thinwire.Wire.clip_grad_norm_` clips them; their norm before.

        ``moves``: those that are steps, and left alone. ``power``: about the squared norm of the gradients they were.
        """
        if self._clipped != turn:
            for name, weight in self.weights.items():
                weight.grad = gradients[name]
            norms = [of for name, of in gradients.items() if name not in moves]
            self.norm = get_total_norm(norms, 2.0)
            if power is not None:
                self.norm = get_total_norm([self.norm, power.sqrt()], 2.0) if norms else power.sqrt()
            clip_grads_with_norm_([of for name, of in self.weights.items() if name not in moves], most, self.norm)
            self.factor, self._clipped = (most / (self.norm + 1e-6)).clamp(max=1.0), turn
        return self.norm

    def step(self, turn: int) -> None:
        if self._stepped != turn:
            for optimizer in self.optimizers:
                optimizer.step()
            self._stepped = turn

    def state(self) -> dict[str, Tensor]:
        """Weights and moments, for ``start``: ``model/NAME`` and ``KIND/NAME``."""
        found = {f"model/{name}": weight.detach().clone() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            for optimizer in self.optimizers:
                for kind, value in optimizer.state.get(weight, {}).items():
                    found[f"{kind}/{name}"] = value.clone()
        return found

    def load(self, start: dict[str, Tensor]) -> None:
        """Go on from ``start``, as :meth:`state` gives it."""
        holders = find_holders(self.optimizers, self.weights)
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for key, values in start.items():
            kind, _, name = key.partition("/")
            if kind == "model":
                self.weights[name].data.copy_(values)
            else:
                weight = self.weights[name]
                where = CPU if kind == "step" else weight.device  # torch's optimizers count on the host
                holders[name].optimizer.state[weight][kind] = values.to(where, copy=True)
        self._clipped = self._stepped = -1


def buckets_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[list[str]]:
    """The parameters in DDP's buckets, once it has rebuilt them in the order in which gradients come."""
    order: list[tuple[str, Tensor]] = []
    hooks = [
        weight.register_post_accumulate_grad_hook(lambda of, name=name: order.append((name, of)))  # type: ignore[misc]
        for name, weight in model.named_parameters()
    ]
    model(inputs, targets).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad(set_to_none=True)
    found = dist._compute_bucket_assignment_by_size([of for _, of in order], [FIRST_BUCKET, BUCKET])[0]
    return [[order[index][0] for index in indices] for indices in found]


class Gradients:
    """Gradients of all ranks, (N, P): a rank's row holds DDP's buckets, one behind the other."""

    def __init__(self, size: int, model: nn.Module, buckets: list[list[str]]) -> None:
        shapes = {name: weight.shape for name, weight in model.named_parameters()}
        device = next(model.parameters()).device
        self.rows = torch.zeros(size, sum(map(math.prod, shapes.values())), device=device)
        self.of: dict[str, Tensor] = {}
        """name -> (N, *shape), views."""
        self.buckets: list[tuple[slice, tuple[Piece, ...]]] = []
        begin = 0
        for names in buckets:
            pieces, at = [], 0
            for name in names:
                numel = math.prod(shapes[name])
                self.of[name] = self.rows[:, begin + at : begin + at + numel].view(size, *shapes[name])
                pieces.append(Piece(name, at, numel))
                at += numel
            self.buckets.append((slice(begin, begin + at), tuple(pieces)))
            begin += at

    def take(self, rank: int, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Fill a rank's row; its loss, 0-dim."""
        names, weights = zip(*model.named_parameters(), strict=True)
        loss = model(inputs, targets)
        found = torch.autograd.grad(loss, weights)
        torch._foreach_copy_([self.of[name][rank] for name in names], list(found))
        return loss.detach()


class Together:
    """The gradients of all ranks on the same weights, from one forward and backward pass over all their sequences.

    Activations know their rank by their place in the batch, so each module's gradient is a product for each rank.
    """

    def __init__(self, model: nn.Module, gradients: Gradients) -> None:
        self._model, self._size = model, len(gradients.rows)
        self._of = {id(weight): gradients.of[name] for name, weight in model.named_parameters()}
        self._written: set[int] = set()
        self._sequences = 0

    def take(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Fill all rows from (N * B, T) tokens, rank by rank; the mean of the ranks' losses, 0-dim."""
        self._written.clear()
        self._sequences = len(inputs)
        with self._watched():
            loss = self._model(inputs, targets)
            (loss * self._size).backward()
        return loss.detach()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        kinds: dict[type, Callable] = {
            nn.Linear: self._linear, nn.Embedding: self._embedding, nn.LayerNorm: self._norm, nn.RMSNorm: self._norm,
        }  # fmt: skip
        watched = [module for module in self._model.modules() if type(module) in kinds]
        for module in watched:
            module.forward = lambda x, of=module: kinds[type(of)](of, x)  # type: ignore[method-assign, misc]
        try:
            yield
        finally:
            for module in watched:
                del module.forward

    def _linear(self, of: nn.Linear, x: Tensor) -> Tensor:
        return _Linear.apply(x, of.weight, of.bias, self)

    def _embedding(self, of: nn.Embedding, tokens: Tensor) -> Tensor:
        return _Embedding.apply(tokens.expand(self._sequences, tokens.shape[-1]), of.weight, self)

    def _norm(self, of: Any, x: Tensor) -> Tensor:
        if isinstance(of, nn.LayerNorm):
            x = F.layer_norm(x, of.normalized_shape, eps=of.eps)
        else:
            x = F.rms_norm(x, list(of.normalized_shape), eps=of.eps)
        return _Scale.apply(x, of.weight, getattr(of, "bias", None), self)

    def split(self, values: Tensor) -> Tensor:
        """(N * B, T, width) -> (N, B * T, width)."""
        return values.reshape(self._size, -1, values.shape[-1])

    def into(self, weight: Tensor) -> tuple[Tensor, int]:
        """Where the gradients of ``weight`` go, (N, *shape), and with which factor what is there counts: 0 or 1."""
        again = id(weight) in self._written
        self._written.add(id(weight))
        return self._of[id(weight)], int(again)

    def put(self, weight: Tensor, values: Tensor) -> None:
        """Gradients of ``weight``, (N, *shape)."""
        there, again = self.into(weight)
        there.add_(values) if again else there.copy_(values)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, ranks):  # type: ignore[override]
        ctx.save_for_backward(x, weight, bias)
        ctx.ranks = ranks
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        own = ctx.ranks.split(grad)
        there, again = ctx.ranks.into(weight)
        there.baddbmm_(own.transpose(1, 2), ctx.ranks.split(x), beta=again)
        if bias is not None:
            ctx.ranks.put(bias, own.sum(1))
        return grad @ weight, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight, ranks):  # type: ignore[override]
        ctx.save_for_backward(tokens, weight)
        ctx.ranks = ranks
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        tokens, weight = ctx.saved_tensors
        there, again = ctx.ranks.into(weight)
        if not again:
            there.zero_()
        own = ctx.ranks.split(grad)
        for mine, at, values in zip(there, tokens.reshape(len(own), -1), own, strict=True):
            mine.index_add_(0, at, values)
        return None, None, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, ranks):  # type: ignore[override]
        ctx.save_for_backward(x, weight, bias)
        ctx.ranks = ranks
        return x * weight if bias is None else torch.addcmul(bias, x, weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        ctx.ranks.put(weight, ctx.ranks.split(grad * x).sum(1))
        if bias is not None:
            ctx.ranks.put(bias, ctx.ranks.split(grad).sum(1))
        return grad * weight, None, None, None


class Rank:
    """One virtual rank: what ``compress()`` sets up on a process, and a step of its training loop.

    Attributes:
        sent, side, dense: bytes sent so far; of them for parameters beside the compressed ones; what dense would send.
    """

    def __init__(self, world: World, rank: int, method: str, replica: Replica, gradients: Gradients, config: Config):
        self.rank, self.replica, self.method, self.clip = rank, replica, resolve(method), config.clip or math.inf
        self.ledger, self.sent, self.side, self.dense = Ledger(), 0.0, 0.0, 0.0
        comm = Ring(world, rank, self.ledger)
        self.parameters = {parameter.name: parameter for parameter in describe(replica.model).values()}
        self.state = self.method.state = State(self.method.card.offloaded_kinds)
        run = Run(
            self.parameters, AllReduce(comm), config.steps, config.seed, replica.optimizers, replica.weights, rank
        )
        self.method.begin(run)
        self.guard = Guard([comm])
        self.stage = Stage(
            self.method, dense_among(self.method, self.parameters.values()), run.exchange, self.guard, self.ledger
        )
        self.bound: OutlierClip | None = None
        card = self.method.card
        if card.keeps_state and card.alone_from is None and len(self.stage.dense) < len(self.parameters):
            leaves = None if card.promise.of == "gradients" else STEP
            self.bound = self.stage.bound = OutlierClip(
                10.0, {of.name: of.local for of in self.parameters.values()}, leaves=leaves
            )
        self.road = Road([self.stage])
        self._count_side(self.stage)
        row = gradients.rows[rank]
        self._flats = [(row[where], pieces) for where, pieces in gradients.buckets]
        self._gradients = {name: gradients.of[name][rank] for name in replica.weights}

    def _count_side(self, stage: Stage) -> None:
        reduce = stage._side.reduce

        def counted(bucket, exchange):
            before = sum(self.ledger.current.bytes.values())
            reduce(bucket, exchange)
            self.side += sum(self.ledger.current.bytes.values()) - before

        stage._side.reduce = counted  # type: ignore[method-assign]

    def step(self, turn: int) -> bool:
        """Exchange the gradients that are in this rank's row, and step; False: the step was skipped on all ranks, or
        by this rank where it is alone."""
        for flat, pieces in self._flats:
            self.road.reduce(flat, pieces)
        self.road.end_pass()
        steps = self.method.card.step_maker
        moves, power = (frozenset(), None) if steps is None else (frozenset(steps.names), steps.power())
        norm = self.replica.clip(turn, self._gradients, self.clip, moves, power)
        self.guard.observe_all(self._gradients.values() if moves else [norm])
        alone = self.method.card.alone(self.road.step)
        comms = [comm for comm in self.guard.comms if comm is not self.stage.exchange.comm] if alone else None
        finite, _ = self.guard.agree(norm.device, comms=comms)
        step = Step(
            self.road.step, self.replica.optimizers, self.replica.weights, self.replica.factor, self._agree,
            agree_inside=lambda values: self._agree(values, ()),
        )  # fmt: skip
        if finite:
            self._commit()
            self.method.before_step(step)
            self.replica.step(turn)
            self.method.after_step(step)
            self._commit()
            self.road.step += 1
        else:
            self.state.rollback()
            self.method.undo()
            if self.bound is not None:
                self.bound.rollback()
            self.method.after_skip(step)
            self._commit()
        self.sent += sum(self.ledger.current.bytes.values())
        self.dense += self.ledger.current.dense_bytes
        self.ledger.close_step(skipped=not finite)
        self.ledger.reset()
        return finite

    def _agree(self, values: Iterable[Tensor], comms: Sequence[ThreadComm] | None = None) -> bool:
        self.guard.observe_all(values)
        return self.guard.agree(self.replica.norm.device, comms=comms)[0]

    def dump(self) -> dict[str, Tensor]:
        """What this rank has beside weights and moments, for :meth:`load`."""
        self.method.finish()  # what it has outside its state
        found = {f"state/{key}": value for key, value in dump_state(self.state).items()}
        if self.bound is not None:
            found |= {f"bound/{key}": value.clone() for key, value in self.bound.state_dict().items()}
        counts = [float(self.road.step), self.sent, self.side, self.dense]
        return found | {"counts": torch.tensor(counts, dtype=torch.float64)}

    def load(self, saved: dict[str, Tensor]) -> None:
        def below(kind: str) -> dict[str, Tensor]:
            return {key.removeprefix(kind): value for key, value in saved.items() if key.startswith(kind)}

        load_state(self.state, below("state/"))
        self.method.undo()
        self.method.state_changed()
        if self.bound is not None:
            self.bound.load_state_dict(below("bound/"))
        step, self.sent, self.side, self.dense = saved["counts"].tolist()
        self.road.step = int(step)

    def _commit(self) -> None:
        self.state.commit()
        if self.bound is not None:
            self.bound.commit()


@dataclass
class Trained:
    """What a run gave: losses by step (mean over ranks), (step, validation loss) pairs, the ranks as they ended."""

    ranks: list[Rank]
    losses: list[float] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    skipped: int = 0
    diverged: bool = False


def acts_in_steps(method: Method) -> bool:
    """Does it look at weights and moments, or write to them, around the optimizer's step?"""
    if isinstance(method, Lossy) and method.updates is not None:
        return True
    own = (type(method).before_step, type(method).after_step)
    return not {Method.before_step, Lossy.before_step, Method.after_step, Lossy.after_step} >= set(own)


@torch.no_grad()
def evaluate(model: nn.Module, chosen: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Mean loss over the batches ``chosen``."""
    device = next(model.parameters()).device
    total = sum(float(model(inputs.to(device), targets.to(device))) * len(inputs) for inputs, targets in chosen)
    return total / sum(len(inputs) for inputs, _ in chosen)


Rates = Callable[[int], float]
"""A step (from 0) -> its learning rate."""


class Played:
    """A run of ``config.ranks`` virtual ranks, as that of ``thinwire train`` on DDP, which can be saved and put back.

    Attributes:
        turn: steps that are done. found: what the run gave so far.
    """

    def __init__(
        self,
        config: Config,
        windows: Windows,
        *,
        vocabulary: int = 256,
        batched: bool = False,
        start: dict[str, Tensor] | None = None,
        device: torch.device = CPU,
    ) -> None:
        """As :func:`train`."""
        self.config, self.turn, self._windows, self.device = config, 0, windows, device
        self._size, self._batch = config.ranks or 1, config.batch_size
        method = resolve(config.method)
        shared = method.rank_equal and not acts_in_steps(method)
        self.replicas = [Replica(config, vocabulary, start, device) for _ in range(1 if shared else self._size)]
        model = self.replicas[0].model
        self._gradients = Gradients(self._size, model, buckets_of(model, *self._batch_of(0, self._batch)))
        self._world = World(self._size)
        ranks = [
            Rank(self._world, rank, config.method, self.replicas[0 if shared else rank], self._gradients, config)
            for rank in range(self._size)
        ]
        self.found = Trained(ranks)
        equal = method.rank_equal and not method.card.alone(config.steps)
        self._together = Together(model, self._gradients) if batched and equal else None
        self._tokens: dict[int, tuple[Tensor, Tensor]] = {}
        self._losses: dict[int, Tensor] = {}
        self._in_a_row = [0] * self._size

    def _batch_of(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._windows.batch(first, count)
        return inputs.to(self.device), targets.to(self.device)

    def save(self) -> dict[str, Tensor]:
        """All that :meth:`load` needs to go on as if nothing had been between, bit for bit."""
        saved = {f"replica-{i}/{key}": of for i, each in enumerate(self.replicas) for key, of in each.state().items()}
        for rank in self.found.ranks:
            saved |= {f"rank-{rank.rank}/{key}": value for key, value in rank.dump().items()}
        saved["losses"] = torch.tensor(self.found.losses, dtype=torch.float64)
        saved["progress"] = torch.tensor([self.turn, self.found.skipped, int(self.found.diverged), *self._in_a_row])
        return saved

    def load(self, saved: dict[str, Tensor]) -> None:
        owners: dict[str, Sequence[Any]] = {"replica": self.replicas, "rank": self.found.ranks}
        for kind, these in owners.items():
            for number, owner in enumerate(these):
                prefix = f"{kind}-{number}/"
                owner.load({key.removeprefix(prefix): of for key, of in saved.items() if key.startswith(prefix)})
        self._tokens.clear()
        self.found.losses = saved["losses"].tolist()
        self.turn, self.found.skipped, diverged, *self._in_a_row = saved["progress"].tolist()
        self.found.diverged = bool(diverged)

    def run(self, until: int, rate: Rates, after: Callable[[int], object] | None = None) -> None:
        """Take the steps up to ``until``, with ``rate`` of each; rank 0 then calls ``after`` with the steps done."""
        self._losses = {turn: torch.zeros(self._size, device=self.device) for turn in range(self.turn, until)}
        means: list[Tensor] = []
        self._world.run(lambda rank: self._body(rank, until, rate, after, means))
        self.found.losses += torch.stack(means).tolist() if means else []  # the host waits for a device once
        self.turn = until

    def finish(self) -> None:
        for rank in self.found.ranks:
            rank.method.finish()

    def _prepare(self, turn: int, of: Rank) -> None:
        """This rank's gradients, or everybody's if nobody has taken them yet."""
        size, batch = self._size, self._batch
        if turn not in self._tokens:
            self._tokens.clear()
            self._tokens[turn] = self._batch_of(turn * size * batch, size * batch)
            if self._together is not None:
                self._losses[turn].fill_(self._together.take(*self._tokens[turn]))
        if self._together is None:
            mine = slice(of.rank * batch, (of.rank + 1) * batch)
            inputs, targets = self._tokens[turn]
            self._losses[turn][of.rank] = self._gradients.take(of.rank, of.replica.model, inputs[mine], targets[mine])

    def _body(
        self, rank: int, until: int, rate: Rates, after: Callable[[int], object] | None, means: list[Tensor]
    ) -> None:
        of, found, world = self.found.ranks[rank], self.found, self._world
        for turn in range(self.turn, until):
            of.replica.rate(rate(turn))
            if self._together is not None:
                world.swap(rank, None)  # everybody's step is over: its gradients may go
            self._prepare(turn, of)
            finite = of.step(turn)
            if of.method.card.alone(of.road.step):
                world.swap(rank, None)  # or this rank would be the first to have a loss, and go on
            self._in_a_row[rank] = 0 if finite else self._in_a_row[rank] + 1
            if rank == 0:
                found.skipped += not finite
                means.append(reduced(list(self._losses[turn].split(1)), "mean").view(()))
                if after is not None:
                    after(turn + 1)
            if self._in_a_row[rank] == GIVE_UP and not of.method.card.alone(of.road.step):
                found.diverged = True
                break


def train(
    config: Config,
    windows: Windows,
    held_out: Windows | None = None,
    *,
    vocabulary: int = 256,
    batched: bool = False,
    start: dict[str, Tensor] | None = None,
    looks: int = 8,
    sequences: int = 64,
) -> Trained:
    """Train ``config.ranks`` virtual ranks for ``config.steps`` steps, as ``thinwire train`` does on DDP.

    Args:
        windows, held_out: texts to train on and to look at: ``looks`` times at ``sequences`` of the held-out ones.
        batched: gradients of all ranks in one pass, where their weights are equal.
        start: weights and moments to begin with, as :meth:`Replica.state` gives them.
    """
    played = Played(config, windows, vocabulary=vocabulary, batched=batched, start=start)
    chosen = [] if held_out is None else batches(held_out.spread(sequences), 16)
    every = max(config.steps // looks, 1)

    def look(done: int) -> None:
        if chosen and (done % every == 0 or done == config.steps):
            played.found.curve.append((done, evaluate(played.replicas[0].model, chosen)))

    played.run(config.steps, config.learning_rate, look)
    played.finish()
    return played.found

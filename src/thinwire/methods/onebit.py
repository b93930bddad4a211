"""1-bit Adam: signs of the momentum, once the variance is frozen (Tang et al., ICML 2021, arXiv 2102.02888).

Alg. 1, on worker n, for each tensor, after T_w steps of Adam, whose last variance v stays:

    m_n = b1 m + (1-b1) g_n                                                     (l. 6)
    send C[m_n + e_n], chunk j to server j;  e_n = m_n + e_n - C[m_n + e_n]     (l. 7-8)
    x = mean_n C[m_n + e_n] + s, on each server;  m' = C[x];  s = x - m'        (l. 9-10)
    everybody gets m' from all servers and goes on from it                      (l. 11-12)
    w -= lr m' / (sqrt(v) + eps)                                                (l. 13)

C keeps the sign of each value and one scale per group. Rank j is server j: of row j of the bucket.

The two errors are kept apart, s with the server, and not in the exchange's ``residual``, which gives N s back to the
server's own e: the same sum, but as part of one worker's message, N times as large as the rest, it would have to pass
through C once more, and set the scale of its group there. (For a codec whose error is small the two forms agree to
first order; here the error is as large as the value.)

Sharded weights (FSDP2) make no difference to the algorithm: every worker needs all of m for l. 6, so m' goes to
everybody there, too, as signs, and is kept as signs: one bit per value.

Where ours differs. Bias corrections: the paper and its authors' code have none at all; the user's Adam has, so that
of m goes on, and that of v is frozen with v: otherwise the step would change size at T_w. A scale per ``group``, where
theirs is per tensor and server. Weight decay is AdamW's. Where v is 0, in rows of an embedding that no batch used,
Adam's step has no size and a sign has no zero: such weights stay where they are (the authors ask their user for a mask
of them), and embeddings are dense unless they are named in ``send`` (dense is the authors' ``non_freeze``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.bucket import Bucket, Segment
from thinwire.codecs.base import Codec, Residual
from thinwire.codecs.sign import SCALES, Sign
from thinwire.collectives import Exchange
from thinwire.comm import local
from thinwire.errors import ThinwireError
from thinwire.methods.base import (
    SMALL,
    Method,
    Parameter,
    Promise,
    Run,
    Step,
    check_smallest,
    check_start,
    exempt_small,
    first_step,
    refuse_chunks,
    refuse_scaled_apart,
)


@dataclass
class OneBitAdam(Method):
    """Signs of Adam's momentum once its variance is frozen, 1 + 32 / group bits a value each way (arXiv 2102.02888).

    The optimizer must be ``torch.optim.Adam`` without weight decay, or ``AdamW``. After the warm-up its steps on the
    compressed parameters are the method's: what an engine holds as their gradient is then the new momentum, on which
    ``clip_grad_norm_`` acts for this step alone; ``exp_avg`` follows it, ``exp_avg_sq`` stays as it is. Parameters that
    stay dense keep their Adam.

    Args:
        warmup: dense Adam at first: a share of the run below 1, or a number of optimizer steps, at least one. Longer =>
            more bytes, and a variance that is better known: the paper takes 15-20% of the run.
        group: values that share a scale, a power of two from 32 to 4096; larger => fewer bytes, and values of more
            different size sent alike.
        scale: of a group, "mean" of |x| (the smallest error) or "rms" (the authors' code: the norm is kept).
        smallest: elements below which a tensor stays dense (higher => fewer tensors compressed).

    Raises:
        ThinwireError: no Adam; amsgrad, maximize or coupled weight decay; more than one beta1; no warm-up.
    """

    name: ClassVar[str] = "onebit-adam"
    on_wire: ClassVar[bool] = False
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"warmup": 0.15, "scale": "rms", "group": 4096, "smallest": 0, "send": ("*",)},
    }

    warmup: float = 0.15
    group: int = 2048
    scale: str = "mean"
    smallest: int = SMALL

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ThinwireError(f"onebit-adam: scale is 'mean' or 'rms', got '{self.scale}'")
        super().__post_init__()
        check_smallest(self.name, self.smallest)
        check_start(self.name, "warmup", self.warmup)
        self._received: set[str] = set()  # whose gradient is a momentum in this step
        self._held: dict[str, Tensor] = {}  # gradients that the optimizer must not see

    def make_codec(self) -> Codec:
        return Sign(self.group, self.scale)

    @property
    def adds_up(self) -> bool:
        return False

    @property
    def promise(self) -> Promise:
        return Promise("conserves", waits={"residual": 1.0, "server": 1.0}, of="moments")

    @property
    def keeps_state(self) -> bool:
        return True

    @property
    def steady(self) -> int:
        return self.first

    @property
    def cycle(self) -> Mapping[int, float]:
        return {self.first + 1: 1.0}  # in the first of all, Adam's own moment is sent besides where it is sharded

    def policy(self, parameter: Parameter) -> str | None:
        if parameter.role == "embedding":
            return "embedding: unused rows have no variance"
        return exempt_small(parameter, self.smallest)

    def begin(self, run: Run) -> None:
        super().begin(run)
        refuse_chunks(self.name, run)
        self.first = first_step(self.name, "warmup", self.warmup, run.steps)  # T_w
        if self.first < 1:
            raise ThinwireError("onebit-adam: warmup=0 leaves no variance to freeze: warm up for 1 step or more")
        refuse_scaled_apart(self.name, run)
        sent = {name: held for name, held in run.held.items() if self.keep_dense(run.parameters[name]) is None}
        for name, (optimizer, group) in sent.items():
            if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
                raise ThinwireError(
                    f"onebit-adam is built on Adam: pass torch.optim.AdamW or Adam as the optimizer of {name}, got "
                    f"{type(optimizer).__name__}, or name it in dense="
                )
            for knob in ("amsgrad", "maximize", "differentiable"):
                if group.get(knob):
                    raise ThinwireError(f"onebit-adam cannot freeze the variance with {knob}=True: leave it out")
            if group["weight_decay"] and not _decoupled(optimizer, group):
                raise ThinwireError("onebit-adam needs decoupled weight decay: pass torch.optim.AdamW instead of Adam")
            if run.scaled and group.get("fused"):
                raise ThinwireError(
                    "onebit-adam under a GradScaler takes gradients unscaled before the step: leave fused=True out"
                )
        betas = {float(group["betas"][0]) for _, group in sent.values()}
        if len(betas) > 1:
            raise ThinwireError(f"onebit-adam needs one beta1 for all parameter groups, got {sorted(betas)}")
        self.beta1 = betas.pop() if betas else 0.0

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        if bucket.step < self.first:
            exchange.mean(bucket)
            return
        assert isinstance(self.codec, Sign)
        rank, n = exchange.rank, bucket.shape[1]
        bucket.rows.mul_(1 - self.beta1).add_(self._moment(bucket, exchange), alpha=self.beta1)  # l. 6
        bucket.rows.add_(self.state.read("residual", bucket))
        self._clear(bucket, bucket.rows)
        shares = bucket.once("shares", lambda: self._shares(bucket))
        error = Residual(None, self.state.write("residual", bucket))
        served = exchange.serve(bucket, replace(self.codec, shares=shares), residual=error)  # l. 7-9
        served.add_(self.state.read("server", bucket, rows=1))
        self._clear(bucket, served, rank)
        wires = bucket.buffer("moments", (exchange.rows, self.codec.wire_numel(n)), torch.uint8)
        codec, mine = replace(self.codec, shares=shares[rank : rank + 1]), wires[rank : rank + 1]
        with exchange.span("encode", served):
            codec.encode(served, mine, residual=Residual(None, self.state.write("server", bucket, rows=1)))  # l. 10
        exchange.gather(wires, mine[0].clone())  # l. 11
        with exchange.span("decode", bucket.mean):
            codec.decode(exchange.kept(wires), bucket.mean)
        for segment in bucket.segments:
            self.state.put("moment", segment.name, torch.cat(self._parts(wires, segment, n), 1))  # m, for the next l. 6
            self._received.add(segment.name)

    def before_step(self, step: Step) -> None:
        """The step of the parameters whose momentum has arrived (l. 13), with Adam's own arithmetic, in Adam's state.

        The optimizer leaves a parameter without gradient, and its moments and step count, as they are.
        """
        for name in sorted(self._received):
            weight = step.weights[name]
            if weight.grad is None:
                continue
            optimizer, group = step.held[name]
            known = optimizer.state.get(weight, {})
            if "exp_avg_sq" not in known:
                raise ThinwireError(f"onebit-adam: {name} had no gradient in the warm-up: name it in dense=")
            frozen = self.state.get("frozen", name)
            if frozen is None:
                frozen = known["step"].detach().clone()
                self.state.put("frozen", name, frozen)
            known["step"] += 1
            moment = local(weight.grad)
            local(known["exp_avg"]).copy_(moment)
            _frozen_step(local(weight.detach()), moment, local(known["exp_avg_sq"]), known["step"], frozen, group)
            self._held[name], weight.grad = weight.grad, None
        self._received.clear()

    def after_step(self, step: Step) -> None:
        """What the engine holds as the gradient is there again for whoever looks at it."""
        for name, gradient in self._held.items():
            step.weights[name].grad = gradient
        self._held.clear()

    def undo(self) -> None:
        self._received.clear()

    def _parts(self, wires: Tensor, segment: Segment, n: int) -> list[Tensor]:
        """``segment``'s own bits and scales in the wires (R, m) of rows of ``n`` values: together a wire of its own."""
        bits, scales = segment.groups(8), segment.groups(self.group)
        return [wires[:, bits], wires[:, n // 8 + 4 * scales.start : n // 8 + 4 * scales.stop]]

    def _moment(self, bucket: Bucket, exchange: Exchange) -> Tensor:
        """m of all workers (R, n): as last received; at first the optimizer's own."""
        assert self.codec is not None
        moments = bucket.buffer("moment", bucket.shape, torch.float32)
        wires = {segment.name: self.state.get("moment", segment.name) for segment in bucket.segments}
        if any(wire is None for wire in wires.values()):
            self._adam_moment(bucket, exchange, moments)
        for segment in bucket.segments:
            wire = wires[segment.name]
            if wire is not None:
                self.codec.decode(wire, bucket.columns(moments, segment))
        return moments

    def _adam_moment(self, bucket: Bucket, exchange: Exchange, moments: Tensor) -> None:
        """``moments`` (R, n) = what the warm-up left in the optimizer; where it is sharded, sent once, in fp32."""
        rows = exchange.kept(moments)
        rows.zero_()
        for segment in bucket.segments:
            weight = self.run.weights[segment.name]
            found = self.run.held[segment.name].optimizer.state.get(weight, {}).get("exp_avg")
            if found is None:
                continue
            values = local(found).reshape(-1)
            for row, part in zip(rows, values.split(max(segment.span, 1)), strict=False):
                row[segment.start : segment.start + part.numel()].copy_(part)
        exchange.share(moments)

    def _clear(self, bucket: Bucket, values: Tensor, first: int = 0) -> None:
        """Zeros in ``values``, the bucket's rows from ``first`` on, where no parameter is: a sign has no zero."""
        bucket.clear_padding(values)
        for segment in bucket.segments:
            if segment.piece.stride:
                continue
            columns = bucket.columns(values, segment)[:, : segment.span]
            whole, rest = divmod(segment.piece.numel, segment.span)
            if first <= whole < first + len(values):
                columns[whole - first, rest:].zero_()
            columns[max(whole + 1 - first, 0) :].zero_()

    def _shares(self, bucket: Bucket) -> Tensor:
        """(R, n / group): one over the number of values in each group that are not padding, which sets no scale."""
        rows, n = bucket.shape
        counts = torch.zeros(rows, n // self.group, dtype=torch.float32)
        for segment in bucket.segments:
            places = torch.arange(0, segment.width, self.group)
            at = segment.groups(self.group)
            values = torch.tensor([_count(segment, row) for row in range(rows)])
            counts[:, at] = (values.unsqueeze(1) - places).clamp(1, self.group).float()
        return (1 / counts).to(bucket.device)


def _count(segment: Segment, row: int) -> int:
    """How many of ``segment``'s columns in ``row`` hold values. Rows that the engine has padded are full to us."""
    return segment.span if segment.piece.stride else min(max(segment.piece.numel - row * segment.span, 0), segment.span)


def _decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def _frozen_step(
    weight: Tensor, moment: Tensor, variance: Tensor, step: Tensor, frozen: Tensor, group: dict[str, Any]
) -> None:
    """w = (1 - lr decay) w - lr m^ / (sqrt(v^) + eps), m^ = m / (1 - b1^step), v^ = v / (1 - b2^frozen), in place.

    Where v is 0, m does nothing. ``step`` and ``frozen`` are 0-dim, on any device, and are not read by the host.
    """
    beta1, beta2 = group["betas"]
    lr, decay = float(group["lr"]), group["weight_decay"]
    denominator = (variance.float() / (1 - beta2 ** frozen.double())).sqrt_().add_(group["eps"])
    denominator.mul_(1 - beta1 ** step.double()).masked_fill_(variance == 0, torch.inf)
    if decay:
        weight.mul_(1 - lr * decay)
    weight.addcdiv_(moment.float(), denominator, value=-lr)

"""Error feedback behind the preconditioner: what waits is a step of the weights, not a gradient.

On rank n (on two levels: node n), for each compressed tensor, at step t:

    v_n = b2 v_n + (1-b2) g_n^2                                         this rank's own, nothing is sent
    r   = .9 r + .1 sum_S (mean_n g_n)^2 / sum_S mean_n g_n^2           S: a few coordinates, the same on all N
    u_n = lr g_n / (sqrt(r v_n / (1 - b2^t)) + eps)
    the method exchanges u_n, with its own error feedback:  c = what it makes of mean_n u_n
    w   = (1 - lr decay) w - c                                          at lr = 0: w = w, and c goes on waiting

r is the average up to the step before, and 1 / sqrt(N) in the very first, half way from noise to equal gradients. On
two levels each shard measures its own.

Why. With the residual in front of Adam, a value that has waited k steps arrives as k gradients at once. It is divided
by a sqrt(v) that was measured from such sums meanwhile, so its scale is stale. And Adam's momentum adds a delay of nine
steps to that of the residual. Here lr / sqrt(v) is fixed when the gradient is taken, and there is no momentum
(docs/quality.md has the figures). r turns the variance of one rank's gradient into that of the mean: r is 1 where all
ranks have the same gradient, and 1/N where they have nothing but noise.

``delivered_share`` p: the step takes the share p of c, and the rest goes on waiting:

    w = (1 - lr decay) w - p c;  e_n = h_n - p c_n              h_n = u_n + e_n, of which c_n is sent

There is no momentum here, so the wait does the averaging. At a density of 0.01 values wait long. Where many values are
sent, they are mostly the last step's noise: delivered whole, they are RMSProp at Adam's rate, from which a run does not
recover. Where all values are sent, p is a momentum of 1 - p.

``beta1``: an average of this rank's g_n with that decay replaces g_n above sqrt(v_n). It is no substitute for p: it
makes the sums larger that are delivered at once.

Of parameters that the user's ``torch.optim.Muon`` holds, u_n is Muon's step along this rank's own momentum
(``parts/muon.py``), which takes the place of v_n; unless ``delivered_share`` is set, all of it is delivered.

lr (as it stands in the backward pass), b2, eps and the decay come from the parameter's group in the user's
``torch.optim.AdamW``, or Muon, which never makes moments for these parameters: v_n and what waits take their place.

Relatives: Locally Accumulated Adam (Chen et al., ICIP 2023), DeMo (arXiv 2411.19870), DGC (arXiv 1712.01887).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.device import upload
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.base.random import seed_of
from thinwire.core.bucket import Bucket, Segment
from thinwire.core.exchange import Exchange
from thinwire.core.run import Holder, Run, Step
from thinwire.core.state import State
from thinwire.methods.parts.muon import Orthogonal
from thinwire.methods.parts.own_steps import OwnSteps, require_adam
from thinwire.network.comm import local
from thinwire.ops.direction import Adam, DirectionSegment, direction
from thinwire.ops.norms import Samples
from thinwire.ops.steps import take

SAMPLE = 64
"""Sampled values of each tensor from which r is measured: over all tensors, averaged over ten steps."""
PROBE = 4096
"""Values at the start of each step whose norm reveals that somebody has scaled it."""
DECAY = 0.9
"""Weight of the old r in the new one."""


class _Factors(NamedTuple):
    """The numbers that a step multiplies gradients with, told to a device on ``stream`` in one copy for all tensors.

    Attributes:
        counts: by name, the gradients in the tensor's average, this one among them: 0-dim, on the host.
        knobs: by name, the tensor's index in the two below, and Adam's beta2 and eps; the same object while alike.
        lrs: (tensors,) lr, with a momentum's bias correction. unbias: (tensors,) the bias correction of v.
    """

    stream: Any
    counts: Mapping[str, Tensor]
    knobs: Mapping[str, tuple[int, float, float]]
    lrs: Tensor
    unbias: Tensor


class UpdateSpace:
    """Turns gradients into steps before an exchange, and takes the steps that come back."""

    def __init__(
        self,
        method: str,
        updates: Any,
        run: Run,
        sent: Sequence[str],
        *,
        read_state: Callable[[], State],
        instead: Callable[[], str],
    ) -> None:
        """Make the steps of ``method`` for the parameters ``sent``; ``updates``: its knobs (``feedback.Updates``).

        ``read_state`` returns the method's state; ``instead`` returns what an error advises where there is no Adam.

        Raises:
            ThinwireError: no Adam; amsgrad, maximize or coupled weight decay; Muon, and a rank holds part of a matrix.
        """
        self._read_state, self._run, self._momentum = read_state, run, updates.beta1
        self._name = f"{method} with feedback='updates'"
        self._orthogonal = Orthogonal(self._name, run, sent)
        try:
            require_adam(self._name, run, [name for name in sent if name not in self.matrices])
        except ThinwireError as refused:
            raise ThinwireError(
                f"{refused}; or send gradients, which works with any optimizer: write {instead()}"
            ) from None
        self._steps = OwnSteps(self._name)
        # For each tensor in this step, (2, SAMPLE + 1): g and g^2 at its sample, then |g| and |g|^2. Until ``end_pass``
        # this rank's; then the means over ranks, those of g squared. And those of the last pass, in its order.
        self._own_measures: dict[str, Tensor] = {}
        self._measured: dict[str, Tensor] = {}
        self._last_means: tuple[list[str], Tensor] | None = None
        self._beginnings: dict[str, Tensor] = {}  # the first values of each c
        # Step; norms of the first values of its steps when taken, and when they came, (2, tensors), on the host; event
        # after which they are there.
        self._norms: list[tuple[int, Tensor, Any]] = []
        self._factors: _Factors | None = None  # of the step under way
        self._knobs: Mapping[str, tuple[int, float, float]] = {}
        self._rates: Mapping[str, float] = {}  # the lr that made each tensor's last step
        self._warned = False
        self._handed: set[str] = set()  # the parameters of which the optimizer has moments that ``hand_over`` gave

    @property
    def names(self) -> Collection[str]:
        """The parameters whose ``grad`` holds a step now."""
        return self._steps.names

    @property
    def matrices(self) -> frozenset[str]:
        """The parameters that step along Muon's direction."""
        return self._orthogonal.names

    @property
    def _state(self) -> State:
        return self._read_state()

    def watch(self, bucket: Bucket) -> None:
        """Update v_n from gradients that are sent dense."""
        bucket.cut_outliers()
        values = bucket.scratch("watched", bucket.shape, torch.float32).copy_(bucket.rows)
        self._precondition(bucket, values, self._first_ratio(bucket), None)

    def enter(self, bucket: Bucket, exchange: Exchange, *, as_encoded: bool = False) -> None:
        """Turn the gradients in ``bucket.rows`` into steps, g_n -> u_n; ``as_encoded``: if possible, then."""
        samples, r = self._measure(bucket), self._state.get("alike", "")
        with exchange.span("encode", bucket.rows):
            r = self._first_ratio(bucket) if r is None else r
            self._precondition(bucket, bucket.rows, r, samples, as_encoded=as_encoded)

    def leave(self, bucket: Bucket) -> None:
        """Note that ``bucket.mean`` holds steps to take, and how they begin, unless ``end_pass`` is shown them."""
        names = [segment.name for segment in bucket.segments]
        self._steps.names.update(names)
        if not self._run.shows_late:
            lengths = bucket.once("probed", lambda: [self._probed(segment) for segment in bucket.segments])
            places = zip(bucket.segments, lengths, strict=True)
            self._note_beginnings(names, [bucket.mean[0, of.start :][:n] for of, n in places])

    def end_pass(self, gradients: Mapping[str, Tensor]) -> None:
        """Note how the steps in ``gradients`` begin, and average over ranks what was measured since the last call.

        The average is one message, in the order of names: a network's sum depends on the place of a value in its
        message, and engines cut their buckets anew, but a resumed run is the same run.
        """
        if self._run.shows_late and (names := sorted(self._steps.names & gradients.keys())):
            self._note_beginnings(names, [self._beginning(name, gradients[name]) for name in names])
        own_measures, self._own_measures = self._own_measures, {}
        if names := sorted(own_measures):
            joined = torch.cat([own_measures[name] for name in names], 1)
            means = self._run.exchange.all_mean(joined, divided=True).view(2, -1, SAMPLE + 1)
            means[0].square_()
            self._measured.update(zip(names, means.unbind(1), strict=True))
            self._last_means = names, means

    def _note_beginnings(self, names: Sequence[str], probes: list[Tensor]) -> None:
        lengths = [len(probe) for probe in probes]
        self._beginnings.update(zip(names, torch.cat(probes).split(lengths), strict=True))

    def _beginning(self, name: str, gradient: Tensor) -> Tensor:
        """View the first values of what travels of the step ``gradient``, in the shape of this rank's part."""
        return self._run.travels(name, gradient.reshape(-1))[:PROBE]

    def _probed(self, segment: Segment) -> int:
        """Count the values at which a step of ``segment`` is probed: none of the padding, which a sign fills."""
        own_values = self._run.travels(segment.name, local(self._run.weights[segment.name]).reshape(-1))
        return min(own_values.numel(), segment.span, PROBE)

    def take_steps(self, step: Step) -> None:
        """Set w = (1 - lr decay) w - c for all parameters in ``step`` whose c has come.

        Raises:
            ThinwireError: something, such as ``torch.nn.utils.clip_grad_norm_``, scaled the previous step between the
                backward pass and the optimizer's step. (Raised one step late: the host does not wait for a device.)
        """
        self.refuse_scaled(before=step.number)
        values, changes, probes, expected = (list[Tensor]() for _ in range(4))
        decay_factors: list[float] = []

        def move(name: str, weight: Tensor, held: Holder) -> None:
            change, group = local(weight.grad), held.group  # type: ignore[arg-type]
            held.optimizer.state.pop(weight, None)  # from a dense start, or handed over: of no use here
            self._handed.discard(name)
            self._compare_rates(name, float(group["lr"]))
            if rests(group):
                return
            values.append(local(weight.detach()))
            changes.append(change)
            decay_factors.append(1 - float(group["lr"]) * group["weight_decay"])
            if (beginning := self._beginnings.pop(name, None)) is not None:
                expected.append(beginning)
                probes.append(self._beginning(name, change)[: len(beginning)])

        self._steps.take(step, self._run, move)
        take(values, changes, decay_factors)
        if probes:
            norms = torch.stack(torch._foreach_norm([*probes, *expected], dtype=torch.float32)).view(2, -1)
            self._note_norms(step.number, norms)

    def _compare_rates(self, name: str, rate: float) -> None:
        """Warn once if the step of ``name`` was not made with ``rate``, its lr now."""
        used = self._rates.get(name, rate)
        if used == rate or rate == 0 or self._warned:  # at 0 it rests
            return
        self._warned = True
        warnings.warn(
            f"{self._name}: the step of {name} was made in the backward pass, at the learning rate of then, {used:g}, "
            f"and not {rate:g}: set it before backward(), or after optimizer.step()", ThinwireWarning, stacklevel=2,
        )  # fmt: skip

    def _note_norms(self, step: int, norms: Tensor) -> None:
        """Send ``norms`` of ``step`` to the host, which compares them in a later step, after the guard's flag."""
        if not norms.is_meta:
            host = devices.host_memory(norms.shape, norms.device)
            self._norms.append((step, host.copy_(norms, non_blocking=True), devices.mark(norms.device)))

    def refuse_scaled(self, before: float = math.inf) -> None:
        """Raise ThinwireError if something scaled a step other than ``before``: see ``take_steps``."""
        while self._norms and self._norms[0][0] != before:
            _, norms, copied = self._norms.pop(0)
            if copied is not None:
                copied.synchronize()  # over, unless nobody has waited for the step's flag
            if any(abs(taken - came) > 0.01 * came for taken, came in zip(*norms.tolist(), strict=True)):
                raise ThinwireError(
                    f"{self._name}: after backward() .grad holds a step of the weights, not a gradient, and something "
                    "has scaled it: clip with wire.clip_grad_norm_, which leaves steps alone"
                )

    def end_step(self, step: Step) -> None:
        """Update r, and forget what was noted for the step."""
        assert not self._own_measures, "Road.end_pass() has not been called"
        if self._measured:
            new = self._ratio(sorted(self._measured))
            old = self._state.get("alike", "")
            self._state.put("alike", "", new if old is None else DECAY * old + (1 - DECAY) * new)
        self.forget()

    def forget(self) -> None:
        """Forget the step under way."""
        self._steps.names.clear()
        self._own_measures.clear()
        self._measured.clear()
        self._last_means = None
        self._beginnings.clear()
        self._factors = None

    def send_second(self, bucket: Bucket, exchange: Exchange) -> None:
        """Set ``bucket.mean`` to mean_n v_n: a dense exchange between two steps."""
        bucket.rows.copy_(self._state.read("second", bucket))
        exchange.mean(bucket)

    def hand_over(self, name: str, second: Tensor) -> None:
        """Give the optimizer ``second`` = mean_n v_n (or momentum), in the shape of this rank's part of ``name``."""
        if self._state.get(self._counter(name), name) is not None:
            self._handed.add(name)
            self._run.holders[name].optimizer.state[self._run.weights[name]] = self._moments(name, second)

    def moments_of(self, name: str) -> dict[str, Tensor] | None:
        """Make the optimizer's state of ``name`` from this rank's v_n or momentum; None: the optimizer has its own.

        Where this rank lacks some of v_n of its part, it is the state before the first step.
        """
        if self._state.get(self._counter(name), name) is None or name in self._handed:
            return None
        second, weight = self._state.get("second", name), local(self._run.weights[name])
        if second is None or self._run.chunk is not None:
            return self._moments(name, None)
        own_second = second[self._run.exchange.own_rows].reshape(-1)[: weight.numel()]
        return self._moments(name, own_second.view(weight.shape))

    def _moments(self, name: str, second: Tensor | None) -> dict[str, Tensor]:
        """Make the optimizer's state from ``second`` (v_n, or Muon's momentum); None: as before the first step."""
        weight, group = self._run.weights[name].detach(), self._run.holders[name].group
        if name in self.matrices:
            momentum = torch.zeros_like(weight)
            if second is not None:
                local(momentum).copy_(second)
            return {"momentum_buffer": momentum}
        steps, r = self._state.get("seen", name), self._state.get("alike", "")
        number = 0.0 if second is None or steps is None else float(steps)
        on_device = weight.device if group.get("capturable") or group.get("fused") else "cpu"
        moments = {
            "step": torch.tensor(number, dtype=torch.float32, device=on_device),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
        if second is not None:
            local(moments["exp_avg_sq"]).copy_(second if r is None else second * r)
        return moments

    def resting(self) -> list[str]:
        """The parameters whose steps have come while their lr is 0: they stay, and what waited goes on waiting."""
        return [name for name, held in self._run.holders.items() if name in self._steps.names and rests(held.group)]

    def power(self) -> Tensor | None:
        """Return r mean_n |g_n|^2, 0-dim, about the squared norm of the steps' mean gradient; None: no steps."""
        if not self._measured:
            return None
        names, r = sorted(self._measured), self._state.get("alike", "")
        r = self._ratio(names) if r is None else r
        return r * self._means(names)[1, :, SAMPLE].sum()

    def _first_ratio(self, bucket: Bucket) -> Tensor:
        """Make the r of steps before which none was measured."""
        return torch.full((), self._run.exchange.ranks**-0.5, dtype=torch.float32, device=bucket.device)

    def _ratio(self, names: Sequence[str]) -> Tensor:
        """Return r of ``names``, at most 1 and at least a fourth of what pure noise gives."""
        samples = self._means(names)[:, :, :SAMPLE]
        squares = samples.new_empty(len(names), 2)
        torch.sum(samples, 2, out=squares.T)
        above, below = squares.sum(0).unbind()
        return (above / below).nan_to_num(1.0, 1.0).clamp_(min=0.25 / self._run.exchange.ranks)

    def _means(self, names: Sequence[str]) -> Tensor:
        """Return what was measured of ``names``: (2, len(names), SAMPLE + 1)."""
        if self._last_means is not None and self._last_means[0] == names:
            return self._last_means[1]
        return torch.stack([self._measured[name] for name in names], 1)

    def cancel(self, names: Collection[str]) -> None:
        """Forget the steps of ``names``, which were thrown away."""
        for name in names:
            self._steps.names.discard(name)
            self._measured.pop(name, None)
            self._beginnings.pop(name, None)
        self._factors = None

    def _precondition(
        self, bucket: Bucket, values: Tensor, r: Tensor, samples: Samples | None, *, as_encoded: bool = False
    ) -> None:
        """Take ``samples`` of g in ``values`` (R, n), replace it by u, and write v'."""
        second, second_out = self._state.read("second", bucket), self._state.write("second", bucket)
        first = first_out = None
        if self._momentum:
            first, first_out = self._state.read("first", bucket), self._state.write("first", bucket)
        factors, holders = self._factors_on(bucket.device), self._run.holders if self.matrices else {}
        segments = bucket.once("directions", lambda: self._directions(bucket, factors), factors.knobs)
        as_encoded = as_encoded and first is None and len(segments) == len(bucket.segments)
        if not as_encoded:
            bucket.cut_outliers()
            if samples is not None:
                samples.take(values)
        for segment in bucket.segments:
            self._state.put(self._counter(segment.name), segment.name, factors.counts[segment.name])
            if segment.name in self.matrices:
                gradients, old, new = (tensor[:, segment.columns] for tensor in (values, second, second_out))
                group = holders[segment.name].group
                self._orthogonal.take(segment.name, group, gradients, old, new, segment.span)
        if as_encoded:
            bucket.adam = Adam(second, second_out, segments, factors.lrs, factors.unbias, r, samples, bucket.limit)
            bucket.limit = None
            return
        moments = second, second_out, first, first_out
        direction(values, *moments, segments, lr=factors.lrs, scale=factors.unbias, factor=r, beta1=self._momentum)

    def _directions(self, bucket: Bucket, factors: _Factors) -> tuple[DirectionSegment, ...]:
        """Say where in ``bucket`` the tensors lie that take Adam's step."""
        adams = (segment for segment in bucket.segments if segment.name not in self.matrices)
        return tuple(DirectionSegment(of.start, of.width, *factors.knobs[of.name]) for of in adams)

    def _factors_on(self, device: torch.device) -> _Factors:
        """Return the step's factors on ``device``, made as the first of its gradients come."""
        stream = devices.stream_key(device)
        if self._factors is None or self._factors.stream != stream or self._factors.lrs.device != device:
            self._factors = self._make_factors(device, stream)
        return self._factors

    def _make_factors(self, device: torch.device, stream: Any) -> _Factors:
        holders, matrices = self._run.holders, self.matrices
        adam = torch.optim.Adam, torch.optim.AdamW  # other optimizers' parameters are dense
        names = [name for name, held in holders.items() if name in matrices or isinstance(held.optimizer, adam)]
        none = torch.zeros((), dtype=torch.float32, device="cpu")
        found = [self._state.get(self._counter(name), name) for name in names]
        counts = torch.stack([none if count is None else count.cpu() for count in found]) + 1
        groups = {name: holders[name].group for name in names}
        betas = [0.0 if name in matrices else float(group["betas"][1]) for name, group in groups.items()]
        epses = [0.0 if name in matrices else float(group["eps"]) for name, group in groups.items()]
        self._rates = {name: float(group["lr"]) for name, group in groups.items()}
        lrs = torch.tensor([*self._rates.values()], dtype=torch.float64, device="cpu")
        lrs = (lrs * _unbias(self._momentum, counts)).float()
        unbias = _unbias(torch.tensor(betas, dtype=torch.float64, device="cpu"), counts)
        knobs = dict(zip(names, zip(range(len(names)), betas, epses, strict=True), strict=True))
        self._knobs = self._knobs if knobs == self._knobs else knobs
        numbers = upload([*lrs.tolist(), *unbias.tolist()], device, torch.float32).view(2, -1)
        return _Factors(stream, dict(zip(names, counts.unbind(), strict=True)), self._knobs, *numbers)

    def _counter(self, name: str) -> str:
        """Name the state that counts the gradients of ``name``: "turned" for Muon's, whose "second" is a momentum.

        So no saved state with second moments is taken for one with momenta: it lacks an entry.
        """
        return "turned" if name in self.matrices else "seen"

    def _measure(self, bucket: Bucket) -> Samples:
        """Note where this rank's part of mean_n g_n and mean_n g_n^2 at each tensor's sample will be, and |g_n|^2's."""
        positions = bucket.once("sampled", lambda: self._sample_positions(bucket))
        sums = bucket.buffer("samples", (2, len(bucket.segments) * (SAMPLE + 1)), torch.float32)
        pieces = sums.split(SAMPLE + 1, 1)
        self._own_measures.update(zip([of.name for of in bucket.segments], pieces, strict=True))
        columns, share = [of.columns for of in bucket.segments], 1 / self._run.exchange.ranks
        return Samples(positions, columns, bucket.norms, sums, share)

    def _sample_positions(self, bucket: Bucket) -> Tensor:
        """Draw where the samples lie in the bucket's flattened rows, (tensors * SAMPLE,); each tensor's in one row."""
        rows, n = bucket.shape
        positions = []
        for segment in bucket.segments:
            seed = seed_of(self._run.seed, segment.name)
            draw = torch.Generator().manual_seed(seed)
            columns = torch.randint(segment.span, (SAMPLE,), generator=draw, device="cpu")
            positions.append(columns + segment.start + seed % rows * n)
        return torch.cat(positions).to(bucket.device)


def move_moments(values: dict[str, Tensor], old: tuple[int, int], new: tuple[int, int]) -> None:
    """Change v and r in ``values``, a state by key, from those of a run on ``old`` ranks to those of one on ``new``.

    Of a signal s and a rank's noise n, v is s^2 + n^2 / k on nodes of k ranks, and r v is s^2 + n^2 / (k N): r and v
    tell s and n. (On one node they do not: then r is taken to become that of a first step.)

    Args:
        old, new: k, the ranks of which a node averages the gradients, and N, the nodes.
    """
    (former_inside, former_nodes), (inside, nodes) = old, new
    r = float(values.get("=alike/", former_nodes**-0.5))
    signal = (former_nodes * r - 1) / (former_nodes - 1) if former_nodes > 1 else 1 / (math.sqrt(nodes) + 1)
    signal = min(max(signal, 0.0), 1.0)
    noise = (1 - signal) * former_inside / inside
    for name in [key.removeprefix("=seen/") for key in values if key.startswith("=seen/")]:
        values[f"second/{name}"] *= signal + noise
    if "=alike/" in values:
        values["=alike/"] = torch.full_like(values["=alike/"], (signal + noise / nodes) / (signal + noise))


def rests(group: Mapping[str, Any]) -> bool:
    """Is the lr of an optimizer's ``group`` 0, as for frozen weights or at the end of a schedule?"""
    return float(group["lr"]) == 0


def _unbias(beta: Tensor | float, steps: Tensor) -> Tensor:
    """Return 1 / (1 - beta^steps), for averages that began with 0."""
    return (1 / (1 - beta ** steps.double())).float()

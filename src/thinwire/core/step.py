"""The loop of optimizer steps: which gradients are exchanged for a step, whether it counts, who has stepped.

    exchange (engine) -> before (the first optimizer of the step: one agreed flag) -> optimizers -> after (the last one)

This module handles every case beyond that line: several optimizers, a second exchange before the step, some or all
gradients thrown away in between (a GradScaler does that), a step without an exchange, a skipped step, an optimizer that
compress() was not told of, weights that were put back.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError, ThinwireWarning, name_exchange
from thinwire.core.engine import Engine, ModuleHook, all_zero
from thinwire.core.fingerprint import WeightWatch, count_writes
from thinwire.core.method import Run, Step, drop_waiting
from thinwire.core.optimizers import (
    UNSUITABLE_CLOSURE,
    drop_gradients,
    has_gradients,
    makes_state,
    parameters,
    replace_closure,
)
from thinwire.core.replica_check import ReplicaCheck, describe_start
from thinwire.core.road import Road, without_autocast
from thinwire.core.safety import Safety
from thinwire.core.scaler import ScalerWatch, back_off, scaler_above
from thinwire.core.state import State, next_exchange
from thinwire.core.watches import GradientWatch, ParameterWatch
from thinwire.network.comm import Comm, GroupComm, local

ENDED = "{what} after wire.close(): call compress() again, or wrap the model anew"
ALREADY = "compress() was already called on this {kind} model: close that wire first, with wire.close()"
_MISSED = (
    "{kind} did not step after the last exchange. If its gradients add up, all is well; but what {method} kept of them "
    "moves weights later, also if they are cleared (a GAN's generator passes through the discriminator): then wrap and "
    "compress() each network by itself, and freeze the other with requires_grad_(False) in that pass"
)
_MISSING = (
    "{name} has no gradient in this step, so DDP exchanged neither its bucket nor those after it: use the parameter "
    "in every step, freeze it before wrapping, or use fully_shard, which allows unused parameters"
)
_OWN = (
    "{name} got a gradient after this step's exchange that was not exchanged, so each rank has its own: DDP exchanges "
    "one backward pass after each forward pass, and none inside no_sync(). Add the losses and call backward() once, or "
    "put forward and backward pass of each loss into `with wire.accumulate(last=...)`, with last=True for the last one"
)
_MOVED = (
    ". Weights were written since that pass: if by its gradients (SAM's first pass), each rank has its own now. On DDP "
    "make such a pass inside model.no_sync(), where it is no step"
)


class StepLoop:
    """The loop of optimizer steps of one model.

    Attributes:
        skipped: steps skipped on all ranks, or by this one where ranks go their own ways.
        in_a_row: steps skipped since the last one that was taken, or since earlier weights were put back.
        step_was_skipped: the last optimizer step was skipped by all ranks that take it together.
        norm, clip_factor: of the averaged gradients, 0-dim, once the user has clipped them in this step.
        closed: no exchange is due now: micro-batches are being accumulated.
        parameter_watch, gradient_watch, weight_watch, scaler_watch: notice what others do to these.
        ended: there will be no more steps.
    """

    def __init__(
        self, engine: Engine, run: Run, road: Road, safety: Safety, scaler: torch.amp.GradScaler | None
    ) -> None:
        """``scaler``: the one of which compress() was told, if any."""
        last = road.last
        self.engine, self.road, self.method = engine, road, last.method
        self.optimizers, self.weights = run.optimizers, run.weights
        self.guard, self.bound, self.ledger = last.guard, last.bound, last.ledger
        self.state: State = self.method.state
        self.skipped = 0
        self._max_skipped, self.in_a_row = safety.max_skipped, 0
        every = safety.check_every
        comm = last.exchange.comm
        # Elastic replicas may be lost in a comparison, and one that joins gets the weights of the others.
        fixed = isinstance(comm, GroupComm) and not comm.elastic
        self._replica_check = ReplicaCheck(engine, road, self.weights, every) if fixed else None
        self.clip: tuple[Tensor, Tensor] | None = None  # norm and factor of the last one, if of all gradients
        self.clip_factor: Tensor | None = None
        self.closed = self.ended = self.step_was_skipped = False
        self._hooks: dict[torch.optim.Optimizer, int] = {}  # ``before``'s numbers among the optimizers' own
        self._inside_before = 0  # how deep: a replica that joins takes counted steps again there
        self._late_closure = ""  # the optimizer whose closure runs although gradients have been exchanged before it
        self._exchanged: dict[str, None] = {}  # parameters exchanged since the last step, in order
        self._own: dict[str, None] = {}  # of them, those whose gradient another pass has changed since, on this rank
        self._writes = 0  # of the weights, before the step under way
        self._open: Step | None = None  # begun by one optimizer; others are to follow
        self._part: Step | None = None  # of it, which an optimizer is taking
        self._waiting: set[int] = set()  # optimizers that are to follow; if no step is open: in skipping the last one
        self._untold: list[int] = []  # numbers of skipped steps of which the method does not know yet
        self._warned = self._warned_of_missing = False
        dense = last.dense if self.method.card.keeps_state else self.weights  # for which nothing waits
        watched = [weight for name, weight in self.weights.items() if name not in dense]
        self.parameter_watch = ParameterWatch(engine, run)
        self.gradient_watch = GradientWatch(self.method.card.step_maker, run)
        self.scaler_watch = ScalerWatch(scaler, self.method, run)
        self.weight_watch = WeightWatch(self.method.name, watched, functools.partial(drop_waiting, self.method))

    def attach(self) -> list[RemovableHandle]:
        """Hook into the optimizers: the last hook before an optimizer's own step, and the first one after it.

        Where ranks step alone, hook into the model, too: a step that one of them drops may end a round, which changes
        the weights before the next forward pass.
        """
        handles: list[RemovableHandle] = []
        for optimizer in self.optimizers:
            before, after = optimizer.register_step_pre_hook(self.before), optimizer.register_step_post_hook(self.after)
            hooks = optimizer._optimizer_step_post_hooks
            for number in [number for number in hooks if number != after.id]:
                hooks[number] = hooks.pop(number)
            self._hooks[optimizer] = before.id
            handles += [before, after]
        if self.method.card.alone_from is not None:
            handles.append(self.engine.model.register_forward_pre_hook(ModuleHook(self.before_forward), prepend=True))
        return handles

    def _come_last(self) -> None:
        """Let ``before`` come after the hooks that the user has made since, unless torch is walking through them."""
        if self._inside_before:
            return
        for optimizer, number in self._hooks.items():
            hooks = optimizer._optimizer_step_pre_hooks
            if number in hooks and next(reversed(hooks)) != number:
                hooks[number] = hooks.pop(number)

    # Calls from the engines.

    def enter(self, names: Sequence[str]) -> None:
        """Begin to exchange the gradients of ``names``. Collective, in the same order on all ranks."""
        if self.ended:
            raise ThinwireError(ENDED.format(what="gradients were exchanged"))
        if self.closed:
            raise ThinwireError(
                "gradients were exchanged inside accumulate(last=False): with a pipeline, give all micro-batches of an "
                "optimizer step to one schedule.step()"
            )
        self.parameter_watch.check_names(names)
        if names:
            devices.refuse_capture(self.weights[names[0]].device)
        self.compare_start()
        if not self._exchanged and self._open is None and self.road.step > 0:
            self.weight_watch.look(alone=self._alone or not self.method.rank_equal)
        self._leave()
        self._come_last()
        repeated = next((name for name in names if name in self._exchanged), None)
        if self._exchanged and self.engine.dropped(self.exchanged(), look=repeated is not None, comms=self._deciding):
            # A backward pass needs the weights that a round would change.
            self._abandon(later=self._alone and torch._C._current_graph_task_id() != -1)
        elif repeated is not None and self._late_closure:
            raise ThinwireError(UNSUITABLE_CLOSURE.format(kind=self._late_closure))
        elif repeated is not None:
            self._again(repeated)
        if self._replica_check is not None:
            self._replica_check.look_at_names(self.number, names, alone=self._alone)
        if not self._exchanged:
            self._writes = count_writes(self.weights.values()) if self._alone else 0
            self.parameter_watch.exchange_begins()
            self.scaler_watch.exchange_begins(self._device)
            if self.gradient_watch.active and torch._C._current_graph_task_id() != -1:
                at_end = torch.autograd.Variable._execution_engine.queue_callback
                at_end(lambda: at_end(self.gradient_watch.note))  # behind the engine's own last callback
        self._waiting.clear()
        self.clip = self.clip_factor = None
        self._exchanged.update(dict.fromkeys(names))
        for name in names if self._own else ():
            self._own.pop(name, None)

    def note_gradient(self, name: str) -> None:
        """Note that a backward pass has added to the gradient of ``name``; ``enter`` follows if it is exchanged."""
        if name in self._exchanged:
            self._own[name] = None

    def compare_start(self, *, gathers: bool = False) -> None:
        """Compare with all ranks from which step they go on, if none has exchanged anything since a load. Collective.

        ``gathers``: with those alone that gather weights with this rank, as a node may evaluate by itself.

        Raises:
            ThinwireError: they have loaded states of unlike steps, or some have loaded none.
        """
        if self._replica_check is None or self._replica_check.start_is_compared(gathers=gathers):
            return
        alone = self.method.card.alone_from is not None
        start = describe_start(self.road.step, self.skipped, self.road.last.flush_at, alone=alone)
        with self.inside("the comparison of the steps from which ranks go on (all must load, or none)"):
            self._replica_check.compare_start(start, gathers=gathers)

    def warn_of_writes(self) -> None:
        """Warn once if others have written gradients that hold steps of the weights, before an optimizer steps."""
        if self._open is None:
            self.gradient_watch.warn()

    @property
    def number(self) -> int:
        """The number of the optimizer step under way, from 1; skipped ones count."""
        return self.road.step + self.skipped + 1

    def exchanging(self, payload: str, names: Iterable[str]) -> AbstractContextManager[None]:
        """Name the exchange of ``payload`` of the parameters ``names`` in the error of a rank lost inside."""
        return name_exchange(self.number, lambda: f"the exchange of {payload} of {_some(list(names))}")

    def inside(self, call: str) -> AbstractContextManager[None]:
        """Name the user's ``call``, which all ranks make, in the error of a rank lost inside."""
        return name_exchange(self.number, lambda: call)

    @property
    def open(self) -> bool:
        """Have some optimizers stepped, and others not yet?"""
        return self._open is not None

    @property
    def left_out(self) -> bool:
        """Did a GradScaler leave out the step of the last exchange?"""
        return bool(self._exchanged) and self._open is None and self.scaler_watch.left_out(self.engine)

    def seen(self, name: str) -> bool:
        """Has the parameter been exchanged since the last step?"""
        return name in self._exchanged

    def name_of(self, weight: Tensor) -> str | None:
        """Name ``weight`` if it is a trained parameter."""
        return self.parameter_watch.name_of(weight)

    def exchanged(self) -> list[Tensor]:
        """Return the parameters exchanged since the last step."""
        return [self.weights[name] for name in self._exchanged]

    @torch._disable_dynamo
    def before_forward(self) -> None:
        """Learn before the model's forward pass whether this rank, which steps alone, has dropped or ended a step."""
        if self._alone and torch._C._current_graph_task_id() == -1:
            if not any(has_gradients(optimizer) for optimizer in self.optimizers if id(optimizer) in self._waiting):
                self._leave()  # not in the backward pass, which needs the weights that a round would change
            self.look_for_dropped(self._inside)

    def begin_micro_batch(self) -> None:
        """Begin the forward and backward pass of a micro-batch."""
        if self.ended:  # only the last micro-batch exchanges, so no later check would raise for the others
            raise ThinwireError(ENDED.format(what="a micro-batch begins"))
        self._leave()
        self.look_for_dropped(self._deciding)

    def look_for_dropped(self, comms: Sequence[Comm] | None) -> None:
        """Skip the step under way if its exchanged gradients were thrown away. Collective over ``comms`` (None: all),
        and over all if that ends a round."""
        self._tell()
        if self._exchanged and self._open is None and self.engine.emptied(comms):
            self._abandon()

    def finish(self) -> None:
        """End a step that some optimizer, a GradScaler, or a rank that steps alone has left out, before it is saved.

        Raises:
            ThinwireError: that optimizer holds what the method has already taken out of its state.
        """
        self._leave()
        if self.scaler_watch.scaler is not None and self.left_out:
            self._abandon()
        if self._alone:
            self.look_for_dropped(self._inside)

    def close(self) -> None:
        """Let no further step begin. What an optimizer has not joined is dropped, if it may be no gradient."""
        try:
            if self._alone and not self.ended:
                self.look_for_dropped(())  # after an error this rank may be the only one here
        finally:
            self.ended = True
        for optimizer in self.optimizers:
            if self._open is not None and id(optimizer) in self._waiting and not self.method.card.adds_up:
                drop_gradients(optimizer)

    def stranger(self, optimizer: torch.optim.Optimizer) -> None:
        """Check any ``optimizer`` of this process before it steps: see ``ParameterWatch.check_optimizer``."""
        if not self.ended:
            self.parameter_watch.check_optimizer(optimizer)

    def counts(self) -> dict[str, Tensor]:
        """Return what a state holds beside the method's: counts of steps, int64, 0-dim, and the bound's values."""
        flush = self.road.step if self.road.last.flush_at == self.road.step else -1
        counts = {"step": self.road.step, "skipped": self.skipped, "flush": flush}
        bound = {} if self.bound is None else self.bound.state_dict()
        tensors = {key: torch.tensor(count, device="cpu") for key, count in counts.items()}
        return tensors | {f"bound/{key}": value for key, value in bound.items()}

    def take_counts(self, counts: Mapping[str, Tensor]) -> None:
        """Go on from what ``counts`` returned."""
        self.road.step, self.skipped, flush = (int(counts[key]) for key in ("step", "skipped", "flush"))
        self.road.last.flush_at = None if flush < 0 else flush
        if self.bound is not None:
            self.bound.load_state_dict({key.removeprefix("bound/"): value for key, value in counts.items()})

    def reset(self) -> None:
        """Forget the step under way, and how many were skipped before it, as another state is to be loaded."""
        self.in_a_row = 0
        self.weight_watch.trust()
        if self._replica_check is not None:
            self._replica_check.begin()
        self.guard.forget()
        self.state.rollback()
        self.method.undo()
        self._untold.clear()
        self._forget()

    def _leave(self) -> None:
        """Leave the step under way, as the next one begins: an optimizer that has not stepped misses it."""
        if self._open is None:
            return
        card, missing = self.method.card, [o for o in self.optimizers if id(o) in self._waiting]
        if missing and not card.adds_up:
            raise ThinwireError(
                f"{type(missing[0]).__name__} did not step after the last exchange, but {self.method.name} has updated "
                "its momentum or Adam's moments in that step: step all optimizers after each exchange"
            )
        exchanged = [o for o in missing if any(self.name_of(weight) in self._exchanged for weight in parameters(o))]
        if exchanged and card.keeps_state and card.promise.of == "gradients" and not self._warned_of_missing:
            self._warned_of_missing = True
            line = _MISSED.format(kind=type(exchanged[0]).__name__, method=self.method.name)
            warnings.warn(line, ThinwireWarning, stacklevel=2)
        self._finish()

    def _again(self, name: str) -> None:
        """Allow or refuse a second exchange of ``name`` in one step."""
        advice = (
            f"{name} is exchanged a second time before optimizer.step(): put every backward pass of a step but the "
            "last into `with wire.accumulate(last=False):`"
        )
        if not self.method.card.adds_up:
            raise ThinwireError(
                f"{self.method.name}: {advice}, or shard a module that runs twice together with its parent, "
                f"and tie weights before fully_shard; {self.method.name} keeps a momentum or Adam's moments, which "
                "would be updated twice"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{advice}, or each of them sends as many bytes as a whole step", ThinwireWarning, stacklevel=2
            )
        next_exchange(self.state)
        self._exchanged.clear()

    def exchange(self) -> None:
        """Exchange what the engine keeps until gradients are clipped or an optimizer steps. Collective."""
        self._tell()
        self.engine.exchange()

    # Calls from the optimizers' hooks. Within torch.compile(optimizer.step) Dynamo would trace them, and fail.
    # (torch.compiler.disable would import Dynamo with this module; torch's own form does with the first optimizer.)

    @torch._disable_dynamo
    def before(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Prepare a step of ``optimizer``. The first optimizer agrees with all ranks on whether the step counts.

        Where each rank goes its own way (``Card.alone``) it agrees only with those that hold the same replica.

        Run a closure here, before the check of the gradients that it makes, and return the arguments that ``step`` gets
        in place of ``args`` and ``kwargs``; without a closure return None.
        """
        self._inside_before += 1
        try:
            return self._prepare(optimizer, args, kwargs)
        finally:
            self._inside_before, self._late_closure = self._inside_before - 1, ""

    def _prepare(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if torch._C._current_graph_task_id() != -1:
            raise ThinwireError(
                f"{type(optimizer).__name__} steps inside a backward pass, before its gradients are exchanged: call "
                "optimizer.step() after backward(), not from register_post_accumulate_grad_hook()"
            )
        closure = next((value for value in (*args[1:], *kwargs.values()) if callable(value)), None)
        if closure is None:
            self._check(optimizer)
            return None
        self._late_closure = type(optimizer).__name__ if self._exchanged else ""
        with torch.enable_grad():
            loss = closure()
        self._check(optimizer)
        final = next(reversed(optimizer._optimizer_step_pre_hooks)) == self._hooks[optimizer]
        return replace_closure(closure, loss, optimizer, (args, kwargs), weights_are_final=final)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check whether the step counts; if not, drop the gradients of ``optimizer``."""
        if not self._exchanged and self._open is None and makes_state(optimizer):
            return
        self.scaler_watch.step_begins(optimizer)
        if self._open is None and id(optimizer) not in self._waiting:
            self.exchange()
        idle = not has_gradients(optimizer) and not self.engine.accumulated()
        if not self._exchanged and self._open is None and idle:
            return  # the others have stepped already, and this one has nothing to do
        if self._open is None and (id(optimizer) in self._waiting or not self._begin(optimizer)):
            drop_gradients(optimizer)
            self._waiting.discard(id(optimizer))
            return
        if id(optimizer) not in self._waiting and has_gradients(optimizer):
            raise ThinwireError(
                f"{type(optimizer).__name__} steps a second time after one exchange of gradients: each step needs a "
                "backward pass of its own"
            )
        if (reason := self._unexchanged(parameters(optimizer))) is not None:  # since another optimizer has stepped
            raise ThinwireError(reason)
        # Of this optimizer if its step has raised an error, and is taken again.
        former = self._part if self._part is not None and self._part.optimizers == (optimizer,) else None
        self.engine.stepping(retry=former is not None)
        assert self._open is not None
        named = ((self.name_of(weight), weight) for weight in parameters(optimizer))
        weights = {name: weight for name, weight in named if name is not None}
        hidden = [] if former is None else former.put_back
        self._part = replace(self._open, optimizers=(optimizer,), weights=weights, put_back=hidden)
        with self.inside("optimizer.step()"):
            self.method.before_step(self._part)  # which may step parameters in the optimizer's place

    @torch._disable_dynamo
    def after(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Note that ``optimizer`` has stepped. After the last one of a step, call ``Method.after_step``."""
        part, self._part = self._part, None
        if part is not None:
            part.restore()
        self._come_last()
        if self._open is not None:
            self.engine.stepped()
            self._waiting.discard(id(optimizer))
            if not self._waiting:
                self._finish()
                self.engine.send_weights(self.road.step)

    def _begin(self, optimizer: torch.optim.Optimizer) -> bool:
        """Agree with all ranks that take the step whether it counts, before any optimizer or state changes."""
        if self.engine.cut_short():  # no agreement: the other ranks may be waiting for this one in the exchange
            missing = _MISSING.format(name=self.engine.missing() or "a parameter")
            raise ThinwireError(self.parameter_watch.changed() or missing)
        if self._replica_check is not None:
            self._replica_check.look_at_names(self.number, (), alone=self._alone)
        trouble = None if self.engine.void else self._trouble()
        self.guard.observe_all(self.engine.gradients() if self.clip is None else self.clip)
        with self.inside("optimizer.step()"):
            finite, somewhere = self.engine.agree(self.guard, self._device, trouble is not None, self._deciding)
        if somewhere:
            raise ThinwireError(trouble or "another rank cannot take this step: see its message")
        if not finite:
            number, overflowed = self.number, not self.engine.void
            self.in_a_row += overflowed
            diverged = None if self.in_a_row != self._max_skipped else self._diverged(number)
            self._skip()
            self._look(number)
            if (scaler := scaler_above()) is None:  # it wants to see the gradients of each optimizer
                for stopped_optimizer in self.optimizers:
                    drop_gradients(stopped_optimizer)
            elif overflowed:
                back_off(scaler, optimizer)
            self._waiting = {id(optimizer) for optimizer in self.optimizers if has_gradients(optimizer)}
            if diverged is not None:
                raise ThinwireError(diverged)
            return False
        self.step_was_skipped = False
        self.warn_of_writes()
        self._cancel()
        self._commit()
        self._waiting = {id(optimizer) for optimizer in self.optimizers if has_gradients(optimizer)}
        self._open = self._step()
        return True

    def _cancel(self) -> None:
        """Roll back parameters whose gradient was thrown away after its exchange; resting ones keep waiting values."""
        if self._alone:
            return
        step_maker = self.method.card.step_maker
        cancelled = [name for name in self._exchanged if self.weights[name].grad is None]
        if cancelled:
            self.state.rollback(cancelled)
            if step_maker is not None:
                step_maker.cancel(cancelled)
            if self.bound is not None:
                self.bound.rollback(cancelled)
        if step_maker is not None and (resting := step_maker.resting()):
            self.state.rollback(resting, kinds=self.method.card.promise.waits)

    def _step(self) -> Step:
        around, number = functools.partial(self.engine.attempt, self.road), self.road.step
        return Step(
            number, self.optimizers, self.weights, self.clip_factor, self._agree, around,
            lambda values: self._agree(values, self._inside), lambda: self.engine.void,
        )  # fmt: skip

    def _agree(self, values: Iterable[Tensor], comms: Sequence[Comm] | None = None) -> bool:
        """Agree, for a method, whether all ``values`` are finite on all ranks, or on those of ``comms``."""
        self.guard.observe_all(values)
        return self.engine.agree(self.guard, self._device, False, comms)[0]

    @property
    def _inside(self) -> list[Comm]:
        """The groups of ranks that hold this replica together."""
        return [comm for comm in self.guard.comms if comm is not self.road.last.exchange.comm]

    @property
    def _alone(self) -> bool:
        """Does each rank (HSDP: each node) go its own way in the step under way?"""
        return self.method.card.alone(self.road.step)

    @property
    def _deciding(self) -> list[Comm] | None:
        """The groups of ranks that decide together whether the step under way counts; None: all."""
        return self._inside if self._alone else None

    @property
    def _device(self) -> torch.device:
        return next(iter(self.weights.values())).device

    def _finish(self) -> None:
        assert self._open is not None
        autocast = without_autocast(self._device.type)  # some step inside it: a round would lose bits there
        with self.inside("optimizer.step()"), autocast, self.engine.after_vote():
            self.method.after_step(self._open)
        number = self.number
        self._commit()
        self.road.step += 1
        self.in_a_row = 0
        self.ledger.close_step(skipped=False)
        self._forget()
        self.weight_watch.step_is_over()
        self._look(number)

    def _look(self, number: int) -> None:
        """Compare replicas after step ``number``."""
        if self._replica_check is not None:
            with name_exchange(number, lambda: "the comparison of replicas"):
                groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
                rates = () if self.step_was_skipped else (group.get("lr", 1.0) for group in groups)
                self._replica_check.look(number, rates)

    def _diverged(self, number: int) -> str:
        """Explain why training cannot go on. The gradients must still be there."""
        begun = number - self.in_a_row + 1
        named = [(f"the weights {name}", weight) for name, weight in self.weights.items()]
        named += [(f"the gradient of {name}", weight.grad) for name, weight in self.weights.items()
                  if weight.grad is not None]  # fmt: skip
        not_finite = (label for label, values in named if not bool(local(values).isfinite().all()))
        culprit = next((f" ({label} among them)" for label in not_finite), "")
        return (
            f"{self.in_a_row} steps in a row were skipped, from step {begun} on, because of values that are not "
            f"finite{culprit}: go back to a checkpoint before step {begun}, with a lower learning rate; "
            "Safety(max_skipped=...) sets how many are too many"
        )

    def _skip(self, *, later: bool = False) -> None:
        """Skip a step, without counting it for the method. ``later``: do not tell the method now."""
        # Where ranks go their own ways the others have stepped, and so do all schedules.
        self.step_was_skipped = not self._alone
        self.state.rollback()
        if self.bound is not None:
            self.bound.rollback()
        self.method.undo()
        self._untold.append(self.number)
        if not later:
            self._tell()
        self.skipped += 1
        self.ledger.close_step(skipped=True)
        self._forget()

    def _tell(self) -> None:
        """Tell the method of skipped steps. It may end a round with one: collective, and it changes weights."""
        while self._untold:
            number = self._untold.pop(0)
            with self.guard.aside(), without_autocast(self._device.type), self.inside("the end of a skipped step"):
                self.method.after_skip(self._step())
            self._commit()
            if self._alone:
                self.weight_watch.step_is_over()
                self._look(number)
                self._writes = count_writes(self.weights.values())

    def _abandon(self, *, later: bool = False) -> None:
        """Skip a step whose exchanged gradients were thrown away."""
        if self._alone:
            moved = count_writes(self.weights.values()) != self._writes
            warnings.warn(
                f"{self.method.name}: gradients were thrown away after backward(): they count as a skipped step of "
                "this rank's round. If backward() only passes through this model (a GAN's discriminator), let it make "
                "none: requires_grad_(False) on its parameters meanwhile" + _MOVED * moved,
                ThinwireWarning, stacklevel=2,
            )  # fmt: skip
        self.guard.forget()
        self._skip(later=later)

    def _forget(self) -> None:
        self._exchanged.clear()
        self._own.clear()
        self._waiting.clear()
        self._open = self._part = self.clip = self.clip_factor = None
        self.gradient_watch.step_is_over()
        self.scaler_watch.step_is_over()
        self.engine.end_step()

    def _commit(self) -> None:
        self.state.commit()
        if self.bound is not None:
            self.bound.commit()

    def _trouble(self) -> str | None:
        """Explain why this rank cannot step; None if it can."""
        has_gradients = any(gradient is not None for gradient in self.engine.gradients()) or self.engine.accumulated()
        if has_gradients and not self._exchanged and self.engine.exchanges:
            missing = self.engine.missing()
            if (changed := self.parameter_watch.changed()) is not None:
                return changed
            return (
                "optimizer.step() was called before gradients were exchanged, so each rank has its own: the last "
                "backward pass of a step must come after compress(), go through the model that it got (not the module "
                "inside), and not be inside no_sync() or accumulate(last=False)"
                + (f"; and {_MISSING.format(name=missing)}" if missing else "")
            )
        return self.engine.missed() or self.parameter_watch.unserved() or self._unexchanged(self.weights.values())

    def _unexchanged(self, weights: Iterable[Tensor]) -> str | None:
        """Explain that this rank alone has the gradient of one of ``weights``, which all have exchanged before; None if
        there is none, or if each rank shall go its own way."""
        if not self._own or self._alone or not self.method.rank_equal:
            return None
        own = {name: weight.grad for weight in weights if (name := self.name_of(weight)) in self._own}
        return None if all_zero(own.values()) else _OWN.format(name=next(name for name in own if own[name] is not None))


def fault_of_counts(values: Mapping[str, Tensor]) -> str:
    """Name which of a state's counts of steps cannot be one; "" if all can."""
    least = {"step": 0, "skipped": 0, "flush": -1}
    return next((f"{key}={int(values[key])}" for key, of in least.items() if not of <= int(values[key]) < 2**40), "")


def split_counts(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take what ``StepLoop.counts`` returned out of a state's ``values``."""
    return {key: values.pop(key) for key in list(values) if key.startswith("bound/") or "/" not in key}


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def serves(optimizer: torch.optim.Optimizer) -> bool:
    """Is ``optimizer`` in the hands of a wire that is not closed?"""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), StepLoop) for hook in hooks)

"""Times the kernels of methods on a device, by the names that a recording gives them.

A method's own steps are played on real tensors, over two ranks of which the other sends what this one does. Values are
random, because a choice of the largest values or the peeling of a sketch takes longer for some than for others.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Layout
from thinwire.core.method import Run
from thinwire.methods import resolve
from thinwire.network.comm import GroupComm
from thinwire.network.guard import Guard
from thinwire.ops.backends import timer
from thinwire.plan.dry_run import Playback, steps_of
from thinwire.predict.cluster import Kernel
from thinwire.predict.launches import is_free, name_of, own_bytes, torch_bytes
from thinwire.predict.layouts import virtual_of
from thinwire.predict.links import agree, fit_line
from thinwire.predict.record import GuardedStage

VALUES = 1 << 24
"""Most values of a buffer that is played."""

SHORT = 1 << 16
"""Bytes of a launch, below which a kernel shows no rate."""
SPREAD = 3.0
"""Largest by smallest launch, below which seconds per launch cannot be told from seconds per byte."""

Times = dict[str, list[tuple[float, float]]]
"""Bytes and seconds of each launch, by the kernel's name."""


class KernelTimer(TorchDispatchMode):
    """Times every kernel that is launched while it is on, one at a time; torch's inside one of ours are part of it.

    The first launch of each name, which may compile it, does not count.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.times: Times = {}
        self._device, self._in_kernel = device, False

    def __enter__(self) -> KernelTimer:
        self._token = timer.set(self._own)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        timer.reset(self._token)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if is_free(function):
            return function(*args, **kwargs)
        return self.run(
            name_of(function), lambda: function(*args, **kwargs),
            lambda result: torch_bytes(function, args, kwargs, result),
        )  # fmt: skip

    def _own(self, name: str, operation: Callable[..., Any], *args: Any) -> Any:
        return self.run(name, lambda: operation(*args), lambda result: own_bytes(name, args))

    def run(self, name: str, call: Callable[[], Any], nbytes: Callable[[Any], float]) -> Any:
        """Call a kernel, and note its bytes and seconds."""
        if self._in_kernel:
            return call()
        devices.wait(self._device)
        self._in_kernel, began = True, time.perf_counter()
        try:
            result = call()
            devices.wait(self._device)
            seconds = time.perf_counter() - began
            if name in self.times:
                self.times[name].append((nbytes(result), seconds))
            else:
                self.times[name] = []
        finally:
            self._in_kernel = False
        return result


def time_kernels(model: nn.Module, method: str, engine: str, device: torch.device) -> Times:
    """Play ``method``'s steady state on ``device`` with the smallest and the largest buffer of ``model``.

    Raises:
        ThinwireError: the method refuses the engine or the model. NotImplementedError: it reads values.
    """
    try:
        return _play(model, method, engine, device, ranks=2)
    except ThinwireError:  # the other rank has other values in its masks than it sends
        return _play(model, method, engine, device, ranks=1)


def time_each(
    job: GroupComm, model: nn.Module, methods: Sequence[str], engine: str, seconds: float
) -> tuple[list[Times], Sequence[str]]:
    """Time the kernels of ``methods`` in order, until ``seconds`` are over. Collective.

    Returns:
        The times, without those of methods that are refused (a prediction says why), and the methods that were left.
    """
    times, began = list[Times](), time.monotonic()
    for number, method in enumerate(methods):
        if agree(job, time.monotonic() - began) >= seconds:
            return times, methods[number:]
        with suppress(ThinwireError, NotImplementedError):
            times.append(time_kernels(model, method, engine, job.device))
    return times, ()


def _play(model: nn.Module, method: str, engine: str, device: torch.device, ranks: int) -> Times:
    resolved = resolve(method)
    virtual = virtual_of(model, resolved, engine=engine, nodes=ranks, per_node=1, gloo=device.type == "cpu")
    road, run = virtual.road(resolved, intra=None, steps=10_000)
    layout, run = _some(virtual.layout, run)
    play, kernels = Playback(layout, road, run, device, stage=GuardedStage), KernelTimer(device)
    with torch.no_grad():
        longest = max(len(flat) for flat, _, _ in play.buffers)
        own = torch.Generator(device).manual_seed(0)  # the run's random numbers stay as they are
        _fill(play, noise := torch.randn(longest, generator=own, dtype=torch.float32, device=device))
        play.open()
        for number in steps_of(play.method.card):
            on = kernels if number > play.method.card.steady else nullcontext()
            for flat, _, _ in play.buffers:
                flat.copy_(noise[: len(flat)])
            with on:
                play.gather(number)
                play.exchange(number)
            _hand_out(play)
            with on:
                play.end_pass()
                Guard([]).observe_all(weight.grad for weight in play.weights.values())
                play.step(number)
        with kernels:
            for flat, _, _ in (*play.buffers, *play.buffers):
                _copy(flat, kernels)
    return kernels.times


def _fill(play: Playback, noise: Tensor) -> None:
    for weight in (*play.weights.values(), *play.gradients.values()):
        weight.copy_(noise[: weight.numel()].view_as(weight))
    for optimizer in play.optimizers:
        for moments in optimizer.state.values():
            for moment in moments.values():
                moment.fill_(1.0)


def _copy(flat: Tensor, kernels: KernelTimer) -> None:
    """Time the engine's own copies of a buffer."""
    target = torch.empty_like(flat)
    for name in ("engine.copy_in", "engine.copy_out"):
        kernels.run(name, lambda: target.copy_(flat), lambda result: 2 * flat.nbytes)


def _hand_out(play: Playback) -> None:
    """Let the gradients be what the exchange has left in the buffers, as an engine does."""
    for _, out, pieces in play.buffers:
        for piece in pieces:
            gradient = play.gradients[piece.name]
            gradient.copy_(out[piece.offset : piece.offset + gradient.numel()].view_as(gradient))


def _some(layout: Layout, run: Run) -> tuple[Layout, Run]:
    """Choose two buffers that are not too large, with their parameters, and a shard."""
    sizes = [sum(piece.numel for piece in pieces) for pieces in layout.buffers]
    fits = sorted((i for i, size in enumerate(sizes) if size <= VALUES), key=lambda i: sizes[i]) or [
        sizes.index(min(sizes))
    ]
    chosen = sorted({fits[0], fits[-1]})
    names = {piece.name for i in chosen for piece in layout.buffers[i]}
    shards = [shard for shard in layout.shards if names.issuperset(piece.name for piece in shard.pieces)]
    layout = replace(
        layout, buffers=[layout.buffers[i] for i in chosen], dtypes=[layout.dtypes[i] for i in chosen], shards=shards
    )
    return layout, replace(
        run,
        parameters={name: run.parameters[name] for name in names},
        weights={name: run.weights[name] for name in names},
    )


def kernels_of(times: Iterable[Times], memory_rate: float) -> dict[str, Kernel]:
    """Fit seconds per launch and bytes/s to each kernel; one too short to show a rate has the memory's."""
    joined: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for of_method in times:
        for name, launches in of_method.items():
            for nbytes, seconds in launches:
                joined[name][nbytes].append(seconds)
    kernels = {}
    for name, by_size in joined.items():
        medians = {nbytes: statistics.median(seconds) for nbytes, seconds in by_size.items()}
        if max(medians) < SHORT:
            kernels[name] = Kernel(statistics.median(medians.values()), memory_rate)
            continue
        several = max(medians) > SPREAD * min(medians)
        seconds, slope = fit_line([float(several)] * len(medians), list(medians), list(medians.values()))
        kernels[name] = Kernel(seconds, 1 / slope if slope > 0 else memory_rate)
    return kernels

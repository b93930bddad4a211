"""A GPU's streams on a machine without one: who may run beside whom, and who touches which bytes.

torch's stand-ins for streams and events of the CPU become vector clocks: a stream's clock says which work of all others
is over before its own next. A dispatch mode sees which bytes each operation reads and writes, and on which stream; the
collectives of a process group on which everybody says what this rank says tell it, too. Two accesses to the same bytes,
one of them a write, of which neither is known to be over before the other begins, are a race; so is memory that is
given away while another stream still uses it. The host is a stream, too: it alone works on memory of its own, and
whatever it enqueues comes after what it has waited for.

The host code of Triton's kernels runs, with a stand-in for Triton: every launch tells which tensors it was handed, and
its source which of these it writes to. What it would compute, the reference computes, unseen.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import dry_cuda
from kernel_access import written as written_by
from thinwire.base import device as devices
from thinwire.engines import ddp
from thinwire.ops import backends, programs
from thinwire.ops.moments import Moments

VIEWS = (
    "view", "as_strided", "slice", "select", "split.", "unsqueeze", "expand", "detach", "alias", "t.", "transpose",
    "permute", "unflatten", "unbind", "squeeze", "_unsafe_view", "split_with_sizes.", "chunk", "_reshape_alias",
    "lift_fresh", "diagonal", "set_", "record_stream", "_wrap_tensor_autograd",
)  # fmt: skip
EMPTY = ("empty", "new_empty", "resize_")
WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select")
"""Operations whose result the host reads."""
READ_BY_HOST = ("tolist", "item", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__", "__iter__")
"""Functions of a tensor whose values are on the host when they return."""
KEPT = 64
"""Accesses remembered of each storage."""


class Stream:
    def __init__(self, device: object = None, priority: int = 0, name: str = "") -> None:
        World.now.streams += 1
        self.name, self.clock = name or f"stream {World.now.streams}", {}
        if not name:
            World.now.priorities[World.place()[0]] = priority

    def __repr__(self) -> str:
        return self.name

    def merge(self, clock: dict[Stream, int]) -> None:
        for stream, count in clock.items():
            if self.clock.get(stream, 0) < count:
                self.clock[stream] = count

    def wait_stream(self, other: Stream) -> None:
        if World.now.heeds("wait_stream"):
            self.merge(other.clock)

    def wait_event(self, event: Event | None) -> None:
        if event is not None and World.now.heeds("wait_event"):
            self.merge(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        if World.now.heeds("synchronize"):
            World.now.host.merge(self.clock)


class Event:
    def __init__(self, *args: object, **options: object) -> None:
        self.clock: dict[Stream, int] = {}
        self.at = 0

    def record(self, stream: Stream | None = None) -> Event:
        self.clock = dict((stream or current()).clock)
        self.at = World.now.count
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def synchronize(self) -> None:
        if World.now.heeds("synchronize"):
            World.now.wait(self.clock)

    def query(self) -> bool:
        """Does the host know that it is over?"""
        return World.now.knows(self.clock)

    def elapsed_time(self, end: Event) -> float:
        """One millisecond per operation. A real event raises where this one tells."""
        if not (self.query() and end.query()):
            World.now.races["the time between events is read", "what is before them may not be over"] += 1
        return float(end.at - self.at)


def current(device: object = None) -> Stream:
    return World.now.stack[-1]


@contextlib.contextmanager
def on(stream: Stream | None) -> Iterator[None]:
    World.now.stack.append(stream or current())
    try:
        yield
    finally:
        World.now.stack.pop()


def synchronize(device: object = None) -> None:
    if World.now.heeds("synchronize"):
        World.now.wait(World.now.everything)


class _Module:
    """What stands for ``torch.cuda``."""

    Stream, Event = Stream, Event
    current_stream, stream, synchronize = staticmethod(current), staticmethod(on), staticmethod(synchronize)
    is_current_stream_capturing = staticmethod(bool)


class _Future(torch.futures.Future):
    def set_result(self, result: Any) -> None:
        self.clock = dict(current().clock) if World.now.heeds("future") else {}
        super().set_result(result)


def _hook(state, bucket):  # DDP looks at its arguments' names
    """Our hook of DDP, which waits for what it hands back when the backward pass is over, as nobody else does."""
    future, main = state.reduce(bucket), World.now.main
    torch.autograd.Variable._execution_engine.queue_callback(lambda: main.merge(future.clock))
    return future


class _Work(dist.Work):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._clock = dict(stream.clock)

    def wait(self, *timeout: object) -> bool:
        if World.now.heeds("work.wait"):
            current().merge(self._clock)
        return True


class World:
    """What has happened: one at a time, ``World.now``.

    Attributes:
        races: (one access, the other) -> how often. given_away: the same, of memory that was free too early.
        waits: our own places that wait, as "file:line verb". deaf: the one that is ignored.
        syncs: where the host waited for the device; waited: in the last step.
        exposed: ms per step, as the ledger has it.
        priorities: of streams, by the place that made them. watching: operations are seen.
        inside: storages that Triton's host code has made, while it runs. launched: those that it has launched on.
    """

    now: World

    def __init__(self, deaf: str = "") -> None:
        World.now = self
        for cache in (devices._uploaded, programs._programs_on):  # their tables were made in another world
            cache.cache_clear()
        self.streams, self.count, self.deaf = 0, 0, deaf
        self.exposed = 0.0
        self.waits: Counter[str] = Counter()
        self.races: Counter[tuple[str, str]] = Counter()
        self.given_away: Counter[tuple[str, str]] = Counter()
        self.syncs: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()
        self.priorities: dict[str, int] = {}
        self.watching = False
        self.inside: set[int] | None = None
        self.launched: set[int] = set()
        self.everything: dict[Stream, int] = {}
        self.main, self.host = Stream(name="main"), Stream(name="host")
        self.stack = [self.main]
        self.groups: list[Stream] = []  # of process groups
        self._operation = ""  # the place of the one that goes on, once it was asked for
        self._touched: dict[int, list[tuple]] = {}
        self._made: dict[int, tuple[Stream, str]] = {}
        self._pinned: set[int] = set()
        self._computed: set[int] = set()  # on the device
        self._free: dict[Stream, list[tuple]] = {}
        self._kept: dict[int, set[Stream]] = {}

    # Where we are.

    @staticmethod
    def place(skip: int = 2) -> tuple[str, bool]:
        """The line of Thinwire's that is running, or else FSDP2's; whether it is the one that called."""
        frame, engine, direct = sys._getframe(skip), "", True
        while frame is not None:
            whose, name = _whose(frame.f_code.co_filename)
            if whose == "ours":
                return f"{name}:{frame.f_lineno}", direct
            direct = direct and whose == "nobody's"
            if not engine and whose == "engine's":
                engine = f"torch's {name}:{frame.f_lineno}"
            frame = frame.f_back
        return engine or "user", False

    def heeds(self, verb: str) -> bool:
        """Does a wait of ``verb``, asked for here, count? One of ours is noted, and may be left out."""
        place, ours = self.place(3)
        if ours and self.watching:
            place = f"{place} {verb}"
            self.waits[place] += 1
        return place != self.deaf

    def knows(self, clock: dict[Stream, int]) -> bool:
        """Does the host know that all of ``clock`` is over?"""
        return all(self.host.clock.get(stream, 0) >= count for stream, count in clock.items())

    def wait(self, clock: dict[Stream, int]) -> None:
        """Let the host wait until all of ``clock`` is over."""
        if not self.knows(clock):
            self.syncs[self.place(3)[0]] += 1
        self.host.merge(clock)

    # What is touched.

    def begin(self, *, host: bool = False) -> Stream:
        """An operation begins, on the host or on the current stream."""
        self.count += 1
        self._operation = ""
        stream = self.host if host else current()
        if not host:
            stream.merge(self.host.clock)
        stream.clock[stream] = self.everything[stream] = self.count
        return stream

    def operation(self) -> str:
        """The place of the operation that has begun last."""
        self._operation = self._operation or self.place(3)[0]
        return self._operation

    def is_host(self, tensor: Tensor) -> bool:
        """Is it in the host's memory? So are numbers that come from no tensor of the device: counters of steps."""
        key = tensor.untyped_storage()._cdata
        return key in self._pinned or (tensor.dim() == 0 and key not in self._computed)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.untyped_storage()._cdata in self._pinned

    def computed(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self._touched:  # else it is empty, and nobody would say when its address is another's
            self._computed.add(key)

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.add(tensor.untyped_storage()._cdata)
        return tensor

    def born(self, tensor: Tensor, stream: Stream) -> None:
        """Memory for ``tensor`` is taken from ``stream``'s: is everybody done with what was freed there?"""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._touched:
            return
        if self.inside is not None:
            self.inside.add(key)
        self._touched[key], self._made[key] = [], (stream, self.operation())
        weakref.finalize(storage, _gone, weakref.ref(self), key)
        left = []
        for count, other, verb, where in [] if key in self._pinned else self._free.pop(stream, []):
            if count > stream.clock.get(other, 0):
                self.given_away[verb, f"given away on {stream}, where {where} had made it"] += 1
                left.append((count, other, verb, where))
        if left:
            self._free[stream] = left[-KEPT:]

    def keep(self, tensor: Tensor) -> None:
        if self.heeds("keep"):
            self._kept.setdefault(tensor.untyped_storage()._cdata, set()).add(current())

    def touch(self, tensor: Any, write: bool, what: str, stream: Stream) -> None:
        if not isinstance(tensor, Tensor) or tensor.device.type != "cpu" or tensor.numel() == 0:
            return
        key = tensor.untyped_storage()._cdata
        if key not in self._touched:
            self.born(tensor, stream)
        size = tensor.element_size()
        low = tensor.storage_offset() * size
        if tensor.is_contiguous():
            high = low + tensor.nbytes
        else:
            high = low + (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * size
        found, clock, place, left = self._touched[key], stream.clock, self.operation(), []
        for of in found:
            count, other, wrote, start, end, theirs, where = of
            if other is stream:
                # One that is like it, and came before it on this stream, cannot show more.
                if wrote is not write or start != low or end != high:
                    left.append(of)
                continue
            left.append(of)
            if (write or wrote) and low < end and start < high and count > clock.get(other, 0):
                one = f"{'writes' if write else 'reads'} {what} on {stream} at {place}"
                self.races[one, f"{'writes' if wrote else 'reads'} {theirs} on {other} at {where}"] += 1
        left.append((self.count, stream, write, low, high, what, place))
        self._touched[key] = left[-KEPT:]

    def launch(self, kernel: Callable[..., None], arguments: Mapping[str, object]) -> None:
        """A kernel is launched on the current stream."""
        if not self.watching:
            return
        stream, targets = self.begin(), written_by(kernel)
        name = f"{kernel.__module__.split('.')[-2]}.{kernel.__name__}"
        for argument, value in arguments.items():
            if isinstance(value, Tensor):
                self.touch(value, argument in targets, name, stream)
                self.launched.add(value.untyped_storage()._cdata)
                if argument in targets:
                    self.computed(value)

    def release(self, key: int) -> None:
        """A storage is freed: its stream may use the memory for the next thing that it allocates."""
        made, where = self._made.pop(key, (None, ""))
        excused = {made, self.host, *self._kept.pop(key, ())}
        for count, stream, write, _, _, what, place in self._touched.pop(key, ()):
            ours = ".py" in where and not where.startswith("torch's")  # FSDP2's own tensors are FSDP2's
            if made not in (None, self.host) and ours and stream not in excused and count > made.clock.get(stream, 0):
                verb = f"{'writes' if write else 'reads'} {what} on {stream} at {place}"
                self._free.setdefault(made, []).append((count, stream, verb, where))
        self._pinned.discard(key)
        self._computed.discard(key)

    def wrong(self) -> list[str]:
        """All that was found, one line each."""
        return [f"{number} times: {one}, beside {other}" for (one, other), number in
                [*self.races.most_common(), *self.given_away.most_common()]]  # fmt: skip


@functools.cache
def _whose(file: str) -> tuple[str, str]:
    name = file.rsplit("/", 1)[-1]
    if "/thinwire/" in file and "/ops/" not in file and name != "device.py":
        return "ours", name
    if "/torch/" in file:
        return "engine's" if "/_fully_shard/" in file else "torch's", name
    return "nobody's", name


def _gone(world: weakref.ref[World], key: int) -> None:
    if (there := world()) is not None and there is World.now:
        there.release(key)


class _Host(TorchFunctionMode):
    """Sees what the host does to tensors beside operations: it reads and writes pinned memory, and copies from it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name, world = kwargs or {}, getattr(func, "__name__", ""), World.now
        of = args[0] if args and type(args[0]) is Tensor else None
        if of is None or of.device.type != "cpu" or name not in (*READ_BY_HOST, "to"):
            return func(*args, **kwargs)
        if name == "to":
            words = (word for word in (*args[1:], *kwargs.values()) if isinstance(word, torch.device | str))
            device = next(words, "meta")
            if device == "cpu" and isinstance(device, str) and not world.is_host(of):
                return _to_host(of)  # a device of ours has a number, or is a tensor's
            goes = torch.device(device).type == "cpu" and world.is_pinned(of)
            return _uploaded(of) if goes else func(*args, **kwargs)
        if world.is_pinned(of):
            world.touch(of, name == "numpy", name, world.begin(host=True))  # numpy's array may be written to
        elif name in ("tolist", "numpy", "cpu") and not world.is_host(of):  # which no operation shows
            stream = world.begin()
            world.touch(of, False, name, stream)
            world.wait(stream.clock)
        return func(*args, **kwargs)


def _to_host(there: Tensor) -> Tensor:
    """A copy of ``there`` in the host's memory, for which the host waits."""
    world, stream = World.now, World.now.begin()
    world.touch(there, False, "to", stream)
    world.wait(stream.clock)
    with unseen():
        copied = world.pin(there.clone())
    world.born(copied, world.host)
    return copied


def _uploaded(pinned: Tensor) -> Tensor:
    """A copy of ``pinned`` on the device, made by the current stream while the host goes on."""
    world, stream = World.now, World.now.begin()
    world.touch(pinned, False, "to", stream)
    with unseen():
        there = pinned.clone()
    world.touch(there, True, "to", stream)
    world.computed(there)
    return there


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


class Watch(TorchDispatchMode):
    """Sees every operation."""

    def __enter__(self):
        World.now.watching, self._host = True, _Host()
        self._host.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._host.__exit__(*error)
        World.now.watching = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, world = kwargs or {}, World.now
        if DTensor in types:
            return NotImplemented
        full, name, kind, written = _known(func)
        if kind == "view":
            return func(*args, **kwargs)
        if kind == "functional":  # what it does, it does by a group
            if name.startswith("wait_tensor"):
                for stream in world.groups:
                    current().merge(stream.clock)
            return func(*args, **kwargs)
        given = [*_tensors(args), *_tensors(kwargs.values())]
        host = bool(given) and all(world.is_host(tensor) for tensor in given)
        stream = world.begin(host=host)
        if full.startswith("fsdp::all_gather_copy_in"):
            inputs, out, _, numel, rank = args
            for tensor in inputs:
                world.touch(tensor, False, name, stream)
            world.touch(out.narrow(0, numel * rank, numel), True, name, stream)
            return func(*args, **kwargs)
        if full.startswith("fsdp::split_with_sizes_copy"):
            world.touch(args[0], False, name, stream)
            for tensor in kwargs["out"]:
                world.touch(tensor, True, name, stream)
            return func(*args, **kwargs)
        if kind != "empty":
            for key, value in (*enumerate(args), *kwargs.items()):
                for tensor in _tensors((value,)):
                    world.touch(tensor, key in written, name, stream)
                    if key in written and not host:
                        world.computed(tensor)
        if (kind == "wait" and not host) or (name.startswith("index.Tensor") and _by_flags(args[1])):
            world.syncs[world.place()[0]] += 1
            world.host.merge(stream.clock)
        if world.inside is not None:
            results = [tensor for key, value in (*enumerate(args), *kwargs.items()) if key in written
                       for tensor in _tensors((value,))]  # fmt: skip
            if any(tensor.untyped_storage()._cdata not in world.inside for tensor in results):  # the reference makes it
                return results[0] if len(func._schema.returns) == 1 else None
        out = func(*args, **kwargs)
        old = {id(tensor) for tensor in given}
        for tensor in _tensors((out,)):
            if id(tensor) not in old and tensor.device.type == "cpu":
                if kind == "empty":
                    world.born(tensor, stream)
                else:
                    world.touch(tensor, True, name, stream)
                if not host:
                    world.computed(tensor)
        return out


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@functools.cache
def _known(func: Any) -> tuple[str, str, str, frozenset[int | str]]:
    """Of an operation: its full name, its name, of what kind it is, and which of its arguments it writes to."""
    full = func.name()
    name = full.split("::")[1]
    kinds = {"view": VIEWS, "empty": EMPTY, "wait": WAITS}
    kind = next((kind for kind, names in kinds.items() if name.startswith(names)), "")
    if full.startswith("_c10d_functional"):
        kind = "functional"
    written: set[int | str] = set()
    for number, of in enumerate(func._schema.arguments):
        if of.alias_info is not None and of.alias_info.is_write:
            written |= {number, of.name}
    return full, name, kind, frozenset(written)


def _by_flags(indices: Any) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


class Echo(dist.ProcessGroup):
    """Everybody says what this rank says. Collectives run on the current stream, asynchronous ones on the group's."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._stream: Stream | None = None

    def getBackendName(self) -> str:
        return "echo"

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def _run(self, verb: str, sent: list[Tensor], out: list[Tensor], options: Any) -> _Work:
        world, stream = World.now, current()
        if getattr(options, "asyncOp", False):
            if self._stream not in world.groups:
                self._stream = Stream(name="nccl")
                world.groups.append(self._stream)
            self._stream.merge(stream.clock)
            stream = self._stream
        with on(stream):
            world.begin()
            for tensor in sent:
                world.touch(tensor, False, verb, stream)
            for tensor in out:
                world.touch(tensor, True, verb, stream)
                world.computed(tensor)
        with _disable_current_modes(), torch.no_grad():
            for one, other in zip(out, sent, strict=True):
                source = other.reshape(self.size(), -1)[self.rank()] if one.numel() < other.numel() else other
                if one.numel() > source.numel() or one.data_ptr() != source.data_ptr():
                    of = source.reshape(1, -1) if verb != "all_to_all" else source.reshape(self.size(), -1)[self.rank()]
                    one.view(-1, of.numel()).copy_(of.clone().expand(one.numel() // of.numel(), -1))
        return _Work(stream)

    def allreduce(self, tensors, options=None):
        return self._run("all_reduce", tensors, tensors, options)

    def broadcast(self, tensors, options=None):
        return self._run("broadcast", tensors, tensors, options)

    def allgather(self, out, tensors, options=None):
        return self._run("all_gather", tensors * len(out[0]), out[0], options)

    def _allgather_base(self, out, tensor, options=None):
        return self._run("all_gather", [tensor], [out], options)

    def _reduce_scatter_base(self, out, tensor, options=None):
        return self._run("reduce_scatter", [tensor], [out], options)

    def alltoall_base(self, out, tensor, out_sizes, sizes, options=None):
        return self._run("all_to_all", [tensor], [out], options)

    def allgather_into_tensor_coalesced(self, outs, tensors, options=None):
        return self._run("all_gather", tensors, outs, options)

    def barrier(self, options=None):
        return _Work(current())

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_to_all_single, all_gather_single_coalesced = alltoall_base, allgather_into_tensor_coalesced


@functools.cache
def _host_code() -> Mapping[str, ModuleType]:
    """The modules of Triton's kernels, by family, over a stand-in for Triton that tells the world of each launch."""
    with dry_cuda.run(launched=lambda function, arguments: World.now.launch(function, arguments)):
        modules = backends.host_code.get()
        assert modules is not None
        return dict(modules)


class _Operations(ModuleType):
    """A family's operations: the host code of its Triton kernels is seen, and the reference computes."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self._host = _host_code()[family]
        self._reference = importlib.import_module(f"{family}.reference")

    def __getattr__(self, name: str) -> Any:
        host, reference = getattr(self._host, name, None), getattr(self._reference, name)
        if host is None or not World.now.watching or World.now.inside is not None:
            return reference
        return functools.partial(_run, f"{self.__name__.rpartition('.')[2]}.{name}", host, reference)


def _run(name: str, host: Callable[..., Any], reference: Callable[..., Any], *args: Any, **options: Any) -> Any:
    world = World.now
    world.inside, world.launched = set(), set()
    try:
        made = host(*args, **options)
    finally:
        world.inside = None
    stream = current()
    given = (*args, *options.values())
    for segment in [segment for of in given if isinstance(of, Moments) for segment in of.segments]:
        world.touch(segment.moment, False, name, stream)  # by its address, in a table
        world.touch(segment.scores, True, name, stream)
    for tensor in _tensors(given):
        if tensor.untyped_storage()._cdata not in world.launched:
            world.touch(tensor, False, name, stream)  # lists in one memory, of which a launch is told the first
    with unseen():
        found = reference(*args, **options)
        if isinstance(made, Tensor) and isinstance(found, Tensor):
            made.copy_(found)
    return found if made is None else made


def _host_memory(shape: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    with _disable_current_modes():
        tensor = World.now.pin(torch.zeros(tuple(shape), dtype=dtype))
        World.now.born(tensor, World.now.host)  # so that its address is forgotten when it is freed, touched or not
        return tensor


@contextlib.contextmanager
def gpu(world: int) -> Iterator[None]:
    """Rank 0 of ``world``; the CPU is a GPU meanwhile, and operations take the way of its kernels' host code."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if "echo" not in dist.Backend.backend_list:
        dist.Backend.register_backend("echo", lambda options, _: Echo(options), extended_api=True, devices=["cpu"])

    operations = functools.cache(lambda family, module, needs: _Operations(family))
    World()
    here = _Module()
    with (
        mock.patch.multiple(torch.cpu, Stream=Stream, Event=Event, current_stream=current, stream=on),
        mock.patch.multiple(
            devices, streams=lambda device: None if device.type == "meta" else here, future=lambda device: _Future(),
            keep=lambda tensor: World.now.keep(tensor), host_memory=_host_memory,
        ),
        mock.patch.object(backends, "_load", operations), mock.patch.object(ddp, "thinwire_hook", _hook),
    ):  # fmt: skip
        dist.init_process_group("echo", store=FakeStore(), rank=0, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()

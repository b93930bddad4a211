"""A method's memory between steps: per parameter and per rank, committed only when the step counts.

Methods use the class; the functions below it are for the code that runs methods.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Bucket, Segment

LOOSE = "="
"""Precedes, in a saved state, the key of a value that does not live in a bucket."""


class State:
    """Named tensors that live in the form of a bucket's rows and are keyed by parameter name.

    A method reads the committed values and writes the next ones beside them; ``commit`` makes those current once all
    ranks agree that the step was finite, ``rollback`` forgets them. Values follow their parameters into other buckets
    (DDP rebuilds its buckets after the first step, FSDP2 leaves out parameters without a gradient, a checkpoint loads).

    ``read`` and ``get`` return committed values; in a second exchange of the same step (:func:`next_exchange`) they
    return what the first one wrote, so nothing is lost or sent twice.

    One residual of W values costs 2 * 4 * W bytes, so that a step can be skipped without a trace; a step that exchanges
    twice needs 4 * W more.

    Kinds named in ``offload`` live in (pinned) CPU memory: ``read`` and ``write`` then return one of two staging
    buffers on the bucket's device, valid until the next ``read``, and :func:`put_back` empties the second one.

    Attributes:
        loads: how often a saved state was loaded.
    """

    def __init__(self, offload: Collection[str] = ()) -> None:
        self.loads = 0
        self._offload = frozenset(offload)
        self._stages: dict[tuple[str, torch.device], Tensor] = {}  # as large as the largest bucket
        self._home: dict[tuple[str, str], tuple[object, Segment]] = {}  # (kind, parameter) -> bucket's key, and columns
        self._loose: dict[tuple[str, str], Tensor] = {}  # loaded, not yet placed in a bucket: (R, span)
        self._current: dict[tuple[str, object], Tensor] = {}
        self._staged: dict[tuple[str, object], Tensor] = {}
        self._earlier: dict[tuple[str, object], Tensor] = {}  # written by earlier exchanges of this step
        self._spare: dict[tuple[str, object], Tensor] = {}
        self._small: dict[tuple[str, str], Tensor] = {}
        self._small_staged: dict[tuple[str, str], Tensor | None] = {}
        self._small_earlier: dict[tuple[str, str], Tensor | None] = {}

    def get(self, kind: str, name: str) -> Tensor | None:
        """Return the committed ``kind`` of parameter ``name``, not to be written to; None where there is none.

        A value from ``put`` or ``keep`` has any shape and dtype; one in a bucket is (R, span), float32.
        """
        value = self._small_earlier.get((kind, name), self._small.get((kind, name)))
        if value is not None or (kind, name) not in self._home:
            return self._loose.get((kind, name)) if value is None else value
        home, segment = self._home[kind, name]
        return _columns(self._current[kind, home], segment)

    def put(self, kind: str, name: str, value: Tensor | None) -> None:
        """Make ``get`` return ``value`` (not copied) from the next ``commit`` on; None removes it."""
        self._small_staged[kind, name] = value

    def keep(self, kind: str, name: str, value: Tensor | None) -> None:
        """Make ``get`` return ``value`` (not copied) from now on, whatever the step; None removes it."""
        if value is not None:
            self._small[kind, name] = value
            return
        for values in (self._small, self._small_staged, self._small_earlier):
            values.pop((kind, name), None)

    def read(self, kind: str, bucket: Bucket, rows: int | None = None) -> Tensor:
        """Return the committed values of ``kind`` for ``bucket``: (R, n) float32, zeros at first, not to be written to.

        ``rows``: the number of rows of this kind, if not the bucket's; always the same for a kind.
        """
        key = (kind, bucket.key)
        if key not in self._current:
            shape = (rows or bucket.shape[0], bucket.shape[1])
            self._current[key] = self._new(kind, shape, bucket.device)
        if any([self._move(kind, bucket, segment) for segment in bucket.segments]):
            self._drop_homeless(kind)
        values = self._earlier.get(key, self._current[key])
        if kind not in self._offload:
            return values
        return self._stage("read", values, bucket.device).copy_(values, non_blocking=True)

    def write(self, kind: str, bucket: Bucket, rows: int | None = None) -> Tensor:
        """Return memory (R, n) float32 for the next values, to be filled whole. Nothing changes until ``commit``."""
        key = (kind, bucket.key)
        if key not in self._current:
            self.read(kind, bucket, rows)
        spare = self._staged.get(key)
        if spare is None:
            spare = self._staged[key] = self._other(key)
        return self._stage("write", spare, bucket.device) if kind in self._offload else spare

    def drop(self, kind: str) -> None:
        """Forget all values of ``kind`` in buckets, and free their memory."""
        for values in (self._home, self._loose):
            for key in [key for key in values if key[0] == kind]:
                del values[key]  # type: ignore[attr-defined]
        self._drop_homeless(kind)

    def _new(self, kind: str, shape: Sequence[int], device: torch.device) -> Tensor:
        if kind not in self._offload:
            return torch.zeros(shape, dtype=torch.float32, device=device)
        return devices.host_memory(shape, device)

    def _stage(self, use: str, values: Tensor, device: torch.device) -> Tensor:
        """View the staging buffer on ``device`` in the shape of ``values``; all its users are on one stream."""
        stage = self._stages.get((use, device))
        if stage is None or stage.numel() < values.numel():
            stage = self._stages[use, device] = torch.empty(values.numel(), dtype=torch.float32, device=device)
        return stage[: values.numel()].view(values.shape)

    def commit(self) -> None:
        """Make the values written since the last commit current."""
        next_exchange(self)
        for key, written in self._earlier.items():
            self._spare[key], self._current[key] = self._current[key], written
        self._earlier.clear()
        small, self._small_earlier = self._small_earlier, {}
        for (kind, name), value in small.items():
            self.keep(kind, name, value)

    def rollback(self, names: Collection[str] | None = None, kinds: Collection[str] | None = None) -> None:
        """Forget the values written since the last commit.

        ``names``: only those of these parameters. ``kinds``: only those of these kinds, which live in buckets.
        """
        next_exchange(self)
        if names is None:
            self._spare.update(self._earlier)
            self._earlier.clear()
            self._small_earlier.clear()
            return
        for (kind, name), (home, segment) in self._home.items():
            written = self._earlier.get((kind, home))
            if name in names and written is not None and (kinds is None or kind in kinds):
                if kind in self._offload:
                    devices.wait(written.device)  # copies to CPU memory may be under way
                _columns(written, segment).copy_(_columns(self._current[kind, home], segment))
        if kinds is None:
            for key in [key for key in self._small_earlier if key[1] in names]:
                del self._small_earlier[key]

    def _move(self, kind: str, bucket: Bucket, segment: Segment) -> bool:
        """Move the parameter's values into ``bucket``; return False if they are there already."""
        name = (kind, segment.name)
        home = self._home.get(name)
        if home is not None and home[0] == bucket.key:
            return False
        if kind in self._offload:
            devices.wait(bucket.device)  # copies to CPU memory may be under way
        key, loose = (kind, bucket.key), self._loose.pop(name, None)
        target = _columns(self._current[key], segment)
        if loose is not None:
            if loose.shape != target.shape:
                raise ThinwireError(
                    f"state '{kind}' of {segment.name} has shape {tuple(loose.shape)}, this run needs "
                    f"{tuple(target.shape)}: it was saved with another world size or engine"
                )
            target.copy_(loose)
            devices.keep(loose)
        elif home is not None:
            target.copy_(_columns(self._current[kind, home[0]], home[1]))
        else:
            target.zero_()
        written = None if home is None else self._earlier.get((kind, home[0]))
        if written is not None and key not in self._earlier:
            self._earlier[key] = self._other(key).copy_(self._current[key])
        if key in self._earlier:
            source = target if home is None or written is None else _columns(written, home[1])
            _columns(self._earlier[key], segment).copy_(source)
        self._home[name] = (bucket.key, segment)
        return True

    def _other(self, key: tuple[str, object]) -> Tensor:
        """Take an unused buffer like the current one."""
        spare = self._spare.pop(key, None)
        current = self._current[key]
        return self._new(key[0], current.shape, current.device) if spare is None else spare

    def _drop_homeless(self, kind: str) -> None:
        """Free buffers in which no parameter lives any more."""
        inhabited = {home for (owner, _), (home, _) in self._home.items() if owner == kind}
        for buffers in (self._current, self._staged, self._earlier, self._spare):
            for key in [key for key in buffers if key[0] == kind and key[1] not in inhabited]:
                del buffers[key]


def _columns(values: Tensor, segment: Segment) -> Tensor:
    """View a parameter's values in a bucket's rows, without padding: (R, span)."""
    return values[:, segment.start : segment.start + segment.span]


def find_entries(state: State, prefix: str = "") -> list[tuple[str, str, Tensor]]:
    """List (kind, name, value) of all values from ``put`` or ``keep`` whose kind begins with ``prefix``."""
    return [(kind, name, value) for (kind, name), value in state._small.items() if kind.startswith(prefix)]


def read_existing(state: State, kind: str, bucket: Bucket) -> Tensor | None:
    """Read ``kind`` with the rows that it has; None where the state has nothing of ``kind`` for ``bucket``."""
    for segment in bucket.segments:
        name = kind, segment.name
        if name in state._loose:
            return state.read(kind, bucket, state._loose[name].shape[0])
        if name in state._home:
            return state.read(kind, bucket, state._current[kind, state._home[name][0]].shape[0])
    return None


def put_back(state: State, kind: str, bucket: Bucket) -> None:
    """Copy an offloaded ``kind`` to CPU memory, once the memory from ``state.write`` for ``bucket`` is filled."""
    if kind in state._offload:
        staged = state._staged[kind, bucket.key]
        staged.copy_(state._stage("write", staged, bucket.device), non_blocking=True)


def next_exchange(state: State) -> None:
    """Begin another exchange of the same step, which reads what the earlier ones wrote."""
    for key, staged in state._staged.items():
        if key in state._earlier:
            state._spare[key] = state._earlier[key]
        state._earlier[key] = staged
    state._staged.clear()
    state._small_earlier.update(state._small_staged)
    state._small_staged.clear()


def move_entries(source: State, target: State, names: Collection[str], without: tuple[str, ...] = ()) -> None:
    """Move all that ``source`` holds of the parameters ``names`` to ``target``, and the memory that it lives in.

    Their buckets hold no other parameters. ``without``: kinds that begin with one of these stay.
    """
    stores = ("_home", "_loose", "_small", "_small_staged", "_small_earlier")
    homes = {(kind, home) for (kind, name), (home, _) in source._home.items() if name in names}
    for store in stores:
        values, moved = getattr(source, store), getattr(target, store)
        for key in [key for key in values if key[1] in names and not key[0].startswith(without)]:
            moved[key] = values.pop(key)
    for store in ("_current", "_staged", "_earlier", "_spare"):
        values, moved = getattr(source, store), getattr(target, store)
        for key in [key for key in values if key in homes and not key[0].startswith(without)]:
            moved[key] = values.pop(key)


def dump_state(state: State) -> dict[str, Tensor]:
    """Copy this rank's committed values by "kind/parameter": (R, span) without padding, and those from ``put``."""
    for use, device in state._stages:
        if use == "write":
            devices.wait(device)  # copies to CPU memory may be under way
    result = {f"{LOOSE}{kind}/{name}": value.clone() for (kind, name), value in state._small.items()}
    result |= {f"{kind}/{name}": values.clone() for (kind, name), values in state._loose.items()}
    for (kind, name), (home, segment) in state._home.items():
        result[f"{kind}/{name}"] = _columns(state._current[kind, home], segment).clone()
    return result


def written_rows(state: State) -> dict[str, Tensor]:
    """View, by "kind/parameter", the values (R, span) in buckets as the next ``commit`` will leave them."""
    next_exchange(state)
    return {
        f"{kind}/{name}": _columns(state._earlier.get((kind, home), state._current[kind, home]), segment)
        for (kind, name), (home, segment) in state._home.items()
    }


def load_state(state: State, values: dict[str, Tensor]) -> None:
    """Load ``values`` from :func:`dump_state`; each bucket takes its part when it is next read."""
    for store in (state._home, state._current, state._staged, state._earlier, state._spare, state._small_staged,
                  state._small_earlier, state._loose, state._small):  # fmt: skip
        store.clear()
    state.loads += 1
    for key, tensor in values.items():
        kind, _, name = key.removeprefix(LOOSE).partition("/")
        store = state._small if key.startswith(LOOSE) else state._loose
        store[kind, name] = tensor.clone()

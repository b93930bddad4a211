"""What a method remembers between steps: per parameter and per rank, committed only when the step counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from thinwire.bucket import Bucket, Segment
from thinwire.errors import ThinwireError

_SMALL = "="  # in a saved state, before the key of what does not live in a bucket


class State:
    """Named tensors that live in the form of a bucket's rows and are keyed by parameter name.

    A method reads the committed values and writes the next ones beside them; ``commit`` makes those current once all
    ranks agree that the step was finite, ``rollback`` forgets them. When the engine rebuilds its buckets (DDP does,
    after the first step), or after a checkpoint was loaded, values follow their parameters.

    One residual of W values costs 2 * 4 * W bytes: the price of skipping a step without a trace.

    Kinds named in ``offload`` live in (pinned) CPU memory: what ``read`` and ``write`` give is then one of two staging
    buffers on the bucket's device, good until the next ``read``, and ``put_back`` says when the second one is filled.
    """

    def __init__(self, offload: Collection[str] = ()) -> None:
        self._offload = frozenset(offload)
        self._stages: dict[tuple[str, torch.device], Tensor] = {}  # as large as the largest bucket
        self._home: dict[tuple[str, str], tuple[Bucket, Segment]] = {}  # (kind, parameter) -> where its values are
        self._loose: dict[tuple[str, str], Tensor] = {}  # loaded, not yet placed in a bucket: (R, span)
        self._current: dict[tuple[str, object], Tensor] = {}
        self._staged: dict[tuple[str, object], Tensor] = {}
        self._spare: dict[tuple[str, object], Tensor] = {}
        self._small: dict[tuple[str, str], Tensor] = {}
        self._small_staged: dict[tuple[str, str], Tensor] = {}

    def get(self, kind: str, name: str) -> Tensor | None:
        """The committed ``kind`` of parameter ``name``, of any shape and dtype; None at first. Not to be written to."""
        return self._small.get((kind, name))

    def put(self, kind: str, name: str, value: Tensor) -> None:
        """``value`` (kept, not copied) is what ``get`` gives from the next ``commit`` on."""
        self._small_staged[kind, name] = value

    def set(self, kind: str, name: str, value: Tensor) -> None:
        """``value`` (kept, not copied) is what ``get`` gives from now on: it belongs to no step."""
        self._small[kind, name] = value

    def discard(self, kind: str, name: str) -> None:
        """``get`` finds nothing from now on."""
        self._small.pop((kind, name), None)
        self._small_staged.pop((kind, name), None)

    def read(self, kind: str, bucket: Bucket, rows: int | None = None) -> Tensor:
        """The committed values of ``kind`` for ``bucket``: (R, n) float32, zeros at first. Not to be written to.

        ``rows``: how many rows this kind has, where not one for each of the bucket's; always the same for a kind.
        """
        key = (kind, bucket.key)
        if key not in self._current:
            shape = (rows or bucket.shape[0], bucket.shape[1])
            self._current[key] = self._new(kind, shape, bucket.device)
            for segment in bucket.segments:
                self._adopt(kind, bucket, segment)
            self._drop_homeless(kind)
        if kind not in self._offload:
            return self._current[key]
        return self._stage("read", self._current[key], bucket.device).copy_(self._current[key], non_blocking=True)

    def write(self, kind: str, bucket: Bucket, rows: int | None = None) -> Tensor:
        """Where the next values go: (R, n) float32, to be filled whole. Nothing changes until ``commit``."""
        key = (kind, bucket.key)
        if key not in self._current:
            self.read(kind, bucket, rows)
        spare = self._spare.pop(key, None)
        if spare is None:
            spare = self._new(kind, self._current[key].shape, bucket.device)
        self._staged[key] = spare
        return self._stage("write", spare, bucket.device) if kind in self._offload else spare

    def put_back(self, kind: str, bucket: Bucket) -> None:
        """What ``write`` gave for ``bucket`` has been filled: an offloaded kind goes back to CPU memory now."""
        if kind in self._offload:
            staged = self._staged[kind, bucket.key]
            staged.copy_(self._stage("write", staged, bucket.device), non_blocking=True)

    def _new(self, kind: str, shape: Sequence[int], device: torch.device) -> Tensor:
        if kind not in self._offload:
            return torch.zeros(shape, dtype=torch.float32, device=device)
        return torch.zeros(shape, dtype=torch.float32, pin_memory=device.type == "cuda")

    def _stage(self, use: str, values: Tensor, device: torch.device) -> Tensor:
        """A view of ``values``' shape of the staging buffer on ``device``; everything that uses it is on one stream."""
        stage = self._stages.get((use, device))
        if stage is None or stage.numel() < values.numel():
            stage = self._stages[use, device] = torch.empty(values.numel(), dtype=torch.float32, device=device)
        return stage[: values.numel()].view(values.shape)

    def commit(self) -> None:
        """What was written since the last commit becomes current."""
        for key, staged in self._staged.items():
            self._spare[key], self._current[key] = self._current[key], staged
        self._staged.clear()
        self._small.update(self._small_staged)
        self._small_staged.clear()

    def rollback(self) -> None:
        """What was written since the last commit is forgotten."""
        self._spare.update(self._staged)
        self._staged.clear()
        self._small_staged.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """``"kind/parameter"`` -> (R, span) this rank's committed values without padding, and what was ``put``."""
        for use, device in self._stages:
            if use == "write" and device.type == "cuda":
                torch.cuda.synchronize(device)  # copies to CPU memory may be under way
        result = {f"{_SMALL}{kind}/{name}": value.clone() for (kind, name), value in self._small.items()}
        result |= {f"{kind}/{name}": values.clone() for (kind, name), values in self._loose.items()}
        for (kind, name), (bucket, segment) in self._home.items():
            values = bucket.columns(self._current[kind, bucket.key], segment)
            result[f"{kind}/{name}"] = values[:, : segment.span].clone()
        return result

    def load_state_dict(self, values: dict[str, Tensor]) -> None:
        """Take what ``state_dict`` gave; it moves into buckets as those are next seen."""
        self._home.clear()
        self._current.clear()
        self._staged.clear()
        self._spare.clear()
        self._loose, self._small = {}, {}
        self._small_staged.clear()
        for key, tensor in values.items():
            kind, _, name = key.removeprefix(_SMALL).partition("/")
            store = self._small if key.startswith(_SMALL) else self._loose
            store[kind, name] = tensor.clone()

    def _adopt(self, kind: str, bucket: Bucket, segment: Segment) -> None:
        """Move the parameter's values into ``bucket`` from wherever they were."""
        target = bucket.columns(self._current[kind, bucket.key], segment)[:, : segment.span]
        values = self._loose.pop((kind, segment.name), None)
        if values is None and (kind, segment.name) in self._home:
            old, where = self._home[kind, segment.name]
            values = old.columns(self._current[kind, old.key], where)[:, : where.span]
        if values is not None:
            if values.shape != target.shape:
                raise ThinwireError(
                    f"state '{kind}' of {segment.name} has shape {tuple(values.shape)}, this run needs "
                    f"{tuple(target.shape)}: it was saved with another world size or engine"
                )
            target.copy_(values)
        self._home[kind, segment.name] = (bucket, segment)

    def _drop_homeless(self, kind: str) -> None:
        """Free buffers in which no parameter lives any more."""
        living = {bucket.key for (of, _), (bucket, _) in self._home.items() if of == kind}
        for store in (self._current, self._staged, self._spare):
            for key in [key for key in store if key[0] == kind and key[1] not in living]:
                del store[key]

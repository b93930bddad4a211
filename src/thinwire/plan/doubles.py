"""Doubles for a dry run on tensors without storage, and a count of the bytes that real tensors would take."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from thinwire.core.state import State
from thinwire.network.comm import local


class Watch(TorchDispatchMode):
    """Counts the bytes of the living meta tensors that were made while it was on."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = args[0] if _in_place(function) and args[0].is_meta else function(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self._note(leaf, leaf.untyped_storage().nbytes())
        return result

    def end_step(self, share: float) -> None:
        """Begin the peak of the next step, after one that stands for ``share`` of the steady state."""
        self.peak = self.live

    def lend(self, *tensors: Tensor) -> None:
        """Do not count ``tensors``, which are the engine's."""
        for tensor in tensors:
            self._note(tensor, 0)
            key = tensor.untyped_storage()._cdata
            self.live, self._sizes[key] = self.live - self._sizes[key], 0

    def _note(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        storage_key = storage._cdata
        if storage_key not in self._sizes:
            self._sizes[storage_key] = nbytes
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, storage_key)

    def _release(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


@functools.cache
def _in_place(function: Any) -> bool:
    """Tell whether a torch operation only changes the values of its first argument. (torch may take 1 ms for it.)"""
    schema = function._schema
    written = [result.alias_info is not None and result.alias_info.is_write for result in schema.returns]
    return schema.name.endswith("_") and written == [True] and torch.Tag.inplace_view not in function.tags


class CountedState(State):
    """The state of a dry run. Offloaded tensors do not count."""

    def __init__(self, offload: Collection[str], watch: Watch | None) -> None:
        super().__init__(offload)
        self._watch = watch

    def _new(self, kind: str, shape: Sequence[int], device: torch.device) -> Tensor:
        values = torch.zeros(shape, dtype=torch.float32, device=device)
        if kind in self._offload and self._watch is not None:
            self._watch.lend(values)
        return values


def zeros_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return zeros; on the meta device fifty times as fast as torch's function."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
    return empty if empty.is_meta else empty.zero_()


def optimizer_like(
    original: torch.optim.Optimizer, doubles: dict[int, nn.Parameter], resting: Sequence[dict[str, Any]] = ()
) -> Any:
    """Return an optimizer of the original's class over the doubles of its weights (by id), with Adam's moments.

    ``resting``: groups of weights that were taken out of it.
    """
    double: Any = object.__new__(type(original))
    double.__dict__.update({name: copy.copy(v) if isinstance(v, dict) else v for name, v in vars(original).items()})
    double.__dict__.pop("step", None)  # a learning-rate schedule's wrapper, which steps the original
    double.param_groups = [
        {**group, "params": [doubles[id(weight)] for weight in group["params"] if id(weight) in doubles]}
        for group in (*original.param_groups, *resting)
    ]
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    double.state = {
        weight: {
            "step": torch.tensor(1.0, dtype=torch.float32, device="cpu"),
            **{name: zeros_like(weight) for name in moments[: 3 if group.get("amsgrad") else 2]},
        }
        for group in double.param_groups
        for weight in group["params"]
    }
    return double


def step_once(double: Any, present: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
    """Give ``double`` the state that its original has after a step, if it can step without values.

    Else the original's ``present`` state, by double of the weight, or Adam's if there is none yet.
    """
    double._optimizer_step_pre_hooks, double._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    stand_in, double.state = double.state, defaultdict(dict)
    for group in double.param_groups:
        group.update({knob: False for knob in ("foreach", "fused", "capturable") if knob in group})
        for weight in group["params"]:
            weight.grad = zeros_like(weight)
    try:
        double.step()
    except Exception:  # the user's own optimizer reads values

        def empty(value: Tensor) -> Tensor:
            return zeros_like(local(value), next(iter(stand_in)).device) if value.dim() else value

        double.state = {w: tree_map_only(Tensor, empty, dict(present.get(w) or stand_in[w])) for w in stand_in}

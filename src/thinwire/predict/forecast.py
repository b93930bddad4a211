"""Predictions for ``method="auto"``: of the user's own model and engine, from a short measurement of these ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from thinwire.base.errors import ThinwireError
from thinwire.predict.choice import Auto, Training, Trials


def predictor(auto: Auto, training: Training, trials: Trials, dense: float) -> Callable[[str], Any]:
    """Return a function that predicts a step with the method of a name. Collective.

    ``dense``: seconds of a measured step of dense.
    """
    raise ThinwireError("auto has no predictions yet")


def on_meta(module: nn.Module, sharded: set[int]) -> nn.Module:
    """Make a double of ``module`` without storage, wrappers and hooks. ``sharded``: gets the ids of FSDP's modules."""
    kind = type(module)
    double: nn.Module = nn.Module.__new__(kind.__bases__[1] if isinstance(module, FSDPModule) else kind)
    double.__dict__.update(module.__dict__)
    if isinstance(module, FSDPModule):
        sharded.add(id(double))
    for name in vars(module):
        if name.endswith("_hooks") or name.endswith("_hooks_with_kwargs") or name.endswith("_hooks_always_called"):
            double.__dict__[name] = OrderedDict()
    return double

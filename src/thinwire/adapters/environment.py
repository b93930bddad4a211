"""Compression in a program that cannot be edited: ``THINWIRE_METHOD=int8 torchrun --nproc-per-node 2 program.py``.

Where Thinwire is installed, torch calls ``start`` at the end of ``import torch``, by the entry point "torch.backends".
Without the variable it does nothing. With it, and after torch:

- a Trainer of transformers, whoever makes it, gets a ``ThinwireCallback``: its checkpoints hold the wire's state;
- an Accelerator's model is compressed at its first forward pass, or before ``load_state``: checkpoints as well;
- any other model in DDP or FSDP2 is compressed at its first forward pass in training, together with the optimizers that
  hold its parameters. Its program's checkpoints lack the wire's state.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "THINWIRE_METHOD"


def start() -> None:
    """Watch for what trains, if the variable names a method."""
    if not os.environ.get(VARIABLE):
        return
    from torch.nn.modules.module import register_module_forward_pre_hook, register_module_parameter_registration_hook

    watch = _Watch()
    sys.meta_path.insert(0, watch)
    _hooks.append(register_module_forward_pre_hook(_compress_trained))
    _hooks.append(register_module_parameter_registration_hook(lambda *registered: watch.look()))


_hooks: list[Any] = []
"""The handles of hooks on all modules, until a model is compressed."""


class _Watch(MetaPathFinder):
    """Notices, once each, that a module of interest has been imported.

    Where torch is first imported by such a module, that one is half done: it is looked at when a model is being made.
    """

    def __init__(self) -> None:
        self.awaited = {
            "transformers.trainer": ("DEFAULT_CALLBACKS", _add_callback),
            "accelerate.accelerator": ("Accelerator", _before_loading),
        }
        self.look()

    def look(self) -> None:
        """Look at the modules that are there and whole."""
        for name, (last, act) in list(self.awaited.items()):
            if hasattr(sys.modules.get(name), last):
                del self.awaited[name]
                act(sys.modules[name])

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        sys.meta_path.remove(self)  # it is asked but once for a module
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_look(module: ModuleType) -> None:
                execute(module)
                self.look()

            spec.loader.exec_module = execute_and_look  # type: ignore[method-assign]
        return spec


class _Callback:
    """Makes a ``ThinwireCallback`` when a Trainer is made: its module cannot be imported from within transformers'."""

    def __new__(cls) -> Any:
        from thinwire.adapters.transformers import ThinwireCallback

        return ThinwireCallback()


def _add_callback(trainer: ModuleType) -> None:
    trainer.DEFAULT_CALLBACKS.append(_Callback)


def _before_loading(accelerator: ModuleType) -> None:
    """Compress an Accelerator's models before it loads their state, so that it loads the wire's, too."""
    import torch

    load_state = accelerator.Accelerator.load_state

    def compress_and_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = "load_state" in vars(self)  # then a wire calls this
        for model in self._models:
            wrapped = (outer for outer in _alive(torch.nn.parallel.DistributedDataParallel) if outer.module is model)
            _compress(next(wrapped, model))
        if "load_state" in vars(self) and not known:
            return self.load_state(*args, **kwargs)
        return load_state(self, *args, **kwargs)

    accelerator.Accelerator.load_state = compress_and_load


def _compress_trained(module: Any, inputs: Any) -> None:
    """Compress ``module`` if this is a forward pass of a wrapped model in training. Collective, as the pass is."""
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    inner = getattr(module, "_orig_mod", module)
    if (
        not isinstance(inner, DistributedDataParallel | FSDPModule)
        or not module.training
        or not torch.is_grad_enabled()
    ):
        return
    if isinstance(inner, FSDPModule):  # perhaps a part of a model whose own forward() is not called
        whole = (outer for outer in _alive(FSDPModule) if any(inner_part is inner for inner_part in outer.modules()))
        inner = max(whole, key=lambda outer: len(list(outer.modules())))
    _compress(inner)


def _compress(model: Any) -> None:
    """Compress ``model`` as whoever trains it needs it, unless it is already, or nobody steps it yet."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    from thinwire.base.errors import ThinwireWarning
    from thinwire.base.terminal import say
    from thinwire.core.optimizers import parameters, unwrapped
    from thinwire.wire import Wire, compress

    gc.collect()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves weights whole, and the optimizer has the shards
    weights = {id(weight) for weight in model.parameters()}
    opened = [optimizer for outer in _alive(torch.optim.Optimizer) for optimizer in unwrapped(outer)]
    holders = {id(o): o for o in opened if any(id(w) in weights for w in parameters(o))}
    inner = getattr(model, "_orig_mod", model)
    compressed = any(wire.engine.model is inner for wire in _alive(Wire))
    if not holders and not compressed:
        warnings.warn(
            f"{VARIABLE}: no optimizer holds the parameters of {type(model).__name__} yet: compression begins with "
            "the first forward pass after one does", ThinwireWarning, stacklevel=2,
        )  # fmt: skip
        return
    while _hooks:
        _hooks.pop().remove()
    if compressed:
        return
    method, optimizers = os.environ[VARIABLE], list(holders.values())
    library = sys.modules.get("accelerate")
    accelerator = None
    if library is not None:
        from thinwire.adapters import accelerate

        served = (one for one in _alive(library.Accelerator) if accelerate.number_of(one, inner) is not None)
        accelerator = next(served, None)
    if accelerator is not None:
        wire = accelerate.compress(accelerator, model, optimizers, method)
    else:
        scalers = [scaler for scaler in _alive(torch.amp.GradScaler) if scaler.is_enabled()]
        wire = compress(model, optimizers, method, scaler=scalers[0] if len(scalers) == 1 else None)
    if wire.engine.rank == 0:
        sent, dense = wire.plan.wire_bytes / 1e6, wire.plan.dense_bytes / 1e6
        say(f"{VARIABLE}={method}: {wire.plan.method}; {sent:.3g} MB per step of {dense:.3g} MB", sys.stderr)
        if accelerator is None and wire.method.card.keeps_state:
            warnings.warn(
                f"{wire.method.name} keeps unsent values from step to step, and this program's checkpoints do not "
                "save them: a resumed run loses them", ThinwireWarning, stacklevel=2,
            )  # fmt: skip


def _alive(kind: type) -> list[Any]:
    """List the objects of ``kind`` in this process. Proxies are not asked for what they stand for."""
    return [item for item in gc.get_objects() if issubclass(type(item), kind)]

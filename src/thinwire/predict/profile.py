"""A profile is what a model computes: FLOPs of each module's forward and backward pass, and what they keep in memory.

It is counted on the meta device: the model's own code runs once, forward and backward, on tensors without storage.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from thinwire.base.errors import ThinwireError, first_line


def _grouped_mm_flops(a: Sequence[int], b: Sequence[int], *more: Any, **options: Any) -> int:
    groups = a[0] if len(a) == len(b) == 3 else 1  # else the rows of one matrix are divided among groups
    return 2 * groups * a[-2] * a[-1] * b[-1]


MORE_FLOPS = {torch.ops.aten._grouped_mm: _grouped_mm_flops}
"""Operations that torch's counter does not know: those of experts."""


@dataclass(frozen=True)
class ModuleProfile:
    """A call of a module that owns parameters, with all that is computed until the next call of such a module.

    Attributes:
        parameters: their names in the model, frozen ones among them: sharded engines gather those, too.
        forward_flops, backward_flops: per sequence; an addition and a multiplication are two.
        input_bytes: of its input, per sequence. activation_bytes: kept from its forward to its backward pass.
    """

    name: str
    parameters: tuple[str, ...]
    forward_flops: float
    backward_flops: float
    input_bytes: float
    activation_bytes: float

    @property
    def block(self) -> str:
        """The layer that it is in: its name up to the first number ("blocks.3" of "blocks.3.mlp.up"), or its name."""
        match = re.match(r"(.*?\b\d+)(\.|$)", self.name)
        return match[1] if match else self.name


@dataclass(frozen=True)
class ModelProfile:
    """A model's computing.

    Attributes:
        modules: in the order of the forward pass. A parameter that two of them share is in both.
        parameters: number of trained values.
    """

    modules: tuple[ModuleProfile, ...]
    parameters: int

    @property
    def activations(self) -> tuple[float, float]:
        """Bytes kept for the backward pass of one sequence: if each block is computed again, and if none is."""
        blocks: dict[str, list[ModuleProfile]] = {}
        for module in self.modules:
            blocks.setdefault(module.block, []).append(module)
        whole = [sum(module.activation_bytes for module in modules) for modules in blocks.values()]
        inputs = [modules[0].input_bytes for modules in blocks.values()]
        recomputed = sum(min(pair) for pair in zip(whole, inputs, strict=True)) + max(whole, default=0.0)
        return min(recomputed, sum(whole)), sum(whole)


def profile_of(model: nn.Module, inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> ModelProfile:
    """Count what ``model(*inputs)`` and its backward pass compute and keep, per sequence (row of the first input).

    Args:
        model: on the meta device. It may return a loss, anything with a ``loss``, or tensors.
        dtype: of the computing (``param_dtype`` of FSDP2); None: as the parameters.

    Raises:
        ThinwireError: the model reads values, uses none of its parameters, or is not on the meta device.
    """
    if strays := [name for name, tensor in model.named_parameters() if not tensor.is_meta]:
        raise ThinwireError(f"{strays[0]} is not on the meta device: make the model under `with torch.device('meta')`")
    sequences = next((leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim), 1)
    weights = {
        f"model.{name}": p.detach()
        .to(dtype if dtype and p.is_floating_point() else p.dtype)
        .requires_grad_(p.requires_grad)
        for name, p in model.named_parameters()
    }
    with _Count(model, weights.values()) as count:
        try:
            functional_call(_Step(model), weights, (inputs, count))
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            name, reason = type(model).__name__, first_line(error)
            raise ThinwireError(
                f"cannot profile {name} on the meta device (it must not read values): {reason}"
            ) from None
    parameters = {id(p): name for name, p in model.named_parameters()}
    return ModelProfile(
        tuple(count.profiles(parameters, sequences)),
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
    )


class _Step(nn.Module):
    """The forward and backward pass as one module: what is computed again meets the same weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Sequence[Tensor], count: _Count) -> None:
        output = self.model(*inputs)
        losses = [output.loss] if getattr(output, "loss", None) is not None else tree_leaves(output)
        total = [loss.float().sum() for loss in losses if isinstance(loss, Tensor) and loss.requires_grad]
        if not total:
            raise ThinwireError(f"nothing that {type(self.model).__name__} returns depends on a trained parameter")
        count.end_forward()
        torch.stack(total).sum().backward()


@dataclass
class _Call:
    """Counts of a call of a module."""

    name: str
    forward: int = 0
    backward: int = 0
    input_bytes: int = 0
    kept: int = 0


class _Count(TorchFunctionMode):
    """Counts by calls of modules that own parameters: a call's share goes on until the next such call begins.

    The backward pass of a call begins when the gradient of its output is known.
    """

    def __init__(self, model: nn.Module, weights: Iterable[Tensor]) -> None:
        from torch.utils.flop_counter import FlopCounterMode  # torch brings it when asked, and most runs never ask

        super().__init__()
        self._model, self._flops, self._seen_flops = model, FlopCounterMode(display=False, custom_mapping=MORE_FLOPS), 0
        self._storages = {_key(tensor): tensor for tensor in (*weights, *model.buffers())}
        self.calls = [_Call("")]
        self._current, self._in_backward = self.calls[0], False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Count:
        for name, module in self._model.named_modules():
            if name and module._parameters:  # the model itself begins with the first call
                self._stack.callback(module.register_forward_pre_hook(self._begin(name)).remove)
                self._stack.callback(module.register_forward_hook(self._await_gradient).remove)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled; it would never again compile what it meets here
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._stack.enter_context(self._flops)
        self._stack.enter_context(saved_tensors_hooks(self._keep, lambda tensor: tensor))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._enter(self._current)
        self._stack.close()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let attention keep what fused kernels keep, though it takes the other path on the meta device.

        Let experts' matrices be of any dtype, as elsewhere: one expert that takes all rows has the figures of many.
        """
        if function is torch._grouped_mm and (args[0].ndim, args[1].ndim) == (2, 3):
            return args[0] @ args[1][0]
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, output)):
            if isinstance(tensor, Tensor):
                self._keep(tensor)
        return output

    def end_forward(self) -> None:
        """Begin the backward pass, with the loss, which belongs to the last call."""
        self._enter(self._current)
        self._in_backward = True

    def profiles(self, parameters: Mapping[int, str], sequences: int) -> Iterator[ModuleProfile]:
        """Yield what was counted, the parameters of modules that were not called with the module that owns them."""
        owners: dict[str, list[str]] = {call.name: [] for call in self.calls}
        for name, module in self._model.named_modules():
            while name not in owners:
                name = name.rpartition(".")[0]
            owners[name] += [parameters[id(p)] for p in module._parameters.values() if id(p) in parameters]
        for call in self.calls:
            if call.name or owners[call.name] or call.forward:
                sizes = (call.forward, call.backward, call.input_bytes, call.kept)
                yield ModuleProfile(call.name, tuple(owners[call.name]), *(size / sequences for size in sizes))

    def _begin(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not self._in_backward:  # else it is computed again
                call = _Call(name)
                call.input_bytes = sum(leaf.numel() * leaf.itemsize for leaf in args if isinstance(leaf, Tensor))
                self.calls.append(call)
                self._enter(call)

        return hook

    def _await_gradient(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = self._current
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not self._in_backward:
                leaf.register_hook(lambda gradient: self._enter(call))

    def _enter(self, call: _Call) -> None:
        """Give what was counted since the last time to the current call; go on with ``call``."""
        flops = self._flops.get_total_flops()
        if self._in_backward:
            self._current.backward += flops - self._seen_flops
        else:
            self._current.forward += flops - self._seen_flops
        self._seen_flops, self._current = flops, call

    def _keep(self, tensor: Tensor) -> Tensor:
        if not self._in_backward and _key(tensor) not in self._storages:
            self._storages[_key(tensor)] = tensor  # as long as it lives, no other storage has its key
            self._current.kept += tensor.untyped_storage().nbytes()
        return tensor


def _key(tensor: Tensor) -> int:
    """Identify a storage, which views of it share; a meta tensor's has no address."""
    return tensor.untyped_storage()._cdata

"""The names and roles of a model's parameters: read from the model, without its wrappers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from thinwire.base.errors import ThinwireError
from thinwire.core.run import Parameter

LEFT_OUT = (
    "{name} is trained, but DDP or FSDP2 was told to leave it out, or another tensor has replaced its shard since: "
    "wrap the model without that (set and tie weights before), or freeze {name}"
)
REPLACED = (
    "{name} is another object now than at compress(), or has another name (it was set anew, or parametrized): wrap the "
    "model anew, and call compress() again"
)
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """Return a parameter's name in the user's own model, without the prefixes of compile and checkpoint wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def bare_name(name: str) -> str:
    """Return ``clean_name`` without DDP's prefix."""
    return clean_name(name).removeprefix("module.")


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Map bare names to the buffers that ``model.state_dict()`` holds: what a model is made of besides parameters."""
    saved = model.state_dict()
    return {bare_name(name): buffer for name, buffer in model.named_buffers() if name in saved}


def role_of(name: str, module: nn.Module | None) -> str:
    """Tell matrix, embedding, head, router, norm or bias by the module that holds the parameter, then by its name."""
    last = name.rsplit(".", 1)[-1]
    owner = name.rsplit(".", 2)[-2] if name.count(".") else ""
    if isinstance(module, nn.Embedding):
        return "embedding"
    if last == "bias":
        return "bias"
    if module is not None and "norm" in type(module).__name__.lower():
        return "norm"
    if owner in ("lm_head", "head", "unembed"):
        return "head"
    if "router" in name or owner == "gate":
        return "router"
    return "matrix"


Shape = tuple[int, ...]


def describe(
    model: nn.Module, shards: Mapping[int, tuple[Shape, Shape]] | None = None, *, chunks: int = 1
) -> dict[int, Parameter]:
    """Describe every trainable parameter by its id; tied ones once, under their first name.

    Raise ThinwireError if the engine shards others and not it.

    ``shards``: id(parameter) -> its shape on this rank before the engine shards it, and the shape of the engine's
    padded shard. Without ``shards``, weights are not sharded, and what travels is one of ``chunks`` parts of dim 0.
    """
    modules = dict(model.named_modules())
    described: dict[int, Parameter] = {}
    for full, tensor in model.named_parameters():
        if not tensor.requires_grad:
            continue
        name = clean_name(full)
        if shards is not None and id(tensor) not in shards:
            raise ThinwireError(LEFT_OUT.format(name=name))
        role = role_of(name, modules.get(full.rpartition(".")[0]))
        shape: Shape = tuple(tensor.shape)
        chunk = (-(-shape[0] // chunks), *shape[1:]) if shape else ()
        rank_shape, shard = (shards or {}).get(id(tensor), (shape, chunk))
        described[id(tensor)] = Parameter(name, shape, tensor.numel(), role, tensor.dtype, math.prod(shard), rank_shape)
    return described

"""The launches of kernels, by name: ours at ``ops.backends``, torch's at its dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.ops.backends import on_launch


class Launches(TorchDispatchMode):
    """Shows every launch of a kernel, while it is on, to ``launch``: "aten.add_", "thinwire.ops.quant.decode", ...

    What only makes memory or a view of it is no launch, and torch's kernels inside one of ours are part of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_kernel = False

    def launch(self, name: str, run: Callable[..., Any], args: Sequence[Any], knobs: Mapping[str, Any]) -> Any:
        """Run the kernel and return its result."""
        return run(*args, **knobs)

    def __enter__(self) -> Any:
        self._token = on_launch.set(self._launch)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        on_launch.reset(self._token)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if is_free(function):
            return function(*args, **(kwargs or {}))
        return self._launch(f"aten.{function.overloadpacket.__name__}", function, *args, **(kwargs or {}))

    def _launch(self, name: str, run: Callable[..., Any], *args: Any, **knobs: Any) -> Any:
        if self._in_kernel:
            return run(*args, **knobs)
        self._in_kernel = True
        try:
            return self.launch(name, run, args, knobs)
        finally:
            self._in_kernel = False


@functools.cache
def is_free(function: Any) -> bool:
    """Tell whether a torch operation launches no kernel: it makes memory, or another view of it."""
    schema = function._schema
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    return views or schema.name.removeprefix("aten::").startswith(("empty", "new_empty", "detach", "_unsafe_view"))


def touched(args: Sequence[Any], knobs: Mapping[str, Any], result: Any) -> float:
    """Count the bytes that a kernel reads and writes: its tensors', each once."""
    tensors = {id(leaf): leaf for leaf in tree_leaves((args, dict(knobs), result)) if isinstance(leaf, Tensor)}
    return float(sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()))

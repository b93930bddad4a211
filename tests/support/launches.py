"""A count of the kernels that a method's own code launches in a dry run."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from thinwire.ops.backends import launches
from thinwire.plan.doubles import Watch


class LaunchWatch(Watch):
    """Counts kernels by step, by name: "aten.add_", "thinwire.ops.sparse.largest". What only makes a view is none."""

    def __init__(self) -> None:
        super().__init__()
        self._counter: Counter[str] = Counter()
        self._steps: list[tuple[float, Counter[str]]] = []  # share of the steady state, launches

    def __enter__(self) -> LaunchWatch:
        self._token = launches.set(self._counter)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        launches.reset(self._token)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = super().__torch_dispatch__(function, types, args, kwargs)
        without_storage = (isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((result, args)))
        if not _is_free(function) and any(without_storage):
            self._counter[f"aten.{function.overloadpacket.__name__}"] += 1
        return result

    def end_step(self, share: float) -> None:
        super().end_step(share)
        self._steps.append((share, self._counter.copy()))
        self._counter.clear()

    def steady(self) -> Mapping[str, float]:
        """Average over the steady state; where all its steps are alike, the second, which finds memory ready."""
        shares = [share for share, _ in self._steps]
        if 1.0 in shares:
            return self._steps[shares.index(1.0) + 1][1]
        total: Counter[str] = Counter()
        for share, launched in self._steps:
            for name, count in launched.items() if share else ():
                total[name] += share * count  # type: ignore[assignment]
        return total


@functools.cache
def _is_free(function: Any) -> bool:
    """Tell whether a torch operation launches no kernel: it makes memory, or another view of it."""
    schema = function._schema
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    return views or schema.name.removeprefix("aten::").startswith(("empty", "new_empty", "detach", "_unsafe_view"))

"""What ranks need before their first step: the fork server of ``ranks.py`` has it once, every rank is born with it.

Imports alone, and the kernels that numba has on disk: nothing that a test could see, and no thread (threads are not
forked, and what they hold stays held).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType

import torch
from numba.core.dispatcher import Dispatcher

from thinwire import ops

LIBRARIES = (
    "numpy.ma", "pytest", "torch._dynamo", "torch.distributed.device_mesh", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "rich.console", "rich.table",
    "thinwire.proof.ranks", "thinwire.train.loop", "thinwire.wire",
)  # fmt: skip

torch.set_num_threads(1)
for name in LIBRARIES:
    importlib.import_module(name)


def kernels_of(module: ModuleType) -> Iterator[Dispatcher]:
    for value in vars(module).values():
        for kernel in value.values() if isinstance(value, dict) else [value]:
            if isinstance(kernel, Dispatcher) and hasattr(kernel._cache, "_cache_file"):
                yield kernel


for family in iter_modules(ops.__path__, f"{ops.__name__}."):
    if not family.ispkg:
        continue
    importlib.import_module(f"{family.name}.reference")
    if find_spec(f"{family.name}.cpu"):
        for kernel in kernels_of(importlib.import_module(f"{family.name}.cpu")):
            for signature, *_ in kernel._cache._cache_file._load_index():
                kernel.compile(signature)

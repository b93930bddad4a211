"""What ranks need before their first step: the fork server of ``ranks.py`` has it once, every rank is born with it.

Imports alone, and the kernels that numba has on disk: nothing that a test could see, and no thread (threads are not
forked, and what they hold stays held).
"""

from __future__ import annotations

import gc
import importlib
from importlib.util import find_spec
from pkgutil import iter_modules

import torch
from numba.core.dispatcher import Dispatcher

from thinwire import ops

LIBRARIES = (
    "http.server", "hypothesis", "numpy.ma", "pytest", "torch._dynamo", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh", "torch.distributed.fsdp", "torch.distributed.launcher",
    "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "rich.console", "rich.table",
    "thinwire.adapters.transport", "thinwire.proof.record", "thinwire.train.loop", "thinwire.wire",
)  # fmt: skip

torch.set_num_threads(1)
for name in LIBRARIES:
    importlib.import_module(name)


for family in iter_modules(ops.__path__, f"{ops.__name__}."):
    if not family.ispkg:
        continue
    importlib.import_module(f"{family.name}.reference")
    if find_spec(f"{family.name}.cpu"):
        importlib.import_module(f"{family.name}.cpu")

for kernel in gc.get_objects():  # wherever it is held: most are in the closure of what hands it a bucket's rows
    if issubclass(type(kernel), Dispatcher) and hasattr(kernel._cache, "_cache_file"):
        for signature, *_ in kernel._cache._cache_file._load_index():
            kernel.compile(signature)

gc.collect()
gc.freeze()  # what ranks are born with is no garbage: each full collection of a rank would look at all of it
gc.set_threshold(50_000)  # as ``conftest`` has it

"""What ranks need before their first step: the fork server of ``ranks.py`` has it once, every rank is born with it.

Imports alone, and one kernel, with which numba gets ready: nothing that a test could see, and no thread (threads are
not forked, and what they hold stays held).
"""

from __future__ import annotations

import importlib

import torch

LIBRARIES = (
    "pytest", "torch._dynamo", "torch.distributed.device_mesh", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "rich.console", "rich.table",
    "thinwire.testing", "thinwire.train.loop", "thinwire.wire",
)  # fmt: skip

torch.set_num_threads(1)
for name in LIBRARIES:
    importlib.import_module(name)

from thinwire.codecs import Int8  # noqa: E402

Int8().encode(torch.ones(1, 128), torch.empty(1, 132, dtype=torch.uint8))

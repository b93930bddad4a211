"""A step with torch and NumPy alone; then what the report says, which needs more."""

import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
wire = thinwire.compress(model, optimizer, "int8(smallest=0)")
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
assert wire.step == 1 and wire.skipped == 0
try:
    print(wire.report())
except thinwire.ThinwireError as error:
    print(error)
wire.close()
dist.destroy_process_group()

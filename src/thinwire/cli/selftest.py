"""``thinwire selftest``: does this installation work? Two ranks of this machine train small models for half a minute.

On each engine: dense against the stock engine, bit for bit; every method beside dense. Then every method under the laws
(:mod:`thinwire.proof.laws`). It needs torch and NumPy alone, and no file but the package's.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from thinwire.base.errors import ThinwireError, in_words
from thinwire.base.terminal import say
from thinwire.train.cli import start_ranks, under_torchrun

if TYPE_CHECKING:
    from thinwire.train.job.collective import Collective

HELP = """usage: thinwire selftest

Test this installation on two ranks of this machine, on its CPU, for about half
a minute (longer the first time, when kernels are compiled). Compares dense with
torch's own engines and each method with dense, and checks what methods promise.
Prints a line for each. Exit status: 0 if all passed, else 1.
For GPUs: make test-gpu, in a checkout."""
STEPS = 16
TIMEOUT_S = 60
LEAST_FALL = 0.2
"""A method's loss must have fallen by this share of what dense's has: it is told from one that does not learn."""


def main(argv: list[str]) -> int:
    """Start two ranks, or be one of them. Return the exit status."""
    if argv:
        raise ThinwireError(f"thinwire selftest takes no options, got '{' '.join(argv)}'")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if not (under_torchrun() and os.environ.get(OURS)):
        os.environ[OURS] = "1"
        print("starting two ranks on this machine's CPU; about half a minute", flush=True)
        return start_ranks(["selftest"], 2, 2)
    return as_a_rank()


OURS = "THINWIRE_SELFTEST"
"""Set for the ranks, so that a job's own variables are not taken for theirs."""


def as_a_rank() -> int:
    """Join the other rank, and check. Collective."""
    import torch
    import torch.distributed as dist

    from thinwire.methods import TABLE

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # missing extras: `thinwire env` names them
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    status = Selftest().run(TABLE)
    dist.barrier()
    dist.destroy_process_group()
    return status


class Selftest:
    """The checks on one of two ranks. Rank 0 prints."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from thinwire.network.comm import GroupComm
        from thinwire.network.ledger import Ledger
        from thinwire.train.job.collective import Collective

        assert dist.group.WORLD is not None
        self.ranks = Collective(GroupComm(dist.group.WORLD, Ledger()))
        self.began, self.failed, self.passed = time.monotonic(), 0, 0

    def run(self, methods: Sequence[Any]) -> int:
        """Check the classes ``methods`` and dense on each engine, then under the laws. Return the exit status."""
        from thinwire.proof.record import small

        for engine in ("ddp", "fsdp2"):
            stock = train(engine, None)
            self.check(f"{engine:<6} dense", partial(equals_stock, engine, stock))
            for cls in methods:
                if engine in cls.engines and cls.name not in ("dense", "none"):
                    self.check(
                        f"{engine:<6} {cls.name}", partial(learns, engine, partial(small, cls), stock, self.ranks)
                    )
        for cls in methods:
            self.check(f"laws   {cls.name}", partial(obeys, cls))
        if self.ranks.rank == 0:
            verdict = f"{self.failed} FAILED, {self.passed} well" if self.failed else f"all {self.passed} well"
            print(f"{verdict}, {time.monotonic() - self.began:.0f} s")
        return int(self.failed > 0)

    def check(self, name: str, work: Callable[[], str]) -> None:
        """Run ``work`` on both ranks; print its line, or the first rank's failure. Collective."""
        trace = ""
        try:
            outcome = True, work()
        except (AssertionError, ThinwireError) as error:
            outcome = False, str(error)
        except Exception as error:
            outcome, trace = (False, in_words(error)), traceback.format_exc()
        outcomes = self.ranks.share(outcome)  # raises where the other rank has gone, which explains the error
        if trace:
            say(trace, sys.stderr)
        well = all(fine for fine, _ in outcomes)
        self.passed, self.failed = self.passed + well, self.failed + (not well)
        if self.ranks.rank == 0:
            text = next((text for fine, text in outcomes if not fine), outcome[1])
            say(f"{'ok' if well else 'FAILED':<7}{name:<20}{text}", indent=" " * 27)


class Trained:
    """The outcome of :func:`train`: losses by step, this rank's weights as one vector, the wire's counts."""

    def __init__(self, losses: list[float], weights: Any, sent: float = 0.0, skipped: int = 0) -> None:
        self.losses, self.weights, self.sent, self.skipped = losses, weights, sent, skipped

    @property
    def fall(self) -> float:
        return self.losses[0] - self.losses[-1]


def train(engine: str, method: Any, steps: int = STEPS) -> Trained:
    """Train the same small model on both ranks, with ``method``, or (None) with torch's own engine. Collective."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    from thinwire.network.comm import local
    from thinwire.train.model.decoder import Decoder
    from thinwire.train.model.shapes import ModelConfig
    from thinwire.wire import compress

    rank = dist.get_rank()
    torch.default_generator.manual_seed(0)
    model: Any = Decoder(ModelConfig(layers=1, width=64, heads=2, context=16, vocabulary=64).check())
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(rank + 1), device="cpu")
    if engine == "ddp":
        model = DistributedDataParallel(model)
    else:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer_class = torch.optim.AdamW if method is None else method.OPTIMIZER
    optimizer = optimizer_class(model.parameters(), lr=0.2 if optimizer_class is torch.optim.SGD else 3e-3)
    wire = None if method is None else compress(model, optimizer, method, steps=steps)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([local(weight.detach()).flatten() for weight in model.parameters()])
    if wire is None:
        return Trained(losses, weights)
    trained = Trained(losses, weights, wire.plan.wire_bytes / wire.plan.dense_bytes, wire.skipped)
    wire.close()
    return trained


def equals_stock(engine: str, stock: Trained) -> str:
    """Check that dense gives the stock engine's weights. Collective."""
    import torch

    from thinwire.methods import resolve

    dense = train(engine, resolve("dense"))
    assert torch.equal(dense.weights, stock.weights), "its weights differ from those of torch's own engine"
    return f"equals torch's own engine bit for bit after {STEPS} steps"


def learns(engine: str, make: Callable[[], Any], stock: Trained, ranks: Collective) -> str:
    """Check that a method learns beside dense and leaves both ranks with the same weights. Collective."""
    method = make()
    trained = train(engine, method)
    assert trained.skipped == 0, f"{trained.skipped} steps were skipped"
    assert trained.fall > LEAST_FALL * stock.fall, f"its loss fell by {trained.fall:.3f}, dense's by {stock.fall:.3f}"
    digest = hashlib.sha256(trained.weights.numpy().tobytes()).hexdigest()
    assert engine != "ddp" or len(set(ranks.share(digest))) == 1, "ranks ended with other weights"
    return f"loss {trained.losses[-1]:.3f} (dense {stock.losses[-1]:.3f}), {trained.sent:.1%} of dense's bytes"


def obeys(cls: Any) -> str:
    """Check the laws on virtual ranks, half of them on each rank."""
    import torch.distributed as dist

    from thinwire.proof.laws import check_laws
    from thinwire.proof.record import Setup

    setup = Setup(("all_reduce", "reduce_scatter")[dist.get_rank()], 3)
    if setup.engine in cls.engines:
        check_laws(cls, setups=[setup])
    return "ranks alike, promise kept, bytes as planned"

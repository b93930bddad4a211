"""Host time of an operation's launches, which a small model on a fast GPU is bound by: Triton's own way, and ours.

    python benchmarks/speed/host_launch.py              # on a GPU, if there is one, or with a driver that does nothing
    python benchmarks/speed/host_launch.py --profile largest

Of each operation as the steps of `int8` and `trickle` call it: microseconds of the calling thread, per launch of ours,
without waiting for the device. "As Triton launches" goes through ``kernel[grid](...)`` in every call, "bound" through
``ops/gpu.py`` as it is. Without a GPU it needs Triton, and the driver's own part (2 to 4 us) is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import importlib
import os
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget

from thinwire.ops import backends, direction, gpu, norms, quant, rows, sparse, steps

CALLS = 100
"""Calls between two looks at the clock: fewer launches than a GPU's queue takes before the host waits."""


class _Utils:
    """What Triton asks of a driver's C library."""

    def load_binary(self, *binary: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024

    def unload_module(self, module: Any) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class StubDriver:
    """A driver for Triton, of an H100, that compiles and launches nothing."""

    utils = _Utils()

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> None: ...

    @staticmethod
    def is_active() -> bool:
        return True


@contextlib.contextmanager
def a_device() -> Any:
    """Yield a GPU, or the CPU with operations as a GPU has them, and a driver that does nothing."""
    if torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device())
        return
    triton.runtime.driver.set_active(StubDriver())
    load = functools.cache(lambda family, module, needs: importlib.import_module(f"{family}.triton"))
    with mock.patch.object(backends, "_load", load), mock.patch.object(torch.cuda, "device_of", contextlib.nullcontext):
        yield torch.device("cpu")


def cases(device: torch.device) -> dict[str, Callable[[], object]]:
    """Operations on a bucket of 8 rows and 12 tensors, the size of which the host does not feel."""
    count, width, tensors = 8, 4096, 12
    n, k = width * tensors, 41
    of: dict[str, Any] = {"dtype": torch.float32, "device": device}
    values, more, out = (torch.ones(count, n, **of) for _ in range(3))
    codes, scales = torch.zeros(count, n, dtype=torch.int8, device=device), torch.zeros(count, n // 128, **of)
    lists = tuple(sparse.ListSegment(i * width, width, k, i * 64) for i in range(tensors))
    m = 64 * tensors
    positions, payload = torch.zeros(count, m, dtype=torch.int32, device=device), torch.zeros(count, m, **of)
    wire = torch.zeros(count, sparse.packed_bytes(lists), dtype=torch.uint8, device=device)
    sent = torch.zeros(count, m, dtype=torch.int8, device=device), torch.zeros(count, m // 64, **of)
    quantized = sparse.WireValues(*sent, quant.Format(8, 64))
    starts = range(0, n, width)
    copies = [rows.CopySegment(start, width * count, width, start, width, width, n, count) for start in starts]
    table, flat = rows.CopyTable(copies, device), torch.zeros(count * n, **of)
    adam = [direction.DirectionSegment(i * width, width, i, 0.999, 1e-8) for i in range(tensors)]
    lr, factor = torch.ones(tensors, **of), torch.ones((), **of)
    columns = torch.arange(tensors, device=device)
    statistics = norms.Statistics(torch.zeros(4, tensors, **of), torch.zeros(4, tensors, **of), lr, 10.0, 1.0, 0.9)
    weights, changes = list(flat.split(width * count)), list(out.view(-1).split(width * count))
    format8 = quant.Format(8, 128)
    return {
        "quantize": lambda: quant.quantize(values, format8, codes, scales),
        "dequantize_sum": lambda: quant.dequantize_sum(codes, scales, format8, out[0], 0.125),
        "requantize": lambda: quant.requantize(codes, scales, format8, codes[:1], scales[:1], 0.125),
        "sum_rows": lambda: quant.sum_rows(values, out[0], 0.125),
        "pack": lambda: rows.pack(flat, table, values.view(-1)),
        "bound": lambda: norms.bound(flat, table, values.view(-1), columns, statistics),
        "unpack": lambda: rows.unpack(values.view(-1), table, flat),
        "direction": lambda: direction.direction(
            values, more, out, None, None, adam, lr=lr, scale=lr, factor=factor, beta1=0.0
        ),
        "largest": lambda: sparse.largest(values, more, lists, out, positions, payload, wire, None, quantized),
        "decode": lambda: sparse.decode(wire, quantized, lists, out[:1], 0.125, positions=positions, decoded=None),
        "take": lambda: steps.take(weights, changes, [1.0] * tensors),
    }  # fmt: skip


class NeverBound(dict[Any, Any]):
    """Lets every launch find out anew what to run."""

    def get(self, key: Any, default: Any = None) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the least of ten measurements of the host's time per call: what others do on the machine adds to it."""
    best = float("inf")
    for _ in range(10):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        best = min(best, time.thread_time() - start)
    return best / CALLS * 1e6


def launches_of(call: Callable[[], object]) -> int:
    """Count the launches of ours in a call."""
    found = 0
    launch = gpu.launch

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal found
        found += 1
        launch(*arguments, **options)

    with contextlib.ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("thinwire.ops.")]:
            if getattr(module, "launch", None) is launch:
                stack.enter_context(mock.patch.object(module, "launch", counted))
        call()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="one of the operations: where its time goes, by function")
    options = parser.parse_args()
    with a_device() as device:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a driver that does nothing"
        print(f"{name}, torch {torch.__version__}, Triton {triton.__version__}\n")
        print("| operation | launches | us per launch, as Triton launches | us per launch, bound |")
        print("|---|--:|--:|--:|")
        for name, call in cases(device).items():
            if options.profile not in (None, name):
                continue
            call()
            count = launches_of(call)
            with mock.patch.object(gpu, "_bound", NeverBound()):
                slow = microseconds(call, device)
            print(f"| `{name}` | {count} | {slow / count:.1f} | {microseconds(call, device) / count:.1f} |", flush=True)
            if options.profile:
                profile = cProfile.Profile()
                profile.enable()
                microseconds(call, device)
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()

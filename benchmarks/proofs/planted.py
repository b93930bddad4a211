"""Faults of the CUDA path, put back one at a time: which test of a machine without a GPU turns red?

    python benchmarks/proofs/planted.py [--only 2 7]

Each of the ten was in the project once. Here it is planted in a copy of the source, and the tests that stand for it run
on that copy, with every case everywhere. A fault that no test notices is a fault of the tests: it makes the status 1.
Those of Triton's launches need Triton, and are said to be left out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """What is wrong, and in ``file``, where ``right`` stands once or more, what stands instead.

    ``tests``: pytest's words for what must turn red; ``triton``: they need it.
    """

    what: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    triton: bool = False


FAULTS = (
    Fault(
        "an all-reduce of bits, which NCCL lacks", "comm.py",
        "            dist.all_reduce(tensor, _OPS[op], group=self.group)\n",
        "            bits = tensor.dtype == torch.uint8\n"
        "            dist.all_reduce(tensor, dist.ReduceOp.BOR if bits else _OPS[op], group=self.group)\n",
        ("tests/engines/test_strict.py", "-k", "every_method and ddp-2"),
    ),
    Fault(
        "HSDP: the guard chains one scalar between two streams", "guard.py",
        "        self._residues.append(total - total)\n",
        "        self._residues[:] = [sum(self._residues, total - total)]\n",
        ("tests/engines/test_streamorder.py", "-k", "unordered and hsdp and dense"),
    ),
    Fault(
        "Triton launches on the current device, whatever the tensors' is", "ops/gpu.py",
        "    with torch.cuda.device_of(next(argument for argument in arguments if isinstance(argument, Tensor))):\n",
        "    if True:\n",
        ("tests/ops/test_triton.py", "-k", "on_the_device_of_its_tensors"), triton=True,
    ),
    Fault(
        "under a GradScaler, state keeps the scale", "wire.py",
        "        if scaler is not None and card.keeps_state:\n", "        if False:\n",
        ("tests/core/test_edges_finite.py", "-k", "scale_that_doubles"),
    ),
    Fault(
        "loaded state is given away while a stream still copies it", "state.py",
        "            devices.keep(loose)\n", "",
        ("tests/engines/test_streamorder.py", "-k", "unordered and ddp-powersgd"),
    ),
    Fault(
        "bytes are counted by the group's name, not by the device's backend", "comm.py",
        "    return dict(pairs).get(device.type, pairs[-1][-1])\n", "    return pairs[0][-1]\n",
        ("tests/network/test_backends.py", "-k", "bytes_are"),
    ),
    Fault(
        "FSDP2 and HSDP on CUDA: the wait for gradients is not measured", "integrations/fsdp2.py",
        "            self.ledger.between(\"exposed\", *self.tail)\n", "            pass\n",
        ("tests/engines/test_streamorder.py", "-k", "told_by_events"),
    ),
    Fault(
        "FSDP2 with bfloat16 weights: what scape cannot do is not refused at once", "methods/atmask.py",
        "        if weights == \"masked\" and not self._wanted:\n", "        if False:\n",
        ("tests/papers/test_scape.py", "-k", "gathered_whole_or_refused"),
    ),
    Fault(
        "positions are made into masks by plain torch, which waits for the device", "ops/mask/triton.py",
        "        launch(_from_indices, grid, positions, words, words.shape[1] * reference.WORD, k, BLOCK=BLOCK)\n",
        "        reference.from_indices(positions, words)\n",
        ("tests/plan/test_budgets.py", "-k", "budget and topk"),
    ),
    Fault(
        "kernels are compiled anew for sizes that are 1 or a multiple of 16", "ops/gpu.py",
        "    return triton.jit(do_not_specialize=given, do_not_specialize_on_alignment=given)(function)\n",
        "    return triton.jit(function)\n",
        ("tests/ops/test_triton.py", "-k", "machine_code and 80"), triton=True,
    ),
)  # fmt: skip


def planted(fault: Fault, box: Path) -> Path:
    """A copy of the source in ``box``, with ``fault``."""
    copy = box / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("*.egg-info"))
    file = copy / "thinwire" / fault.file
    text = file.read_text()
    if fault.right not in text:
        raise SystemExit(f"{fault.file} no longer says:\n{fault.right}")
    file.write_text(text.replace(fault.right, fault.wrong))
    return copy


def verdict(fault: Fault) -> tuple[str, str]:
    """ "red", "green" or why it was not tried; and the last line that pytest says."""
    if fault.triton and importlib.util.find_spec("triton") is None:
        return "not tried", "triton is not installed"
    with tempfile.TemporaryDirectory() as box:
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "THINWIRE_TESTS": "all",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(planted(fault, Path(box))), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", *fault.tests]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = done.stdout.strip().splitlines()[-1:] or [done.stderr.strip()[-200:]]
    return {0: "green", 1: "red"}.get(done.returncode, f"pytest ended with {done.returncode}"), said[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", default=range(1, len(FAULTS) + 1), help="their numbers")
    unseen = 0
    print("| | fault | tests | | |\n|--:|---|---|---|---|")
    for number in parser.parse_args().only:
        fault = FAULTS[number - 1]
        found, said = verdict(fault)
        unseen += found not in ("red", "not tried")
        print(f"| {number} | {fault.what} | `pytest {' '.join(fault.tests)}` | {found} | {said} |", flush=True)
    sys.exit(unseen > 0)


if __name__ == "__main__":
    main()

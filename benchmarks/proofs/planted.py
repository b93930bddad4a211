"""Faults of the CUDA path, put back one at a time: which test of a machine without a GPU turns red?

    python benchmarks/proofs/planted.py [--only 2 7]        # docs/data/planted.txt is what it prints

The first ten and those from 28 to 34 were in the project once; 11 to 27 are what the checker of streams is there to
see, and the last six what a launch may hand to CUDA. Each is planted in a copy of the source, and the tests that stand
for it run on that copy, with every case everywhere; and once on the source as it is, where they must be green. A fault
that no test notices is a fault of the tests: it makes the status 1. Those of Triton's launches need Triton, and are
said to be left out where it is not installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

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
        "an all-reduce of bits, which NCCL lacks", "core/exchange.py",
        "        comm.all_to_all(received, chunks)\n        remaining = comm.size\n",
        "        dist = torch.distributed\n"
        "        dist.all_reduce(chunks, dist.ReduceOp.BOR, group=comm.group)\n        return result\n"
        "        remaining = comm.size\n",
        ("tests/engines/test_strict.py", "-k", "every_method and ddp-2"),
    ),
    Fault(
        "HSDP: the guard chains one scalar between two streams", "network/guard.py",
        "        self._residues.append(total - total)\n",
        "        self._residues[:] = [sum(self._residues, total - total)]\n",
        ("tests/engines/test_streamorder.py", "-k", "tell_the_guard"),
    ),
    Fault(
        "Triton launches on the current device, whatever the tensors' is", "ops/gpu.py",
        "    if index >= 0 and index != torch.accelerator.current_device_index():\n",
        "    if False:\n",
        ("tests/ops/test_triton.py", "-k", "on_the_device_of_its_tensors"), triton=True,
    ),
    Fault(
        "under a GradScaler, state keeps the scale", "wire.py",
        "        if scaler is not None and run.scaled and card.keeps_state:\n", "        if False:\n",
        ("tests/core/test_edges_finite.py", "-k", "scale_that_doubles"),
    ),
    Fault(
        "loaded state is given away while a stream still copies it", "core/state.py",
        "            devices.keep(loose)\n", "",
        ("tests/engines/test_streamorder.py", "-k", "unordered and ddp-powersgd"),
    ),
    Fault(
        "bytes are counted by the group's name, not by the device's backend", "network/comm.py",
        "    return dict(pairs).get(device.type, pairs[-1][-1])\n", "    return pairs[0][-1]\n",
        ("tests/network/test_backends.py", "-k", "bytes_are"),
    ),
    Fault(
        "FSDP2 and HSDP on CUDA: the wait for gradients is not measured", "engines/fsdp2.py",
        "            self.ledger.between(\"exposed\", *self.tail)\n", "            pass\n",
        ("tests/engines/test_streamorder.py", "-k", "told_by_events"),
    ),
    Fault(
        "FSDP2 with bfloat16 weights: what scape cannot do is not refused at once", "methods/parts/atmask.py",
        "        if weights == \"masked\" and narrow:\n", "        if False:\n",
        ("tests/papers/test_scape.py", "-k", "gathered_whole_or_refused"),
    ),
    Fault(
        "positions are made into masks by plain torch, which waits for the device", "ops/mask/triton.py",
        "        launch(_from_indices, grid, positions, words, words.shape[1] * reference.WORD, k, BLOCK=BLOCK)\n",
        "        reference.from_indices(positions, words)\n",
        ("tests/plan/test_budgets.py", "-k", "budget and tagc"),
    ),
    Fault(
        "kernels are compiled anew for sizes that are 1 or a multiple of 16", "ops/gpu.py",
        "    return triton.jit(do_not_specialize=runtime_arguments, "
        "do_not_specialize_on_alignment=runtime_arguments)(function)\n",
        "    return triton.jit(function)\n",
        ("tests/ops/test_triton.py", "-k", "machine_code and 80"), triton=True,
    ),
    Fault(
        "DDP's side stream begins without the stream that computes", "core/worker.py",
        "        self._stream.wait_stream(streams.current_stream(device))\n", "",
        ("tests/engines/test_streamorder.py", "-k", "unordered and ddp-dense"),
    ),
    Fault(
        "weights leave before the optimizer's step is over", "engines/fsdp2_weights.py",
        "        stream.wait_stream(backend.current_stream(shard.device))\n", "",
        ("tests/engines/test_streamorder.py", "-k", "unordered and fsdp2-sdp4bit"),
    ),
    Fault(
        "the copy of the shard that leaves ahead is given away while it is read", "engines/fsdp2_weights.py",
        "            devices.keep(shard)\n", "",
        ("tests/engines/test_streamorder.py", "-k", "unordered and fsdp2-sdp4bit"),
    ),
    Fault(
        "HSDP's shard is given away while the hook's stream reads it", "engines/fsdp2_module.py",
        "            devices.keep(shard)  # torch before 2.15 releases the buffer while this stream still reads it\n",
        "",
        ("tests/engines/test_streamorder.py", "-k", "unordered and hsdp-bf16"),
    ),
    Fault(
        "pinned memory is written again while it is copied, through numpy", "base/device.py",
        "    staged = host_memory((len(values),), device, dtype)\n"
        "    staged.numpy()[:] = values  # the host alone writes\n",
        "    kept, key = upload.__dict__.setdefault('kept', {}), (len(values), device, dtype)\n"
        "    staged = kept[key] = kept[key] if key in kept else host_memory(key[:1], device, dtype)\n"
        "    staged.numpy()[:] = values\n",
        ("tests/engines/test_streamorder.py", "-k", "unordered and ddp"),
    ),
    Fault(
        "the same, by torch's own copy", "base/device.py",
        "    staged = host_memory((len(values),), device, dtype)\n"
        "    staged.numpy()[:] = values  # the host alone writes\n",
        "    kept, key = upload.__dict__.setdefault('kept', {}), (len(values), device, dtype)\n"
        "    staged = kept[key] = kept[key] if key in kept else host_memory(key[:1], device, dtype)\n"
        "    staged.copy_(staged.new_tensor(list(values)))\n",
        ("tests/engines/test_streamorder.py", "-k", "unordered and ddp"),
    ),
    Fault(
        "offloaded state is written to the pinned memory that is being read", "core/state.py",
        "            spare = self._staged[key] = self._other(key)\n",
        "            spare = self._staged[key] = self._current[key] if kind in self._offload else self._other(key)\n",
        ("tests/engines/test_streamorder.py", "-k", "unordered and scape or without_the_guard"),
    ),
    Fault(
        "the host reads TAGC's counts while they are on their way", "methods/papers/tagc.py",
        "            copied.synchronize()  # over, unless nobody has waited for the flag of the step that counted\n",
        "            pass\n",
        ("tests/engines/test_streamorder.py", "-k", "without_the_guard"),
    ),
    Fault(
        "a loaded replica is given away while the stream of gathers copies it", "core/weights.py",
        "            devices.keep(saved)  # loaded on another stream, and replaced below\n", "",
        ("tests/engines/test_streamorder.py", "-k", "unordered and fsdp2-shared-sdp4bit"),
    ),
    Fault(
        "the host reads offloaded state before copies are over", "core/state.py",
        "            devices.wait(bucket.device)  # copies to CPU memory may be under way\n", "            pass\n",
        ("tests/engines/test_streamorder.py", "-k", "unordered and scape or without_the_guard"),
    ),
    Fault(
        "DDP's future is completed on the stream that computes", "core/worker.py",
        "            future.set_result(result)\n        return future",
        "        future.set_result(result)\n        return future",
        ("tests/engines/test_streamorder.py", "-k", "unordered and ddp-dense"),
    ),
    Fault(
        "what FSDP2 has read is marked before it has", "engines/fsdp2_module.py",
        "        original()\n        self.copied = devices.mark(self.device)\n",
        "        self.copied = devices.mark(self.device)\n        original()\n",
        ("tests/engines/test_streamorder.py", "-k", "unordered and fsdp2"),
    ),
    Fault(
        "a table is copied to the device once, for all streams", "base/device.py",
        "dtype, stream_key(device))\n", "dtype, None)\n",
        ("tests/engines/test_streamorder.py", "-k", "unordered or two_streams"),
    ),
    Fault(
        "seeds are copied once, for all streams", "base/random.py",
        "        stream = device if backend is None else backend.current_stream(device)\n", "        stream = device\n",
        ("tests/engines/test_streamorder.py", "-k", "unordered or two_streams"),
    ),
    Fault(
        "the places of programs are copied once, for all streams", "ops/programs.py",
        "        return cached(devices.stream_key(device), device, *arguments)\n",
        "        return cached(None, device, *arguments)\n",
        ("tests/engines/test_streamorder.py", "-k", "unordered or two_streams"),
    ),
    Fault(
        "the message of SCAPE's masks is not waited for", "methods/parts/masks.py",
        "            self._work.wait()\n", "            pass\n",
        ("tests/engines/test_streamorder.py", "-k", "unordered and scape"),
    ),
    Fault(
        "the time between events is read before they are over", "network/ledger.py",
        "            if start.query() and end.query():\n", "            if True:\n",
        ("tests/engines/test_streamorder.py", "-k", "without_the_guard"),
    ),
    Fault(
        "ranks talk on the current device, cuda:0 on all of them", "network/comm.py",
        "        return cls(group, Ledger(), device=\"cpu\" if _carries_cpu_tensors(group) else device)\n",
        "        return cls(group, Ledger(), device=\"cpu\" if _carries_cpu_tensors(group) else \"cuda\")\n",
        ("tests/network/test_backends.py", "tests/core/test_agreement.py"),
    ),
    Fault(
        "FSDP2's exchange is taken for a CPU's while the model is on meta", "wire.py",
        "    if any(parameter.is_meta for parameter in model.parameters()):\n", "    if False:\n",
        ("tests/engines/test_engines.py", "-k", "refused_by_name"),
    ),
    Fault(
        "TAGC waits for the counts that it has just sent to the host", "methods/papers/tagc.py",
        "        copied = devices.mark(bucket.device)\n",
        "        copied = devices.mark(bucket.device)\n"
        "        self._copied.update(dict.fromkeys((of.name for of in bucket.segments), copied))\n",
        ("tests/engines/test_streamorder.py", "-k", "unordered and tagc"),
    ),
    Fault(
        "a grid is larger than CUDA's", "ops/gpu.py",
        "    if max(grid) > GRID[-1] and any(size > limit for size, limit in zip(grid, GRID, strict=False)):\n",
        "    if False:\n",
        ("tests/ops/test_triton.py", "-k", "grid"),
    ),
    Fault(
        "the worker's stream waits behind the model's kernels", "core/worker.py",
        "streams.Stream(device, priority=-1)", "streams.Stream(device)",
        ("tests/engines/test_streamorder.py", "-k", "go_before"),
    ),
    Fault(
        "the stream that computes waits for the network before each module's gradients", "engines/fsdp2.py",
        "        return 2 if settable", "        return 1 if settable",
        ("tests/engines/test_streamorder.py", "-k", "computes_on"),
    ),
    Fault(
        "GPUs of unlike kinds train with PowerSGD", "methods/baselines/powersgd.py",
        "same_arithmetic=True, ", "", ("tests/core/test_hosts.py", "-k", "unlike_gpus"),
    ),
    Fault(
        "a kernel goes to the stream that was current when it was first launched", "ops/gpu.py",
        "        stream = triton.runtime.driver.active.get_current_stream(index)\n", "        stream = 0\n",
        ("tests/ops/test_triton.py", "-k", "hand_cuda"), triton=True,
    ),
    Fault(
        "machine code that was loaded on one GPU is launched on another", "ops/gpu.py",
        "            _launch(kernel, grid, flattened, (index, *kinds), constants, fused)\n    else:\n",
        "            _launch(kernel, grid, flattened, (0, *kinds), constants, fused)\n    else:\n",
        ("tests/ops/test_triton.py", "-k", "hand_cuda"), triton=True,
    ),
    Fault(
        "what was compiled for one dtype is launched on another", "ops/gpu.py",
        "            kinds.append(argument.dtype)\n", "            kinds.append(Tensor)\n",
        ("tests/ops/test_triton.py", "-k", "hand_cuda"), triton=True,
    ),
    Fault(
        "a profiler's hooks are not told of launches", "ops/gpu.py",
        "        has_hooks = _has_hooks()\n", "        has_hooks = False\n",
        ("tests/ops/test_triton.py", "-k", "hand_cuda or looked_up_once"),
    ),
    Fault(
        "the error of a profiler's hook is taken for Triton's, and the kernel runs twice", "ops/gpu.py",
        "        if not has_hooks:\n            bound.launch(grid, index, arguments)\n",
        "        call = bound.told if has_hooks else functools.partial(bound.launch, index=index)\n"
        "        call(grid, arguments=arguments)\n        return True\n",
        ("tests/ops/test_triton.py", "-k", "hand_cuda"), triton=True,
    ),
    Fault(
        "a variant of a kernel is compiled before the first step, and loaded in the one that meets it", "ops/gpu.py",
        "                _bind(kernel, variant, kinds, len(arguments), {**constants, name: value})\n", "",
        ("tests/ops/test_triton.py", "-k", "hand_cuda"), triton=True,
    ),
)  # fmt: skip


def planted(fault: Fault | None, box: Path) -> Path:
    """A copy of the source in ``box``, with ``fault``."""
    copy = box / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("*.egg-info"))
    if fault is None:
        return copy
    file = copy / "thinwire" / fault.file
    text = file.read_text()
    if fault.right not in text:
        raise SystemExit(f"{fault.file} no longer says:\n{fault.right}")
    file.write_text(text.replace(fault.right, fault.wrong))
    return copy


@functools.cache
def verdict(fault: Fault | None, tests: tuple[str, ...]) -> tuple[str, str]:
    """ "red", "green" or how else pytest ended on ``tests``, and its last line. None: nothing is planted."""
    with tempfile.TemporaryDirectory() as box:
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "THINWIRE_TESTS": "all",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(planted(fault, Path(box))), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", *tests]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = done.stdout.strip().splitlines()[-1:] or [done.stderr.strip()[-200:]]
    return {0: "green", 1: "red"}.get(done.returncode, f"pytest ended with {done.returncode}"), said[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", default=range(1, len(FAULTS) + 1), help="their numbers")
    unseen = 0
    installed = importlib.util.find_spec("triton") is not None
    tried = f"torch {torch.__version__}, Triton {importlib.metadata.version('triton') if installed else 'none'}"
    print(f"python benchmarks/proofs/planted.py      # {tried}, {time.strftime('%Y-%m-%d')}\n")
    print("| | fault | tests | | |\n|--:|---|---|---|---|", flush=True)
    for number in parser.parse_args().only:
        fault = FAULTS[number - 1]
        if fault.triton and not installed:
            found, said = "not tried", "triton is not installed"
        else:
            found, said = verdict(fault, fault.tests)
            if found == "red" and verdict(None, fault.tests)[0] != "green":
                found = "red without it, too"
        unseen += found not in ("red", "not tried")
        print(f"| {number} | {fault.what} | `pytest {' '.join(fault.tests)}` | {found} | {said} |", flush=True)
    sys.exit(unseen > 0)


if __name__ == "__main__":
    main()

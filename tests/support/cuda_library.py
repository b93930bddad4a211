"""A stand-in for ``libcuda.so.1`` that launches nothing and says of each launch what CUDA would have been handed.

    TRITON_INTERPRET=0 python tests/support/cuda_library.py FOLDER      # needs Triton and gcc, and no GPU

Above it everything is real: Triton's runner, its launcher in C, which packs the arguments, and the machine code of an
H100. So it is seen that a launch which calls compiled code directly hands over what Triton's own does, of every kernel,
and the pointers, sizes, stream and device of its own call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import re
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
import triton
from torch import Tensor

import aot
from thinwire.ops import backends
from thinwire.ops import gpu as ops
from thinwire.ops.backends import every_variant
from thinwire.ops.gpu import launch
from thinwire.ops.quant import triton as quant

SOURCE = r"""
#include "cuda.h"
#include <string.h>

typedef void (*Told)(CUfunction, const unsigned*, CUstream, void**);
static Told told;
static size_t functions = 0;
static int unloaded = 0;
void double_told(Told to) { told = to; }
int double_unloaded(void) { return unloaded; }

CUresult cuGetErrorString(CUresult error, const char** words) { *words = "an error of the stand-in"; return 0; }
CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDriverGetVersion(int* version) { *version = 13000; return 0; }
CUresult cuDeviceGet(CUdevice* found, int ordinal) { *found = ordinal; return 0; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice of) {
  *value = which == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK ? 49152 :
           which == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 :
           which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132 :
           which == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 :
           which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
  return 0;
}
CUresult cuCtxGetCurrent(CUcontext* context) { *context = (CUcontext)16; return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
CUresult cuCtxGetDevice(CUdevice* found) { *found = 0; return 0; }
CUresult cuCtxGetLimit(size_t* value, CUlimit which) { *value = 1 << 20; return 0; }
CUresult cuCtxSetLimit(CUlimit which, size_t value) { return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice of) { *context = (CUcontext)16; return 0; }
CUresult cuModuleLoadData(CUmodule* module, const void* image) { *module = (CUmodule)(++functions); return 0; }
CUresult cuModuleUnload(CUmodule module) { unloaded++; return 0; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  *function = (CUfunction)module;  /* one function to a module */
  return 0;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return 0; }
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction function, const CUlaunchConfig* config) { return 801; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) { *status = 0; return 0; }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr address) {
  memcpy(value, &address, sizeof address);
  return 0;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra) {
  told(function, &config->gridDimX, config->hStream, arguments);
  return 0;
}
"""
"""``gridDimX`` begins seven unsigned integers: the grid, the block, bytes of shared memory."""


class Launch(NamedTuple):
    """What CUDA was handed: its number of the function, the grid, threads, bytes of shared memory, stream, arguments.

    ``arguments``: what lies where each pointer leads, as bytes of the width that the machine code takes.
    """

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    stream: int
    arguments: tuple[bytes, ...]


def build(folder: Path) -> None:
    """Compile the library into ``folder``, with the declarations that come with Triton."""
    source, library = folder / "libcuda.c", folder / "libcuda.so.1"
    source.write_text(SOURCE)
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    words = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", f"-I{include}", source, "-o", library]
    subprocess.run(list(map(str, words)), check=True)


def start(folder: Path) -> NoReturn:
    """Build the library in ``folder``, and become :func:`main`: a loader reads where it is before a program begins."""
    build(folder)
    own = {"LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    os.execve(sys.executable, [sys.executable, __file__, str(folder)], {**os.environ, **own})


def widths(ptx: str) -> tuple[int, ...]:
    """Return the bytes of each argument, as the machine code declares them."""
    [declared] = re.findall(r"\.visible \.entry [^(]+\(([^)]*)\)", ptx)
    return tuple(int(bits) // 8 for bits in re.findall(r"\.param \.[bsuf](\d+)", declared))


class Gpu:
    """Two GPUs, as Triton and ``ops/gpu.py`` ask torch for them, and the launches on them.

    Attributes:
        current: the number of the current one; of: of that on which all tensors are. streams: the current streams.
        launches: in order. widths: of each function that was loaded, the bytes of its arguments.
    """

    def __init__(self, library: Path) -> None:
        self.current, self.of, self.streams = 0, 0, [0, 0]
        self.launches: list[Launch] = []
        self.widths: dict[int, tuple[int, ...]] = {}
        kind = ctypes.CFUNCTYPE(
            None, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p)
        )
        self._told = kind(self._tell)  # kept: C calls it
        self.library = ctypes.CDLL(str(library))
        self.library.double_told(self._told)

    def _tell(self, function: int, config: Any, stream: int | None, arguments: Any) -> None:
        (x, y, z, threads), shared = config[0:4], config[6]
        values = [ctypes.string_at(arguments[number], width) for number, width in enumerate(self.widths[function])]
        self.launches.append(Launch(function, (x, y, z), threads, shared, stream or 0, tuple(values)))

    def _loaded(self, module: int, function: int, name: str, files: Mapping[str, str], hash: str) -> None:
        [ptx] = (Path(path) for path in files.values() if path.endswith(".ptx"))
        self.widths[function] = widths(ptx.read_text())

    @contextlib.contextmanager
    def _device_of(self, tensor: Tensor) -> Iterator[None]:
        before, self.current = self.current, self.of
        yield
        self.current = before

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """Let tensors be on these, and Triton's own driver for CUDA be over the library."""
        from triton.backends.nvidia import driver as nvidia

        driver = nvidia.CudaDriver.__new__(nvidia.CudaDriver)
        driver.utils, driver.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
        driver.get_device_capability = lambda index=0: (9, 0)
        driver.get_current_device = lambda: self.current
        driver.get_current_stream = lambda index: self.streams[index]
        triton.knobs.runtime.kernel_load_end_hook.add(self._loaded)
        triton.runtime.driver.set_active(driver)
        with (
            mock.patch.object(torch.Tensor, "get_device", lambda tensor: self.of),
            mock.patch.object(torch.accelerator, "current_device_index", lambda: self.current),
            mock.patch.object(torch.cuda, "device_of", self._device_of),
        ):
            yield


def packed(value: Any, width: int) -> bytes:
    """Return the ``width`` bytes that a kernel is handed for ``value``: an address, an integer, or a float."""
    if isinstance(value, float):
        return struct.pack({4: "<f", 8: "<d"}[width], value)
    integer: int = value.data_ptr() if isinstance(value, Tensor) else value
    return (integer % 2 ** (8 * width)).to_bytes(width, "little")


DTYPES = {
    "*fp32": torch.float32, "*i64": torch.int64, "*i32": torch.int32, "*u8": torch.uint8, "*i8": torch.int8,
    "*i16": torch.int16, "*fp64": torch.float64, "*bf16": torch.bfloat16,
}  # fmt: skip


def arguments_of(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], turn: int) -> list[Any]:
    """Make arguments of the types of a case (``aot.cases``), other ones in each ``turn``: 1, 16 and 17 among them."""
    made: list[Any] = []
    for number, name in enumerate(kernel.arg_names[: len(kernel.arg_names) - len(kernel.constexprs)]):
        kind = types.get(name, aot.TYPES.get(name, "i32"))
        if name in constants:
            made.append(None)
        elif kind.startswith("*"):
            made.append(torch.zeros(64 + turn, dtype=DTYPES[kind])[turn:])
        else:
            by_kind = {"fp32": 0.5 + number + turn, "i64": 2**40 + number + turn, "i32": 1 + 15 * turn + turn // 2}
            made.append(by_kind[kind])
    return made


def check_kernels(gpu: Gpu) -> int:
    """Launch every kernel three times, first as Triton does; return how many there were."""
    known: set[int] = set()
    cases = list(aot.cases())
    for kernel, types, given in cases:
        constants = {name: value for name, value in given.items() if value is not None and name != "fused"}
        functions = set()
        for turn in range(3):
            gpu.launches.clear()
            gpu.streams[0] = 16 * turn
            arguments = arguments_of(kernel, types, given, turn)
            launch(kernel, (3 + turn, 2), *arguments, fused=given.get("fused", False), **constants)
            [of] = gpu.launches
            handed = [value for value in arguments if value is not None]
            widths = gpu.widths[of.function]
            assert len(widths) == len(handed) + 2, f"{kernel} takes {widths}, and is handed {handed}"
            expected = [*map(packed, handed, widths), bytes(8), bytes(8)]  # no scratch memory
            assert list(of.arguments) == expected, f"{kernel}, launch {turn}: {of.arguments}, not {expected}"
            assert (of.grid, of.stream) == ((3 + turn, 2, 1), 16 * turn), of
            assert of.threads == 32 * constants.get("num_warps", 4), of
            functions.add((of.function, of.shared))
        assert len(functions) == 1, f"{kernel} was compiled anew for other sizes or addresses, or has other memory"
        assert of.function not in known, f"{kernel}: machine code of other types or constants"
        known.add(of.function)
    assert all(ops._bound.values()), "all later launches are direct"
    return len(cases)


def check_operations(gpu: Gpu) -> None:
    """Call what steps call, as steps do: later calls launch the same machine code with the same grids."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "speed"))
    from host_launch import cases

    load = functools.cache(lambda family, module, needs: importlib.import_module(f"{family}.triton"))
    with mock.patch.object(backends, "_load", load):
        for name, call in cases(torch.device("cpu")).items():
            calls = []
            for _ in range(3):
                gpu.launches.clear()
                call()
                calls.append([(of.function, of.grid, len(of.arguments)) for of in gpu.launches])
            assert calls[0] and calls[0] == calls[1] == calls[2], f"{name}: {calls}"


def check_hooks(gpu: Gpu, call: Callable[[], object]) -> None:
    """A profiler's hooks are told of each launch; an error of theirs is theirs, and nothing is launched again."""
    told: list[str] = []
    runtime = triton.knobs.runtime

    def enter(of: Any) -> None:
        told.append(of.get()["name"])

    runtime.launch_enter_hook.add(enter)
    gpu.launches.clear()
    call()
    assert told == ["_sum_rows"] and len(gpu.launches) == 1, (told, gpu.launches)
    for error in (TypeError, AttributeError):

        def leave(of: Any, error: type[Exception] = error) -> None:
            raise error("a profiler's own")

        runtime.launch_exit_hook.add(leave)
        gpu.launches.clear()
        try:
            call()
            raise AssertionError("the error of a hook was taken for Triton's")
        except error:
            assert len(gpu.launches) == 1, gpu.launches
        runtime.launch_exit_hook.remove(leave)
    runtime.launch_enter_hook.remove(enter)
    with mock.patch.object(runtime, "launch_enter_hook", None):
        gpu.launches.clear()
        call()
        assert len(gpu.launches) == 1


def check_surroundings(gpu: Gpu) -> None:
    """Another alignment, device, size of a stride; no programs; a cache of Triton's that is emptied."""
    memory, out = torch.zeros(3, 80), torch.zeros(64)

    def call(rows: Tensor = memory[:, :64]) -> Launch:
        gpu.launches.clear()
        quant.sum_rows(rows, out, 0.5)
        [found] = gpu.launches
        return found

    first = call()
    assert call() == first
    check_hooks(gpu, call)
    unaligned = call(memory[:, 1:65])
    assert unaligned.function != first.function, "the machine code for aligned rows was given others"
    far = call(memory.as_strided((1, 64), (2**33, 1)))
    assert len(far.arguments[1]) == 8 and len(first.arguments[1]) == 4, "a stride beyond 32 bits"
    gpu.of = 1  # while the current one is 0: no program has called set_device
    other = call()
    assert other.function != first.function and other == call(), "each GPU has machine code of its own"
    assert gpu.current == 0
    gpu.streams[1] = 48
    assert call().stream == 48
    gpu.of = 0
    assert call() == first
    gpu.launches.clear()
    launch(quant._sum_rows, (0,), memory, out, 0.5, 3, 64, BLOCK=quant.PER_PROGRAM, ALIGN=16)
    assert not gpu.launches, "no programs, no launch"
    quant._sum_rows.device_caches.clear()
    gc.collect()
    assert call() == first and not gpu.library.double_unloaded(), "what is bound stays loaded"


def check_variants(gpu: Gpu) -> None:
    """``compress()`` has loaded all variants, and bound them: the step that meets one calls it directly."""
    memory, out = torch.zeros(3, 80, dtype=torch.int16), torch.zeros(64)
    token = every_variant.set(True)
    quant.sum_rows(memory[:, :64].view(torch.bfloat16), out, 0.5)
    every_variant.reset(token)
    before = len(gpu.widths), len(ops._bound)
    with mock.patch.object(type(quant._sum_rows), "run", side_effect=AssertionError("Triton launches")):
        quant.sum_rows(memory[:, 1:65].view(torch.bfloat16), out, 0.5)
    assert (len(gpu.widths), len(ops._bound)) == before


def main(folder: Path) -> None:
    gpu = Gpu(folder / "libcuda.so.1")
    warnings.simplefilter("error")
    with gpu.there():
        check_surroundings(gpu)
        check_variants(gpu)
        check_operations(gpu)
        print(f"{check_kernels(gpu)} kernels: checked")


if __name__ == "__main__":
    is_there = os.environ.get("TRITON_LIBCUDA_PATH") == sys.argv[1]
    (main if is_there else start)(Path(sys.argv[1]))

"""Kernels for CUDA, without CUDA: how they are launched, what is compiled before the first step, and what they become.

That they compute what the reference computes is tested beside the operations, in Triton's interpreter.
"""

from __future__ import annotations

import ast
import json
import shutil
import sysconfig
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dry_cuda
import thinwire
from breadth import spread
from launches import LaunchWatch
from programs import needs_triton, run_python
from test_dry_run import exchange_of
from test_memory import method_of
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.core.bucket import Layout, Piece, Shard
from thinwire.core.exchange import Exchange
from thinwire.core.method import Parameter
from thinwire.methods import TABLE
from thinwire.ops import backends, direction, mask, quant, sparse
from thinwire.ops.backends import launches
from thinwire.ops.programs import WIDEST, check_width
from thinwire.plan import dry_run as played
from thinwire.plan.dry_run import META, compile_kernels, dry_run, stand_in_run
from thinwire.plan.plan import road_of
from thinwire.proof.ranks import parameters_for
from whole_step import WholePlayback

SOURCE = Path(thinwire.__file__).parent
SHAPES = {"a": (67, 77), "b": (96, 64), "a.bias": (33,)}
"""Two that are sent, one in rows whose length is a multiple of nothing, and one that stays dense."""
SIDE_BY_SIDE = {"a": (640, 1024), "b": (320, 256), "a.bias": (320,)}
"""What is sent lies side by side in five shards, in multiples of 64: it is compressed where the engine has put it."""
UNALIGNED = SIDE_BY_SIDE | {"a.bias": (64,)}
"""The same, in rows that begin at a multiple of 4 bytes alone."""


def test_every_launch_goes_through_the_one_that_minds_the_device():
    """``kernel[grid](...)`` stands once."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if "import triton" not in text and path.name != "triton.py":
            continue
        called = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        if any(isinstance(f, ast.Subscript) or getattr(f, "attr", "") in ("run", "warmup") for f in called):
            found.add(path.relative_to(SOURCE).as_posix())
    assert found == {"ops/gpu.py"}


def test_a_launch_is_on_the_device_of_its_tensors(monkeypatch):
    """Whichever is the current one: a rank need not have called ``torch.cuda.set_device``."""
    inside, seen, current = [], [], [0]

    @contextmanager
    def device_of(tensor):
        inside.append(tensor)
        yield
        inside.clear()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1)
    rows, out = torch.zeros(3, 64, device="meta"), torch.zeros(64, device="meta")
    with dry_cuda.run(lambda name, variant: seen.append(list(inside))):
        quant.sum_rows(rows, out)
        current[0] = 1
        quant.sum_rows(rows, out)
    assert [len(tensors) for tensors in seen] == [1, 0] and seen[0][0] is rows


class Compiled:
    """What Triton returns of a launch: ``ways`` is told of each launch of it."""

    function, packed_metadata = "code", (4, 1, 0)

    def __init__(self, ways, fails=False):
        self.ways, self.fails = ways, fails

    def run(self, x, y, z, stream, function, metadata, told, before, after, *arguments):
        if self.fails:
            raise TypeError("function takes 12 arguments")
        assert (stream, function, metadata) == (7, "code", (4, 1, 0)) and told is before is after is None
        self.ways.append(("bound", (x, y, z), *arguments))

    def __getitem__(self, grid):
        return lambda *arguments: self.ways.append(("told", grid, *arguments))


def runtime(of_launch, *hooks):
    """Give the stand-in for Triton what launches ask of it; ``hooks`` want to hear of each."""
    module = of_launch.__globals__["triton"]
    module.knobs = SimpleNamespace(runtime=SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=list(hooks)), launch_exit_hook=SimpleNamespace(calls=[])
    ))  # fmt: skip
    active = SimpleNamespace(get_current_stream=lambda index: 7)
    module.runtime = SimpleNamespace(driver=SimpleNamespace(active=active))


class Jitted:
    arg_names = ("rows", "rows_stride", "n", "BLOCK")

    def __init__(self, fails=False):
        self.ways, self.compiled = [], []
        self.fails = fails

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.ways.append(("Triton", grid, *arguments, constants))
            self.compiled.append(Compiled(self.ways, self.fails))
            return self.compiled[-1]

        return run


def test_what_is_compiled_is_looked_up_once_for_all_launches_with_the_same_types():
    """Other values find it, another dtype, an integer of 64 bits, another constant or another option does not."""
    rows, narrow = torch.zeros(3, 64, device="meta"), torch.zeros(3, 64, dtype=torch.int16, device="meta")
    with dry_cuda.run():
        launch, kernel = backends.host_code.get()["thinwire.ops.quant"].launch, Jitted()
        runtime(launch)
        launch(kernel, (5,), rows, 7, BLOCK=8)
        launch(kernel, (6, 2), rows[:, :16], 9, BLOCK=8)
        assert kernel.ways == [
            ("Triton", (5,), rows, 64, 7, {"BLOCK": 8, "enable_fp_fusion": False}), kernel.ways[1]
        ]  # fmt: skip
        way, grid, values, stride, n, block = kernel.ways[1]
        assert (way, grid, values.shape, stride, n, block) == ("bound", (6, 2, 1), (3, 16), 64, 9, 8)
        for other in ((narrow, 7), (rows, 2**31), (rows, 7.0)):
            launch(kernel, (5,), *other, BLOCK=8)
        launch(kernel, (5,), rows, 7, BLOCK=16)
        launch(kernel, (5,), rows, 7, BLOCK=8, num_warps=8)
        launch(kernel, (5,), rows, 7, BLOCK=8, fused=True)
        launch(Jitted(), (5,), rows, 7, BLOCK=8)
        runtime(launch, print)
        launch(kernel, (5,), rows, 7, BLOCK=8)
    assert [way for way, *_ in kernel.ways[2:]] == ["Triton"] * 6 + ["told"]


def test_a_triton_that_launches_otherwise_is_warned_of_and_used():
    rows = torch.zeros(3, 64, device="meta")
    with dry_cuda.run():
        launch, kernel = backends.host_code.get()["thinwire.ops.quant"].launch, Jitted(fails=True)
        runtime(launch)
        launch(kernel, (5,), rows, 7, BLOCK=8)
        with pytest.warns(ThinwireWarning, match="launches kernels in another way than those that were tried"):
            launch(kernel, (5,), rows, 7, BLOCK=8)
        launch(kernel, (5,), rows, 7, BLOCK=8)
    assert [way for way, *_ in kernel.ways] == ["Triton"] * 3


def test_a_grid_beyond_cudas_is_refused_by_a_dry_run():
    """65,535 programs along the second dimension: rows of tiles would be more."""
    words = torch.zeros(65536, 1, dtype=torch.int64, device="meta")
    with dry_cuda.run():
        mask.from_indices(torch.zeros(65535, 3, dtype=torch.int32, device="meta"), words[1:])
        with pytest.raises(ThinwireError, match=r"_from_indices: CUDA takes grids .*, not \(1, 65536\)"):
            mask.from_indices(torch.zeros(65536, 3, dtype=torch.int32, device="meta"), words)


def test_a_row_of_which_kernels_would_lose_count_is_refused():
    """They count columns and positions in 32 bits: rows of 2^31 values, and 8.6 GB, would be cut short in silence."""
    rows = torch.empty(1, 2**31, device="meta")
    lists, found = (sparse.ListSegment(0, 2**31, 5, 0),), torch.empty(1, 8, dtype=torch.int32, device="meta")
    adam = [direction.DirectionSegment(0, 2**31, 0, 0.9, 1e-8)]
    calls = {
        "largest": lambda: sparse.largest(rows, None, lists, None, found, rows[:, :8]),
        "marked": lambda: sparse.marked(rows, lists, torch.empty(1, 2**25, dtype=torch.int64, device="meta")),
        "direction": lambda: direction.direction(
            rows, rows, rows, None, None, adam, lr=rows[0], scale=rows[0], factor=rows[0, 0], beta1=0.0
        ),
    }
    for call in calls.values():
        with pytest.raises(ThinwireError, match=r"2147483648 values in one row .* train on more ranks"):
            call()
    check_width(rows[:, : 2**31 - WIDEST])
    with pytest.raises(ThinwireError, match="values in one row"):  # the last program would count to 2^31
        check_width(rows[:, : 2**31 - WIDEST + 1])


def layout_of(parameters: Sequence[Parameter], exchange: Exchange) -> Layout:
    """All parameters in one buffer, beside each other."""
    place, pieces, shares = 0, [], []
    total = sum(of.local for of in parameters)
    for of in parameters:
        stride = total if exchange.owner else 0
        pieces.append(Piece(of.name, place, of.local * exchange.ranks if stride else of.numel, exchange.ranks, stride))
        shares.append(Piece(of.name, place, of.local))
        place += of.local if exchange.owner else of.numel
    shards = [Shard(tuple(shares), (), total, torch.float32)] if exchange.owner else []
    return Layout([tuple(pieces)], [torch.float32], shards, exchange.comm)


LAYOUTS = {
    "ddp": ("ddp", SHAPES), "fsdp2": ("fsdp2", SHAPES), "side by side": ("fsdp2", SIDE_BY_SIDE),
    "unaligned": ("fsdp2", UNALIGNED),
}  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), spread(2, [cls.name for cls in TABLE], LAYOUTS))
def test_no_step_waits_for_a_kernel(name, layout):
    """What the steps of many ranks launch was compiled before, with the smallest parameters and one rank."""
    method, (kind, shapes) = method_of(name), LAYOUTS[layout]
    if kind not in method.engines:
        pytest.skip(f"{name} does not run on {kind}")
    exchange = exchange_of(kind, 5)
    parameters = list(parameters_for(exchange, shapes).values())
    layout, road = layout_of(parameters, exchange), road_of(method, parameters, exchange)
    gathers = frozenset(shard.dtype for shard in layout.shards)
    run = replace(stand_in_run(method, parameters, exchange), gathers=gathers)
    compiled: set[tuple[object, ...]] = set()
    needed: set[tuple[object, ...]] = set()
    with dry_cuda.run(lambda kernel, variant: compiled.add((kernel, *sorted(variant.items())))):
        compile_kernels(road, run, META)
    with dry_cuda.run(lambda kernel, variant: needed.add((kernel, *sorted(variant.items())))):
        dry_run(layout, road, run, [exchange.comm], LaunchWatch(), WholePlayback)
    own = {variant for variant in needed if variant[0] != "thinwire.ops.adams._adams"}  # that is the optimizer's
    assert not own - compiled


def test_what_a_machine_lacks_for_triton_is_said_in_a_line(monkeypatch, tmp_path):
    """By ``compress()``, in place of the error of whatever Triton tried to run."""
    method, exchange = method_of("int8"), exchange_of("ddp", 5)
    parameters = list(parameters_for(exchange, SHAPES).values())

    def fails(device):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(played, "_move", fails)
    monkeypatch.setattr(played.devices, "streams", lambda device: torch.cuda)
    call = partial(
        compile_kernels, road_of(method, parameters, exchange), stand_in_run(method, parameters, exchange), META
    )
    monkeypatch.delenv("CC", raising=False)
    for compiler, include, said in (
        (None, tmp_path, "finds neither gcc nor clang: apt-get install gcc"),
        ("/usr/bin/gcc", tmp_path, f"there is no {tmp_path}/Python.h: apt-get install python3-dev"),
    ):
        monkeypatch.setattr(shutil, "which", lambda name, compiler=compiler: compiler)
        monkeypatch.setattr(sysconfig, "get_paths", lambda include=include: {"include": str(include)})
        with pytest.raises(ThinwireError, match=said):
            call()
    (tmp_path / "Python.h").touch()
    with pytest.raises(RuntimeError, match="Failed to find C compiler"):
        call()


def test_a_dry_run_counts_what_the_host_code_launches():
    """Not one kernel per operation: a gather at a mask counts its bits first. Afterwards all is as it was."""
    rows, words = torch.zeros(2, 128, device="meta"), torch.zeros(2, 2, dtype=torch.int64, device="meta")

    def counted() -> dict[str, int]:
        counter: Counter[str] = Counter()
        token = launches.set(lambda name, arguments: counter.update([name]))
        mask.gather_keep(rows, None, words, rows[:, :5], None)
        launches.reset(token)
        return dict(counter)

    with dry_cuda.run():
        assert counted() == {"thinwire.ops.mask._count": 1, "thinwire.ops.mask._gather_keep": 1}
    assert counted() == {"thinwire.ops.mask.gather_keep": 1}


@needs_triton
def test_what_is_said_of_compiled_code():
    """Warps that fit by their registers, by shared memory and by threads; a kernel that asks for little is slower."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "benchmarks" / "speed")!r})
import roofline
device = roofline.DEVICES[90]
found = dict(registers=32, warps=4, shared=0, accesses=dict(ld16=4, st16=4), moved=65536, instructions=100)
assert roofline.occupancy(found, device) == roofline.share(found, device) == 1
assert roofline.occupancy(found | dict(registers=64), device) == 0.5
assert roofline.occupancy(found | dict(shared=56 << 10), device) == 4 * 4 / 64
assert roofline.share(found | dict(accesses=dict(ld4=1)), device) < 0.5
assert roofline.share(found | dict(moved=64), device) < 0.1
lines = ["tt.load %p : !tt.ptr<i64> ", "tt.load %q, %m : tensor<512x!tt.ptr<f32>> ",
         "tt.load %q : tensor<512x!tt.ptr<i64>> ", "tt.store %q, %b : tensor<4x128x!tt.ptr<i8>> "]
assert roofline.aot.moved(chr(10).join(lines)) == 512 * 4 + 512 // 8 + 512
print("checked")
"""
    done = run_python(code, TRITON_INTERPRET="0")
    assert done.stdout.strip().endswith("checked"), done.stderr


TRITONS = [str(folder) for folder in sorted(SOURCE.parents[1].glob("build/triton-*"))] or [""]
"""Folders of Tritons, which ``make test-triton`` installs, or the installed one."""
needs_any_triton = pytest.mark.skipif(
    TRITONS == [""] and find_spec("triton") is None, reason="there is no Triton: make test-triton installs two"
)


@needs_any_triton
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc, with which Triton compiles its launchers")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", TRITONS, ids=lambda folder: Path(folder).name)
def test_later_launches_hand_cuda_what_the_first_one_does(folder, tmp_path):
    """Of every kernel, through Triton's launcher in C: the arguments of the call, its stream and its device."""
    code = f"""
import sys
from pathlib import Path
sys.path[:0] = {[folder] * bool(folder)}
import cuda_library
cuda_library.start(Path({str(tmp_path)!r}))
"""
    done = run_python(code, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.stdout.strip().endswith("checked"), done.stderr


@needs_any_triton
@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", TRITONS, ids=lambda folder: Path(folder).name)
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_the_machine_code_of_all_kernels(capability, folder, tmp_path):
    """No registers spilled (but for a few bytes on Blackwell), and 128 of them at most but for products of matrices, 16
    KB of shared memory but for these; 16 or, on a wire, 4 bytes at a time; 64 bits for the place of a row; no variant
    by size."""
    code = f"import sys; sys.path[:0] = {[folder] * bool(folder)}; import aot; aot.main({capability})"
    done = run_python(code, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for found in map(json.loads, done.stdout.splitlines()):
        assert found["stack"] <= (24 if capability >= 100 and found["kernel"].startswith("quant.") else 0), found
        assert found["registers"] <= 128 or found["kernel"].startswith("projection."), found
        # Of the 100 KB that GPUs have at least for all programs on a multiprocessor, and of 48 KB for one.
        assert found["shared"] <= (48 << 10 if found["kernel"].startswith("projection.") else 16 << 10), found
        assert not found["narrow"] and not found["specialized"], found
        assert not found["fused"] or found["kernel"].startswith("projection."), found
        widths = {int(access[2:]) for access in found["accesses"]}
        # Tensors in bfloat16, which begin anywhere in an engine's buffer; integers at positions, one here, one there.
        anywhere = found["types"].get("flat") in ("*i16", "*bf16") or found["constants"].get("NARROW")
        by_bytes = anywhere or found["kernel"] == "sparse._decode"
        assert min(widths) >= 4 or by_bytes, found
        by_places = found["constants"].get("ALL") is False or found["constants"].get("BITS") == 32  # float32 is listed
        if {"ALIGN", "WIRE"} & found["constants"].keys() and not by_places and "projection" not in found["kernel"]:
            # Of one wire another is made: there is nothing else in it.
            widest = found["constants"]["WIRE"] if found["kernel"] == "quant._requantize" else 16
            assert max(widths) == widest, found

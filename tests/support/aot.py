"""Every Triton kernel compiled ahead of time, for a GPU that need not be there: a line of JSON about each.

    python tests/support/aot.py 90      # compute capability

Types and constants are those of a step: sizes and strides of which nothing is known, rows that are aligned or, for a
wire, at multiples of 4 bytes.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thinwire.ops import sketch as sketch_parts
from thinwire.ops import sparse as sparse_parts
from thinwire.ops.adams import triton as adams
from thinwire.ops.direction import triton as direction
from thinwire.ops.mask import triton as mask
from thinwire.ops.moments import triton as moments
from thinwire.ops.norms import triton as norms
from thinwire.ops.projection import triton as projection
from thinwire.ops.quant import triton as quant
from thinwire.ops.rows import FIELDS, PER_PROGRAM
from thinwire.ops.rows import triton as packing
from thinwire.ops.shards import triton as shards
from thinwire.ops.sign import triton as sign
from thinwire.ops.sketch import triton as sketch
from thinwire.ops.sparse import triton as sparse
from thinwire.ops.steps import triton as steps

MODULES = (adams, direction, mask, moments, norms, projection, quant, packing, shards, sign, sketch, sparse, steps)
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

NAMES = """
*fp32  next_moment residual_out v_out factors resident
*fp32  change sums current updated residues squares usual usual_now cuts
*i32   limited bit_offsets positions segments shifts slots copy_programs segment_numbers starts
*i64   copy_table columns
i64    seed
fp32   times leaves decay gain beta1 beta2 rest1 rest2 eps keep root rate factor scale norm largest share
*fp32  rows total old payload new out signs scales shares gradient residual moment values mean
*fp32  common common_out given weight
*fp32  g v m_out own held message left bounded sent rest whole quantum wire remainder
*i64   words index marks
*i32   offsets base counts ends places before positions programs parts keys found state tallies elements
*i64   table
*u8    flags bits codes octets
"""
TYPES = {name: kind for kind, *names in map(str.split, NAMES.strip().splitlines()) for name in names}
"""Of arguments by their names; others are int32."""


def cases() -> Iterator[tuple[Any, dict[str, str], dict[str, Any]]]:
    """(kernel, types that differ from ``TYPES``, constants and options)."""
    aligned = {"ALIGN": 16}
    for four, rotated, wire, group in ((0, 0, 16, 128), (0, 0, 4, 128), (1, 0, 4, 128), (1, 1, 4, 128), (1, 1, 16, 32)):
        constants = {"GROUP": group, "BLOCK": 4096 // group, "FOUR": four, "ROTATED": rotated, "WIRE": wire}
        codes = {"codes": "*u8" if four else "*i8"}
        parts = {} if four else dict.fromkeys(("programs", "segments", "keys"))  # None: there are no segments
        yield (
            quant._quantize,
            codes | {"rows": "*i16" if four and group == 32 else "*fp32"},
            constants | parts | {"STOCHASTIC": four},
        )
        yield quant._dequantize, codes, constants
        out = {"out": codes["codes"], "scales_out": "*fp32"}
        yield quant._requantize, codes | out, constants | parts | {"STOCHASTIC": four}
    for rows in ("*fp32", "*i16"):
        yield quant._sum_rows, {"rows": rows}, {"BLOCK": quant.PER_PROGRAM} | aligned
    table = {"BLOCK": PER_PROGRAM, "FIELDS": FIELDS}
    bounded = {"COPIED": PER_PROGRAM, "BLOCK": norms.BLOCK, "FIELDS": FIELDS}
    for flat in ("*fp32", "*i16"):  # bfloat16 arrives as words
        yield packing._pack, {"flat": flat}, table | {"WIDEN": flat == "*i16"}
        yield norms._bound, {"flat": flat}, bounded
    yield norms._sample, {"positions": "*i64", "norms": "*fp32"}, {"BLOCK": norms.BLOCK}
    for add in (False, True):
        for flat in ("*fp32", "*bf16"):
            yield packing._unpack, {"flat": flat}, table | {"ADD": add}
    copied = {"COPIED": PER_PROGRAM, "FIELDS": FIELDS}
    for four, group, narrow in ((1, 2048, 0), (1, 2048, 1), (0, 1024, 0)):
        constants = {"GROUP": group, "BLOCK": shards.PER_PROGRAM // group, "FOUR": four, "NARROW": narrow, "WIRE": 4}
        values = dict.fromkeys(("own", "resident", "message", "rows"), "*i16" if narrow else "*fp32")
        codes = {"codes": "*u8" if four else "*i8"} | values
        keys = {} if narrow else {"keys": None}  # None: there are none
        yield shards._write, codes, constants | copied | aligned | keys | {"SUBTRACT": four, "STOCHASTIC": narrow}
        yield shards._read, codes, constants | copied | aligned | {"ADD": four}
    for group in (128, 2048):
        block = {"GROUP": group, "BLOCK": sign.PER_PROGRAM // group, "WIRE": 4}
        yield sign._pack, {}, block | {"LEVELS": group.bit_length() - 1, "RMS": group == 128}
        yield sign._unpack, {}, block
    block = {"BLOCK": mask.BLOCK}
    yield mask._count, {}, block
    yield mask._gather_keep, {}, block | aligned | {"FEEDBACK": True, "KEEP": True}
    yield mask._scatter, {}, block | aligned
    for kernel in (mask._collect, mask._renew):
        yield kernel, {"row": "*fp32"}, block | copied
    yield mask._from_indices, {}, block
    yield mask._from_lists, {}, {"BLOCK": mask.WORDS, "FIELDS": 6}
    yield mask._pack, {}, {"BLOCK": 64} | aligned
    of, lines = {"parts": "*i64", "segments": "*i64"}, {"FIELDS": sparse_parts.FIELDS}
    yield mask._tally, {}, block | lines | {"START": 4, "COUNT": 5}
    counted = {"BLOCK": sparse.COUNTED, "num_warps": sparse.WARPS} | aligned | lines
    loaded = dict.fromkeys(("second", "second_out", "lr", "scale", "factor"), "*fp32") | {"adam": "*i32"}
    bins, second, third = (bins for _, bins in sparse.DIGITS)
    for step, sample, measure, cut in ((0, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 1, 0, 1)):
        how = {"STEP": step, "SAMPLE": sample, "MEASURE": measure, "CUT": cut, "STEP_FIELDS": direction.FIELDS}
        how |= {"FEEDBACK": True, "KEEP": True, "GUESS": True, "BINS": bins}
        found = {"marks": "*i32"} | dict.fromkeys(("guess", "over", "near", "arrived"), "*i32") | of
        sampled = {"positions": "*i64", "norms": "*fp32"}
        yield sparse._first, found | loaded | sampled, counted | how
    yield sparse._second, found, counted | {"BINS": second, "GUESS": True}
    yield sparse._third, found, lines | {"BLOCK": sparse.MARKED, "BINS": third, "GUESS": True}
    by_word = lines | {"BLOCK": sparse.MARKED, "PACK": True}
    yield sparse._tally, found, by_word
    listed = {"BLOCK": sparse.BLOCK}
    spread = {"PER_OFFSET": sparse.BLOCK, "BLOCK": sparse.HIGH, "num_warps": sparse.WARPS}
    yield sparse._spread, of | {"wire": "*i64"}, spread | lines
    yield sparse._put, {}, listed
    for bits, codes in ((32, "*fp32"), (8, "*i8"), (4, "*u8")):
        decoded = {"SUM": bits > 4, "BITS": bits, "PER_SCALE": 64 if bits < 32 else 1}
        yield sparse._decode, of | {"codes": codes}, listed | aligned | lines | decoded
        group = 64 if bits < 32 else 1
        sent = {"BITS": bits, "KEEP": True, "GROUP": group, "GROUPS": sparse.QUANTIZED // group}
        for wire in (16, 4):
            yield sparse._list, found | {"codes": codes}, by_word | sent | {"WIRE": wire}
    lines = {"FIELDS": sketch_parts.FIELDS}
    sums = {"lost": "*i64", "cell_sums": "*fp64", "magnitudes": "*i32"}
    for kernel in (sketch._peaks, sketch._round_to, sketch._encode, sketch._gather, sketch._hold,
                   sketch._list, sketch._round, sketch._estimate, sketch._restore):  # fmt: skip
        yield kernel, of | sums, block | lines
    yield sketch._count, of, {"BLOCK": sketch.WORDS} | lines
    row = {"BLOCK": moments.BLOCK, "DIRECTORY": moments.DIRECTORY} | aligned
    for one in (False, True):
        for common in (False, True):
            yield moments._add_up, {}, row | {"CHOOSE": one, "COMMON": common}
        yield moments._advance, {}, row | {"COMMON": one}
    for kind in ("*fp32", "*bf16"):
        pointers = dict.fromkeys(("weight", "moment", "gradient", "next_moment"), kind)
        yield adams._adams, pointers, {"HAS_NEXT": True, "BLOCK": adams.BLOCK} | aligned
    loaded = dict.fromkeys(("m", "lr", "scale", "factor"), "*fp32") | {"table": "*i32"}
    for momentum in (True, False):
        block = {"BLOCK": direction.BLOCK, "FIELDS": direction.FIELDS}
        yield direction._direction, loaded, block | {"MOMENTUM": momentum} | aligned
    yield steps._take, {}, {"BLOCK": steps.BLOCK} | aligned
    tile = {"num_warps": projection.WARPS, "fused": True} | projection.FACTORS | aligned
    yield projection._project, {}, tile | {"FEEDBACK": True, "KEEP": True}
    yield projection._reconstruct, {}, tile


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int) -> dict[str, Any]:
    """What is known of the machine code: see :func:`main`."""
    given = dict(constants)
    options = {"enable_fp_fusion": given.pop("fused", False), "num_warps": given.pop("num_warps", 4)}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in given else types.get(name, TYPES.get(name, "i32")) for name in names}
    source = ASTSource(kernel, signature, constexprs={(names.index(name),): value for name, value in given.items()})
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        used = subprocess.run(
            [BIN / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", used)}
    fixed = {name: parameter.do_not_specialize for name, parameter in zip(names, kernel.params, strict=True)}
    return {
        "kernel": f"{kernel.__module__.split('.')[-2]}.{kernel.__name__}",
        "constants": given,
        "types": {name: kind for name, kind in signature.items() if kind != "constexpr"},
        "registers": usage["REG"],
        "stack": usage["STACK"] + usage.get("LOCAL", 0),
        "shared": code.metadata.shared,
        "warps": code.metadata.num_warps,
        "fused": "fma" in code.asm["ptx"],
        "accesses": accesses(code.asm["ptx"]),
        "moved": moved(code.asm["ttir"]),
        "instructions": len(re.findall(r"^\s+(?:@!?%p\d+ )?[a-z][a-z0-9_.:]+.*;", code.asm["ptx"], re.MULTILINE)),
        "narrow": products(code.asm["ttir"]),
        "specialized": [name for name, of in signature.items() if of != "constexpr" and not fixed[name]],
    }


def accesses(ptx: str) -> dict[str, int]:
    """Loads and stores of global memory, by their width in bytes per thread: {"ld16": 8, "st4": 1}."""
    found: Counter[str] = Counter()
    for access, rest in re.findall(r"\b(ld|st)\.global((?:\.[a-z0-9:_]+)*)", ptx):
        vector, bits = re.search(r"\.v(\d)", rest), re.search(r"\.[busf](\d+)$", rest)
        assert bits is not None, rest
        found[f"{access}{int(vector[1] if vector else 1) * int(bits[1]) // 8}"] += 1
    return dict(found)


def moved(ttir: str) -> int:
    """Bytes that a program loads and stores, and, by atomics, both; of a mask's words 64 elements share one."""
    total = 0
    for access, rest in re.findall(r"tt\.(load|store|atomic_rmw)(.*)", ttir):
        shape = re.search(r"tensor<((?:\d+x)+)!tt\.ptr<[a-z]+(\d+)>", rest)
        if shape is not None:  # else one value
            numel = math.prod(map(int, shape[1].split("x")[:-1]))
            total += numel * int(shape[2]) // 8 // (64 if shape[2] == "64" and access == "load" else 1)
            total += numel * int(shape[2]) // 8 if access == "atomic_rmw" else 0
    return total


def products(ttir: str) -> list[str]:
    """Products in 32 bits of which no factor is a constant: of a row's number and a stride they overflow at 2 GiB."""
    constants: set[str] = set()
    found = []
    for line in ttir.splitlines():
        name, _, value = line.strip().partition(" = ")
        factors = set(re.findall(r"%\w+", value))
        if value.startswith("arith.constant") or (value.startswith("tt.splat") and factors <= constants):
            constants.add(name)
        elif value.startswith("arith.muli") and re.search(r"(: |x)i32\b", value) and not factors & constants:
            found.append(line.strip())
    return found


def main(capability: int) -> None:
    """One line per case; a kernel that is nowhere in ``cases`` is an error."""
    seen = set()
    for kernel, types, constants in cases():
        seen.add(kernel)
        print(json.dumps(compiled(kernel, types, constants, capability)), flush=True)
    known = {of for module in MODULES for of in vars(module).values() if isinstance(of, triton.runtime.jit.JITFunction)}
    missing = {of.__name__ for of in known - seen if of.do_not_specialize}
    assert not missing, f"no case for {missing}"


if __name__ == "__main__":
    main(int(sys.argv[1]))

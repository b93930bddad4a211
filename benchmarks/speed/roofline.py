"""What the compiled code of each Triton kernel says of its speed: bytes, registers, occupancy, share of a copy's speed.

    python benchmarks/speed/roofline.py 90            # compute capability: 80, 90 or 120; it needs Triton, and no GPU
    python benchmarks/speed/roofline.py 80 90 120 --shares

Nothing is measured. Kernels, types and constants are those of ``tests/support/aot.py``. Of each:

* bytes: loaded and stored per element, by the code's own loads and stores, each counted once: a loop over peers is one
  peer. Where only some elements take part (values at a mask) it is the most there can be. A mask's word counts once.
* occupancy: resident warps by registers, shared memory and threads, as a share of what a multiprocessor holds.
* share: of the bandwidth of a copy, the least of three. 100%; what the loads of all resident threads ask for at once,
  of what has to be under way to cover ``LATENCY``; the time that bytes take over the time that instructions take to be
  issued, 4 per clock and multiprocessor, PTX standing for machine code. Below 100% a kernel is bound by something else
  than memory. Waiting for each other (atomics, barriers) and for what a launch costs are not in it.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import aot

LATENCY = 700e-9
"""Seconds from a load to its value, from memory that is busy: assumed."""
LANES = 16
"""Columns of a tile of the projection."""


class Device(NamedTuple):
    """``clock``: of multiprocessors, Hz. ``bandwidth``: bytes per second. ``shared``: bytes per multiprocessor."""

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float
    warps: int
    blocks: int
    shared: int


DEVICES = {
    80: Device("A100 80 GB SXM", 108, 1.41e9, 2.04e12, 64, 32, 164 << 10),
    90: Device("H100 SXM", 132, 1.98e9, 3.35e12, 64, 32, 228 << 10),
    120: Device("RTX 5090", 170, 2.41e9, 1.79e12, 48, 24, 100 << 10),
}
"""By compute capability: makers' figures."""
REGISTERS = 65536
"""Of a multiprocessor; a warp gets them in units of 256."""
RESERVED = 1024
"""Bytes of shared memory that a program takes beside its own."""


def elements(found: dict[str, Any]) -> int:
    """Values that one program takes."""
    constants = found["constants"]
    if "GROUP" in constants:
        return int(constants["BLOCK"] * constants["GROUP"])
    if "A" in constants:
        return int(constants["A"] * constants["C"] * LANES)
    words = {"mask._pack": 64, "sparse._third": 32, "sparse._tally": 32, "sparse._list": 32}  # programs take those
    return int(constants.get("BLOCK", constants.get("BINS"))) * words.get(found["kernel"], 1)


def occupancy(found: dict[str, Any], device: Device) -> float:
    warps = found["warps"]
    registers = math.ceil(found["registers"] * 32 / 256) * 256 * warps
    programs = min(
        REGISTERS // registers, device.warps // warps, device.blocks, device.shared // (found["shared"] + RESERVED)
    )  # fmt: skip
    return programs * warps / device.warps


def share(found: dict[str, Any], device: Device) -> float:
    """Of a copy's bandwidth: see above."""
    loads = sum(int(access[2:]) * count for access, count in found["accesses"].items() if access.startswith("ld"))
    asked = loads * 32 * device.warps * occupancy(found, device)
    needed = device.bandwidth * LATENCY / device.multiprocessors
    moving = found["moved"] / (device.bandwidth / device.multiprocessors)
    issuing = found["instructions"] * found["warps"] / 4 / device.clock
    return min(1.0, asked / needed, moving / issuing)


def variant(found: dict[str, Any]) -> str:
    """The constants that tell a kernel's variants apart."""
    same = ("BLOCK", "ALIGN", "A", "C", "GOLDEN", "MIX1", "MIX2", "MIX3", "COPIED", "FIELDS", "DIRECTORY",
        "STEP_FIELDS", "PER_OFFSET",
    )  # fmt: skip
    told = {name: int(value) for name, value in found["constants"].items() if name not in same and value is not None}
    return ", ".join(f"{name.lower()} {value}" for name, value in told.items() if value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int, choices=DEVICES, nargs="+")
    parser.add_argument("--shares", action="store_true", help="a column for each capability, with its share alone")
    options = parser.parse_args()
    names = [f"sm{of} share" for of in options.capability]
    if not options.shares:
        names = [f"sm{of} {what}" for of in options.capability for what in ("registers", "occupancy", "share")]
    print("| kernel | bytes per element | widest load, store | shared bytes | " + " | ".join(names) + " |")
    print("|---|--:|--:|--:" + "|--:" * len(names) + "|")
    for kernel, types, constants in aot.cases():
        cells: list[str] = []
        for capability in options.capability:
            found, device = aot.compiled(kernel, types, constants, capability), DEVICES[capability]
            if not options.shares:
                cells += [str(found["registers"]), f"{occupancy(found, device):.0%}"]
            cells.append(f"{share(found, device):.0%}")
        widest = [max([int(a[2:]) for a in found["accesses"] if a[:2] == kind], default=0) for kind in ("ld", "st")]
        name = f"`{found['kernel']}` {variant(found)}".strip()
        size, accesses = found["moved"] / elements(found), f"{widest[0]}, {widest[1]}"
        print(f"| {name} | {size:.2f} | {accesses} | {found['shared']} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

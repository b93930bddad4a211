"""``thinwire env``: what this machine has, and what is missing and why it matters. For a start, and for bug reports.

It needs no extra, and shows what it can where torch cannot even be imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import struct
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.base.errors import ThinwireError, in_words
from thinwire.base.extras import PACKAGES, missing_for_triton
from thinwire.base.processes import processor
from thinwire.base.terminal import ends_at_once
from thinwire.base.version import __version__, torch_warning

HELP = """usage: thinwire env [--json]

Show versions, devices and network interfaces, and what is not installed and
what it would be needed for. Attach the output to a bug report.

  --json    one JSON object, for programs"""

DISTRIBUTIONS = {"yaml": "PyYAML", "markdown_it": "markdown-it-py"}
"""Names of packages on an index, where they are others than those that are imported."""
TOOLS = {"ip": "emulated networks (`thinwire compare`, `thinwire lab`): apt-get install iproute2"}
VARIABLES = re.compile(
    r"(GLOO|NCCL|OMP|MKL|CUDA|TORCHELASTIC|THINWIRE|TORCH_(DISTRIBUTED|NCCL|CPP))_\w+|RANK|(LOCAL_)?WORLD_SIZE"
)
"""Environment variables that change what happens, none of which holds a secret."""
SIOCGIFADDR, SIOCGIFFLAGS, SIOCGIFMTU = 0x8915, 0x8913, 0x8921
UP = 1


def main(argv: list[str]) -> int:
    """Print the facts. Return the exit status."""
    if argv not in ([], ["--json"]):
        raise ThinwireError(f"thinwire env takes --json or nothing, got '{' '.join(argv)}'")
    known_facts = facts()
    print(json.dumps(known_facts, indent=2) if argv else shown(known_facts))
    return 0


def facts() -> dict[str, Any]:
    """Collect what `thinwire env --json` prints."""
    packages = {package: installed(DISTRIBUTIONS.get(package, package)) for package in PACKAGES}
    missing = {
        package: f"{purpose}: pip install 'thinwire[{extra}]'"
        for package, (extra, purpose) in PACKAGES.items()
        if not packages[package]
    }
    missing |= {tool: purpose for tool, purpose in TOOLS.items() if not shutil.which(tool)}
    torch_facts, torch_notes = of_torch()
    interfaces = list(network_interfaces())
    return {
        "thinwire": {"version": __version__, "folder": str(Path(__file__).parents[1])},
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {"model": processor(), "cores": len(os.sched_getaffinity(0))},
        "torch": torch_facts,
        "interfaces": interfaces,
        "variables": {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)},
        "packages": packages | {"numpy": installed("numpy")},
        "missing": missing,
        "notes": [*torch_notes, *network_notes(interfaces)],
    }


def installed(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def of_torch() -> tuple[dict[str, Any], list[str]]:
    """Return torch's version, devices and backends, and notes on them."""
    try:
        with ends_at_once():
            import torch
            import torch.distributed as dist
    except Exception as error:  # a broken installation fails in many ways
        line = in_words(error)
        return {"version": installed("torch"), "error": line}, [f"torch cannot be imported, so nothing runs: {line}"]
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    torch_facts = {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [f"{gpu.name}, sm{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "backends": backends,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if "nccl" in backends else None,
    }
    notes = [warning] if (warning := torch_warning(torch.__version__)) else []
    if torch.version.cuda and not gpus:
        notes.append(f"torch is built for CUDA {torch.version.cuda} and sees no GPU: training runs on the CPU")
    if gpus and (lacks := missing_for_triton()):
        notes.append(lacks)
    if gpus and "nccl" not in backends:
        notes.append("this torch has no NCCL: GPUs exchange through gloo, by way of the CPU")
    return torch_facts, notes


def network_interfaces() -> Iterator[dict[str, Any]]:
    """Yield each interface: name, is it up, its IPv4 address, MTU in bytes, rate in Mbit/s (None: it tells none)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():

            def ask(request: int, name: str = name) -> bytes:
                return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))

            address = rate = None
            with contextlib.suppress(OSError):  # it has none
                address = socket.inet_ntoa(ask(SIOCGIFADDR)[20:24])
            with contextlib.suppress(OSError, ValueError):
                rate = int(Path(f"/sys/class/net/{name}/speed").read_text())
            yield {
                "name": name,
                "up": bool(struct.unpack_from("H", ask(SIOCGIFFLAGS), 16)[0] & UP),
                "address": address,
                "mtu": struct.unpack_from("i", ask(SIOCGIFMTU), 16)[0],
                "mbit_per_s": rate if rate and rate > 0 else None,
            }


def network_notes(interfaces: list[dict[str, Any]]) -> list[str]:
    """Say where gloo will listen, if other hosts cannot reach it there."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        missing = [name for name in chosen.split(",") if name not in {interface["name"] for interface in interfaces}]
        return [f"GLOO_SOCKET_IFNAME names {name}, which is no interface here" for name in missing]
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ["this host's name resolves to no address: set GLOO_SOCKET_IFNAME for ranks on several hosts"]
    if address.startswith("127."):
        return [f"this host's name resolves to {address}: set GLOO_SOCKET_IFNAME for ranks on several hosts"]
    return []


def shown(facts: dict[str, Any]) -> str:
    """Write the facts as text, in lines that fit the terminal."""
    torch = facts["torch"]
    if "error" in torch:
        devices = "torch cannot be imported"
    else:
        gpus = ", ".join(torch["gpus"]) or "no GPU"
        devices = f"{facts['cpu']['cores']} cores ({facts['cpu']['model']}), {gpus}"
    rows = [
        ("thinwire", f"{facts['thinwire']['version']} in {facts['thinwire']['folder']}"),
        ("python", f"{facts['python']}, {facts['system']}"),
        ("torch", torch["version"] or "not installed"),
        ("devices", devices),
        (
            "backends",
            ", ".join([*torch.get("backends", []), *([f"NCCL {torch['nccl']}"] if torch.get("nccl") else [])]),
        ),
        *column("network", list(map(interface_line, facts["interfaces"]))),
        ("variables", " ".join(f"{name}={value}" for name, value in facts["variables"].items()) or "none that matter"),
        ("packages", ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)),
        *column("missing", [f"{name}: {purpose}" for name, purpose in facts["missing"].items()]),
        *column("notes", facts["notes"]),
    ]
    width = max(60, shutil.get_terminal_size().columns)
    return "\n".join(
        textwrap.fill(text, width, initial_indent=f"{name:<11}", subsequent_indent=" " * 11, break_on_hyphens=False)
        for name, text in rows
        if text
    )


def column(name: str, lines: list[str]) -> list[tuple[str, str]]:
    """Pair ``name`` with the first of ``lines``, and nothing with the others."""
    return list(zip([name, *[""] * len(lines)], lines, strict=False))


def interface_line(interface: dict[str, Any]) -> str:
    words = ["up" if interface["up"] else "down", interface["address"] or "no IPv4 address", f"MTU {interface['mtu']}"]
    if interface["mbit_per_s"]:
        words.append(f"{interface['mbit_per_s']} Mbit/s")
    return f"{interface['name']}: {', '.join(words)}"

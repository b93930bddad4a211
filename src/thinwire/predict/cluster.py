"""A cluster is a file of constants, each with its source and its range: rates, latencies, shares that are reached."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from thinwire.base.errors import ThinwireError
from thinwire.base.files import write

SOURCES = ("datasheet", "measured", "assumed", "fitted:")
"""Words for where a constant comes from; behind ``fitted:`` stands the published row."""


@dataclass(frozen=True)
class Constant:
    """A positive number, or 0, in SI units: bytes, seconds, FLOP, and these per second.

    Attributes:
        source: one of ``SOURCES``. low, high: factors; four of five clusters like this have it from ``low * value`` to
            ``high * value``.
    """

    value: float
    source: str = "assumed"
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True)
class Kernel:
    """A measured kernel: a launch that reads and writes n bytes takes ``seconds + n / rate``."""

    seconds: float
    rate: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of ``per_node`` ranks, one device each.

    Attributes:
        codec_on_core: kernels take the core that computes (CPUs); else they run beside it, on a stream of their own.
        note: a sentence for readers of a prediction.
        memory_bytes: of one device. flops: peak at the training dtype. compute_share: of it, that a model reaches.
        memory_rate: read and written. memory_share: of that rate, that kernels reach which were not measured.
        intra_rate: of one rank, inside the node, that a collective reaches. intra_latency: of one message.
        inter_rate: of all NICs of a node together, one direction. inter_share: of that, that a collective reaches.
        launch_seconds: of a kernel. host_seconds_per_byte: of a core, for each byte that a rank sends (CPUs).
        kernels: measured ones by name.
    """

    name: str
    device: str
    per_node: int
    memory_bytes: Constant
    flops: Constant
    compute_share: Constant
    memory_rate: Constant
    memory_share: Constant
    intra_rate: Constant
    intra_latency: Constant
    inter_rate: Constant
    inter_latency: Constant
    inter_share: Constant
    launch_seconds: Constant
    host_seconds_per_byte: Constant = Constant(0.0, "datasheet")
    codec_on_core: bool = False
    note: str = ""
    kernels: Mapping[str, Kernel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.per_node < 1:
            raise ThinwireError(f"cluster {self.name}: per_node is the number of ranks on a node, 1 or more")
        for name, constant in self.constants.items():
            _check(self.name, name, constant)
        for name, kernel in self.kernels.items():
            if not (kernel.seconds >= 0 and kernel.rate > 0):
                raise ThinwireError(f"cluster {self.name}: kernel {name} takes seconds >= 0 and a rate > 0")

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants by name."""
        return {name: getattr(self, name) for name in CONSTANTS}

    def sourced(self, *sources: str) -> tuple[str, ...]:
        """Name the constants from one of ``sources`` ("fitted:": from any row)."""
        return tuple(name for name, constant in self.constants.items() if constant.source.startswith(sources))

    def with_link(self, rate: float) -> Cluster:
        """Return the same cluster with ``rate`` bytes/s out of each node."""
        return replace(self, inter_rate=Constant(rate, "assumed"))


CONSTANTS = tuple(field.name for field in fields(Cluster) if field.type == "Constant")
_MAY_BE_ZERO = ("intra_latency", "inter_latency", "launch_seconds", "host_seconds_per_byte")


def _check(cluster: str, name: str, constant: Constant) -> None:
    value, source, label = constant.value, constant.source, f"cluster {cluster}: {name}"
    if not (math.isfinite(value) and (value > 0 or (value == 0 and name in _MAY_BE_ZERO))):
        raise ThinwireError(f"{label} must be {'0 or more' if name in _MAY_BE_ZERO else 'above 0'}, got {value:g}")
    if source not in SOURCES[:-1] and not (source.startswith(SOURCES[-1]) and source != SOURCES[-1]):
        raise ThinwireError(f"{label}: source is {', '.join(SOURCES[:-1])} or fitted:ROW, got '{source}'")
    if not 0 < constant.low <= 1 <= constant.high < math.inf:
        raise ThinwireError(
            f"{label}: low and high are factors with low <= 1 <= high, got {constant.low:g} and {constant.high:g}"
        )


def cluster_names() -> list[str]:
    """Name the clusters that Thinwire brings."""
    folder = files("thinwire.predict").joinpath("clusters")
    return sorted(path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml"))


def read_cluster(name: str | Path) -> Cluster:
    """Read a cluster from a TOML file, or one of ``cluster_names()``.

    Raises:
        ThinwireError: there is none, or the file is wrong. The message has one line.
    """
    path = Path(name)
    if str(name) in cluster_names():
        text = files("thinwire.predict").joinpath("clusters", f"{name}.toml").read_bytes()
    elif path.suffix == ".toml" or path.parent != Path(".") or path.exists():
        if not path.is_file():
            raise ThinwireError(f"there is no cluster file {path}: `thinwire doctor` writes one")
        text = path.read_bytes()
    else:
        raise ThinwireError(
            f"there is no cluster '{name}': write a file's path (.toml), or one of {', '.join(cluster_names())}"
        )
    try:
        return _from_table(tomllib.loads(text.decode()), str(name))
    except ValueError as error:  # no TOML, or no UTF-8
        raise ThinwireError(f"{name}: {error}") from None


def _from_table(table: Mapping[str, Any], name: str) -> Cluster:
    known_fields = {field.name: field for field in fields(Cluster)}
    _refuse_names(name, table, known_fields, [key for key, entry in known_fields.items() if _required(entry)])
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key in CONSTANTS:
            values[key] = _read_entry(f"{name}: {key}", value, Constant)
        elif key == "kernels":
            if not isinstance(value, dict):
                raise ThinwireError(f"{name}: kernels is a table of kernels by name")
            values[key] = {
                kernel: _read_entry(f"{name}: kernel {kernel}", entry, Kernel) for kernel, entry in value.items()
            }
        else:
            kind: type = {"per_node": int, "codec_on_core": bool}.get(key, str)
            if type(value) is not kind:
                raise ThinwireError(f"{name}: {key} is {kind.__name__}, got {value!r}")
            values[key] = value
    return Cluster(**values)


def _read_entry(label: str, value: Any, kind: type[Constant] | type[Kernel]) -> Any:
    """Read a ``kind`` from the inline table ``value``; a bare number has no source, so it is refused."""
    known_fields = {field.name: field for field in fields(kind)}
    if not isinstance(value, dict):
        example = "{ value = 1.0, source = 'measured' }" if kind is Constant else "{ seconds = 1e-5, rate = 1e9 }"
        raise ThinwireError(f"{label} is a table like {example}, got {value!r}")
    required = ["value", "source"] if kind is Constant else list(known_fields)
    _refuse_names(label, value, known_fields, required)
    for key, entry in value.items():
        if type(entry) not in ((str,) if key == "source" else (int, float)):
            raise ThinwireError(f"{label}: {key} is {'a word' if key == 'source' else 'a number'}, got {entry!r}")
    return kind(**value)


def _required(entry: Any) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _refuse_names(label: str, table: Iterable[str], known_fields: Iterable[str], required: Iterable[str]) -> None:
    if unknown := sorted(set(table) - set(known_fields)):
        raise ThinwireError(f"{label}: unknown field {unknown[0]}: known are {', '.join(known_fields)}")
    if missing := [key for key in required if key not in table]:
        raise ThinwireError(f"{label}: {missing[0]} is missing")


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write ``cluster`` as ``read_cluster`` reads it."""
    lines = []
    for entry in fields(Cluster):
        value = getattr(cluster, entry.name)
        if isinstance(value, Constant):
            lines.append(f"{entry.name} = {_inline(value)}")
        elif entry.name != "kernels" and (_required(entry) or value != entry.default):
            lines.append(f"{entry.name} = {_scalar(value)}")
    if cluster.kernels:
        lines += ["", "[kernels]"]
        lines += [f"{_scalar(name)} = {_inline(kernel)}" for name, kernel in sorted(cluster.kernels.items())]
    write(path, "\n".join(lines) + "\n")


def _inline(value: Constant | Kernel) -> str:
    """Write an inline table, without factors of 1."""
    entries = {field.name: getattr(value, field.name) for field in fields(value)}
    shown = [f"{key} = {_scalar(entry)}" for key, entry in entries.items() if key not in ("low", "high") or entry != 1]
    return "{ " + ", ".join(shown) + " }"


def _scalar(value: str | bool | float) -> str:
    if isinstance(value, str):
        escaped = re.sub(r'["\\\x00-\x1f\x7f]', lambda character: f"\\u{ord(character[0]):04x}", value)
        return f'"{escaped}"'
    if isinstance(value, bool):
        return str(value).lower()
    short = f"{value:g}"
    return short if float(short) == value else repr(value)

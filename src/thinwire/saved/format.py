"""The form of ``wire.state_dict()``, its header, and the checks when it is loaded.

A saved state is a flat dict of tensors. Every key begins with the rank that it belongs to, so that no saver or loader,
``torch.distributed.checkpoint`` included, takes one rank's state for another's:

    rank-0003-of-0004/about            uint8 (b,): JSON, see :class:`Header`
    rank-0003-of-0004/step             int64: steps taken; "skipped"; "flush", the step that delivers all, or -1
    rank-0003-of-0004/residual/w       float32 (R, span): what a method keeps in the form of a bucket's rows
    rank-0003-of-0004/=mask/w          what else it keeps, of any shape and dtype
    rank-0003-of-0004/lengths          int64 (K,): the last dimension of each "=" entry, sorted by key; -1: absent

Keys, shapes and dtypes are the same in every step of a run, the first included (:class:`Form`), so that a reader that
loads in place, as ``torch.distributed.checkpoint`` does, finds every key in a fresh wire. What is absent is saved as 0.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import knobs_of
from thinwire.core.engine import Engine
from thinwire.core.method import Method, Run
from thinwire.core.state import LOOSE
from thinwire.predict.choice import Choice

FORMAT = 2
PAGE = 4096
"""``about`` fills whole pages: a reader that loads in place meets equal sizes, and our checks find the difference."""
_KEY = re.compile(r"(rank-(\d+)-of-(\d+))/(.+)", re.DOTALL)


@dataclass(frozen=True)
class Header:
    """The run that a saved state comes from; the run that loads it must be the same.

    Attributes:
        rank, ranks: of the whole job, which tensor or pipeline parallelism make larger than the data-parallel group.
        engine: "ddp", "fsdp2" or "hsdp". levels: does the engine's own buffer take two hops (``two_level=True``)?
        hops: (rank, ranks, does each rank keep one row) of each exchange; the last one is the method's.
        method, knobs: its name and all its settings, its carrier's included. inside: the method of the hop inside the
            node, if any.
        steps: with which the run began; one that goes on takes them over (``Run.began``).
        seed, bound: ``seed`` and ``safety.outlier_clip`` as given to ``compress()``.
        parameters: name -> (shape, elements on this rank with the engine's padding).
        across: parameters that are sharded along another dimension than the first.
        choice: how the method was chosen, as JSON; "": the user named it.
    """

    rank: int
    ranks: int
    engine: str
    levels: bool
    hops: tuple[tuple[int, int, bool], ...]
    method: str
    knobs: Mapping[str, str]
    inside: str | None
    steps: int | None
    seed: int
    bound: float | None
    parameters: Mapping[str, tuple[tuple[int, ...], int]]
    across: tuple[str, ...] = ()
    format: int = FORMAT
    choice: str = ""

    @classmethod
    def of_run(
        cls, rank: int, ranks: int, engine: Engine, run: Run, method: Method, inside: Method | None = None,
        bound: float | None = None,
    ) -> Header:  # fmt: skip
        """Describe this rank of a run."""
        parameters = sorted(run.parameters.values(), key=lambda parameter: parameter.name)
        return cls(
            rank, ranks, engine.kind, engine.levels is not None,
            tuple((hop.rank, hop.ranks, hop.owner) for hop in engine.hops), method.name, _knobs(method),
            None if inside is None else str(inside), run.began or run.steps, run.seed, bound,
            {parameter.name: (parameter.shape, parameter.local) for parameter in parameters},
            tuple(sorted(name for name, weight in run.weights.items() if _across(weight))),
        )  # fmt: skip

    @property
    def shard(self) -> tuple[int, int]:
        """(index, number) of the shard that a hop inside the node leaves; (0, 1) if there is none or ranks own rows."""
        rank, rows, _ = self.hops[0]
        return (0, 1) if len(self.hops) == 1 or self.hops[-1][2] else (rank, rows)

    @property
    def nodes(self) -> tuple[int, int]:
        """(ranks whose gradients a node averages first, nodes); without nodes (1, ranks)."""
        return math.prod(rows for _, rows, _ in self.hops[:-1]), self.hops[-1][1]

    @property
    def prefix(self) -> str:
        """The beginning of this rank's keys."""
        return f"rank-{self.rank:04d}-of-{self.ranks:04d}"

    def dump(self) -> Tensor:
        """Return (b,) uint8: JSON, filled up with spaces to whole pages."""
        text = json.dumps(asdict(self), sort_keys=True).encode()
        return torch.frombuffer(bytearray(text.ljust(-(-len(text) // PAGE) * PAGE)), dtype=torch.uint8)

    @classmethod
    def load(cls, key: str, saved: Tensor) -> Header:
        """Read the result of ``dump``; raise ThinwireError if it is damaged or of another format."""
        try:
            if saved.dtype != torch.uint8:
                raise ValueError
            entries = json.loads(bytes(saved.cpu().contiguous().view(-1).tolist()).decode())
            if entries["format"] != FORMAT:
                raise ThinwireError(
                    f"the state is in format {entries['format']}, and this version of Thinwire reads format {FORMAT}"
                )
            entries["hops"] = tuple((int(rank), int(rows), bool(owner)) for rank, rows, owner in entries["hops"])
            entries["parameters"] = {
                name: (tuple(map(int, shape)), int(local)) for name, (shape, local) in entries["parameters"].items()
            }
            entries["across"] = tuple(map(str, entries["across"]))
            entries["choice"] = str(entries["choice"])
            return cls(**{field.name: entries[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ThinwireError(f"'{key}' is damaged: take an older checkpoint") from None

    def unlike(self, saved: Header) -> str | None:
        """Name the first difference of ``saved`` from this run, with both values; None if there is none."""
        return self.unlike_place(saved) or self.unlike_run(saved)

    def unlike_place(self, saved: Header) -> str | None:
        """Name the first difference in ranks and engine."""
        if saved.engine != self.engine or saved.levels != self.levels:
            return f"it was saved on {_describe_engine(saved)}, this run is on {_describe_engine(self)}"
        if saved.hops != self.hops:
            return f"it was saved by {_describe_ranks(saved)}, this is {_describe_ranks(self)}"
        if saved.inside != self.inside:
            return f"it was saved with intra={saved.inside}, this run has intra={self.inside}"
        for name, (_, local) in self.parameters.items():
            saved_local = saved.parameters.get(name, ((), local))[1]
            if saved_local != local and saved.parameters[name][0] == self.parameters[name][0]:
                return f"{name} had {saved_local} elements on this rank, and has {local} in this run"
        return None

    def unlike_run(self, saved: Header) -> str | None:
        """Name the first difference in all else."""
        if saved.method != self.method:
            return f"it was saved with method {saved.method}, this run has {self.method}"
        for knob in sorted({*saved.knobs, *self.knobs}):
            saved_value, value = saved.knobs.get(knob, "no such knob"), self.knobs.get(knob, "no such knob")
            if saved_value != value:
                return f"it was saved with {knob}={saved_value} of {self.method}, this run has {knob}={value}"
        arguments = (("seed", saved.seed, self.seed), ("outlier_clip", saved.bound, self.bound))
        for argument, given_then, value_now in arguments:
            if given_then != value_now:
                return f"it was saved with {argument}={given_then}, this run has {argument}={value_now}"
        for name, (shape, _) in self.parameters.items():
            if name not in saved.parameters:
                return f"it does not hold {name}, which this run trains"
            if saved.parameters[name][0] != shape:
                return f"{name} was {saved.parameters[name][0]}, and is {shape} in this run"
        extra = [name for name in saved.parameters if name not in self.parameters]
        return f"it holds {extra[0]}, which this run does not train" if extra else None


def _knobs(method: Method) -> dict[str, str]:
    knobs = {knob.name: str(getattr(method, knob.name)) for knob in knobs_of(method)}
    if (carrier := method.card.carrier) is not None:
        knobs |= {f"{carrier.name}'s {knob}": value for knob, value in _knobs(carrier).items()}
    return knobs


def _across(weight: Tensor) -> bool:
    return any(placement.is_shard() and placement.dim != 0 for placement in getattr(weight, "placements", ()))


def _describe_engine(header: Header) -> str:
    return f"{header.engine} on two levels" if header.levels else header.engine


def _describe_ranks(header: Header) -> str:
    return " and ".join(f"rank {rank} of {rows}" for rank, rows, _ in header.hops)


class Form:
    """The keys, shapes and dtypes of one rank's saved state, the same in every step.

    Attributes:
        header: this rank's. shapes: key without the rank -> tensor without storage; not ``about`` and ``lengths``.
    """

    def __init__(self, header: Header, shapes: Mapping[str, Tensor]) -> None:
        self.header = header
        self.shapes = dict(sorted(shapes.items()))
        self._small = [key for key in self.shapes if key.startswith(LOOSE)]

    def pack(self, values: Mapping[str, Tensor], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Bring ``values``, by key without the rank, into this form: zeros on ``device`` stand for missing values, and
        follow a value whose last dimension may be longer in other steps."""
        entries = {"about": self.header.dump()}
        if self._small:
            lengths = [torch.atleast_1d(values[key]).shape[-1] if key in values else -1 for key in self._small]
            entries["lengths"] = torch.tensor(lengths, device="cpu")
        for key, like in self.shapes.items():
            value = values.get(key)
            if value is None:
                value = torch.zeros(like.shape, dtype=like.dtype, device=device)
            elif value.shape != like.shape and value.shape[:-1] == like.shape[:-1]:
                value = torch.nn.functional.pad(value, (0, like.shape[-1] - value.shape[-1]))
            entries[key] = value
        return {f"{self.header.prefix}/{key}": value for key, value in {**values, **entries}.items()}

    def unpack(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values that were packed into ``state``.

        Raises:
            ThinwireError: ``state`` is another rank's or another run's, lacks a key, has one that this run does not
                know or one of another shape or dtype, or a value that is not finite.
        """
        prefix, own_values = self.header.prefix, {key: state[full] for key, full in self._own_keys(state).items()}
        if "about" not in own_values:
            raise ThinwireError(f"the state has no '{prefix}/about': it was not made by wire.state_dict()")
        unlike = self.header.unlike(Header.load(f"{prefix}/about", own_values.pop("about")))
        if unlike:
            raise ThinwireError(f"the state does not fit this run: {unlike}")
        shapes = dict(self.shapes)
        if self._small:
            shapes["lengths"] = torch.empty(len(self._small), dtype=torch.int64, device="meta")
        _check_keys(prefix, own_values, shapes)
        return trim(own_values)

    def _own_keys(self, state: Mapping[str, Tensor]) -> dict[str, str]:
        """Return ``split``'s result for this rank; refuse a ``state`` with entries of other ranks."""
        header, owners = self.header, split(state)
        this_rank = f"this is rank {header.rank} of {header.ranks}"
        if not owners:
            raise ThinwireError(f"the state is empty, and {this_rank}: each rank loads what its own state_dict() gave")
        for rank, ranks in owners:
            advice = "each rank saves and loads its own"
            if ranks != header.ranks:
                advice = (
                    f"hand in the states of all {ranks} ranks in one dict, with resize='flush', 'redistribute' or "
                    "'reset'"
                )
            if (rank, ranks) != (header.rank, header.ranks):
                raise ThinwireError(f"the state is that of rank {rank} of {ranks}, and {this_rank}: {advice}")
        return owners[header.rank, header.ranks]


def trim(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a rank's ``values`` without absent entries and without the zeros that follow a value."""
    trimmed = {key: value for key, value in sorted(values.items()) if key != "lengths"}
    small = [key for key in trimmed if key.startswith(LOOSE)]
    for key, length in zip(small, values["lengths"].tolist() if small else (), strict=True):
        if length < 0:
            del trimmed[key]
        elif trimmed[key].dim():
            trimmed[key] = trimmed[key][..., :length]
    return trimmed


def _check_keys(prefix: str, values: Mapping[str, Tensor], shapes: Mapping[str, Tensor]) -> None:
    missing = [key for key in shapes if key not in values]
    if missing:
        raise ThinwireError(f"the state lacks '{prefix}/{missing[0]}'{_and_others(missing)}, which this run needs")
    unknown = [key for key in values if key not in shapes]
    if unknown:
        raise ThinwireError(f"the state has '{prefix}/{unknown[0]}'{_and_others(unknown)}, unknown to this run")
    for key, like in shapes.items():
        value = values[key]
        if value.shape != like.shape or value.dtype != like.dtype:
            raise ThinwireError(
                f"'{prefix}/{key}' is {value.dtype} {tuple(value.shape)}, this run needs {like.dtype} "
                f"{tuple(like.shape)}"
            )
        check_finite(f"{prefix}/{key}", value)


def _and_others(keys: Sequence[str]) -> str:
    return f" and {len(keys) - 1} other entries" if keys[1:] else ""


def check_finite(key: str, values: Tensor) -> None:
    if values.is_floating_point() and not bool(values.isfinite().all()):
        raise ThinwireError(
            f"the state '{key}' holds values that are not finite, which would spoil the weights in the first step: "
            "take an older checkpoint"
        )


def split(state: Iterable[str]) -> dict[tuple[int, int], dict[str, str]]:
    """Group keys of a state by (rank, ranks): key without the rank -> key. Raise ThinwireError for any other key."""
    owners: dict[tuple[int, int], dict[str, str]] = {}
    for key in state:
        match = _KEY.fullmatch(key)
        if match is None:
            raise ThinwireError(
                f"'{key}' is not an entry of a state, whose names are like 'rank-0000-of-0001/...': pass what "
                "wire.state_dict() returned; states of earlier versions of Thinwire cannot be read"
            )
        owners.setdefault((int(match[2]), int(match[3])), {})[match[4]] = key
    return owners


def own_of(state: Mapping[str, Tensor], header: Header) -> dict[str, Tensor] | None:
    """Return the entries in ``state`` of the rank that had the place of ``header``'s, by the keys of ``header``'s rank;
    None if other ranks or another engine saved it.

    It is the same rank, unless a mesh has the ranks in another order now.
    """
    owners, this_rank = split(state), (header.rank, header.ranks)
    alone = math.prod(header.nodes) == header.ranks  # else ranks with other parts have the same place
    others = [owner for owner in owners if alone and owner != this_rank and owner[1] == header.ranks]
    for owner in [this_rank, *others] if this_rank in owners else []:
        keys = owners[owner]
        if "about" in keys and not header.unlike_place(Header.load(keys["about"], state[keys["about"]])):
            return {f"{header.prefix}/{key}": state[full] for key, full in keys.items()}
    return None


def any_header(state: Mapping[str, Tensor]) -> Header | None:
    """Read the header of any rank in a saved state; None: there is none."""
    key = next((key for key in state if key.endswith("/about")), None)
    return None if key is None else Header.load(key, state[key])


def choice_in(state: Mapping[str, Tensor]) -> Choice:
    """Read from a saved state of any rank how its method was chosen. Raise ThinwireError if the user had named it."""
    header = any_header(state)
    if header is None or not header.choice:
        raise ThinwireError(
            "the state to resume from is of a run with a fixed method, not with 'auto': name that method"
        )
    return Choice.from_plain(json.loads(header.choice))


def from_dcp(checkpoint: str | os.PathLike, name: str = "wire") -> dict[str, Tensor]:
    """Read the states of all ranks that ``dcp.save({name: wire})`` wrote to the folder ``checkpoint`` onto the CPU.

    Use it for ``wire.load_state_dict(..., resize=...)`` on other ranks; on the same ranks ``dcp.load({name: wire})`` is
    enough. Not collective.
    """
    # Imported here, since these 70 modules are of no use to compress().
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(checkpoint)
    state = {
        key: torch.empty(metadata.size, dtype=metadata.properties.dtype, device="cpu")
        for key, metadata in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(f"{name}.rank-") and isinstance(metadata, TensorStorageMetadata)
    }
    if not state:
        raise ThinwireError(f"{checkpoint} holds no state of a wire under the name '{name}'")
    with warnings.catch_warnings():  # that no group is running, though one may be
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {key.removeprefix(f"{name}."): value for key, value in state.items()}

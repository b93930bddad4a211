"""Moving a saved state to other ranks: another number of them, or another engine.

A step delivers the mean over the N ranks that exchange, so what waits on rank n enters the mean as e_n / N. The move
keeps the *contribution*

    C = sum_n e_n / N          (HSDP and two levels: over the N nodes, shard by shard; C = s for an owner's row s)

rather than the sum of e_n, which stands for the same only if N does not change. Every new rank gets e' = C, so that
C' = sum_n' C / N' = C: no rank's part grows, and no rank has to inherit another's. The same holds for an average that
each rank keeps of its own gradients (Adam's v in ``methods/parts/updates.py``): new ranks get the mean of theirs.

The whole parameter, with its values in the order of their indices, connects the engines. FSDP2's rows are chunks of
dim 0, the last ones padded with zeros, so that all rows in order are the parameter and then padding. DDP's rows are
equal parts of the same values. HSDP's shard is one of FSDP2's chunks.

State without rows (a mask, a low-rank basis, a counter) moves as the method says: ``StateKind.resized``. Of what the
ranks across nodes have in common, each shard has its own, and goes on with that of the nearest old one.

Where replicas come and go (:func:`regroup`) each rank cuts its own rows anew in memory, and keeps all of e_n, so that
their *sum* over the ranks that stay is conserved. An owner's row s, N s in that sum, joins what waits on its rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.card import StateKind
from thinwire.core.method import Method, carrier_of
from thinwire.core.replica_check import describe_start
from thinwire.saved.format import Form, Header, check_finite, split, trim

_COUNTS = ("step", "skipped", "flush")


@dataclass(frozen=True)
class _Saved:
    """The part of a saved state that belongs to one rank."""

    header: Header
    keys: Mapping[str, str]
    state: Mapping[str, Tensor]

    def __getitem__(self, key: str) -> Tensor:
        value = self.state[self.keys[key]]
        check_finite(self.keys[key], value)
        return value


def move(state: Mapping[str, Tensor], form: Form, method: Method, *, drop: bool) -> tuple[dict[str, Tensor], float]:
    """Return the state of ``form``'s rank, by key without the rank, and the norm of what was dropped of C.

    Args:
        state: of all ranks that saved, merged. method: of the run that goes on. drop: drop what waits.

    Raises:
        ThinwireError: a rank's part is missing, or of another step; method, settings, seed or model differ; tensor or
            pipeline parallelism is used; something cannot be moved.
    """
    ranks = _read(state, form, alone=method.card.alone_from is not None)
    rows, lost = _rows(ranks, form, method, drop)
    counts = {key: ranks[0][key] for key in _COUNTS}
    values = {**counts, **_usual_norms(ranks, form), **rows, **_rowless(ranks, form, method)}
    if method.card.move is not None:
        method.card.move(values, ranks[0].header.nodes, form.header.nodes)
    return values, lost


def _read(state: Mapping[str, Tensor], form: Form, *, alone: bool) -> list[_Saved]:
    keys_by_rank = split(state)
    sizes = {ranks for _, ranks in keys_by_rank}
    if len(sizes) != 1:
        counts = " and ".join(map(str, sorted(sizes))) or "no"
        raise ThinwireError(f"resize needs the states of one run, but these are of runs with {counts} ranks")
    size = sizes.pop()
    if missing := [rank for rank in range(size) if (rank, size) not in keys_by_rank]:
        raise ThinwireError(f"resize needs the states of all {size} ranks that saved: rank {missing[0]}'s is missing")
    ranks = []
    for rank in range(size):
        keys = keys_by_rank[rank, size]
        if "about" not in keys:
            raise ThinwireError(f"the state of rank {rank} has no 'about': it was not made by wire.state_dict()")
        ranks.append(_Saved(Header.load(keys["about"], state[keys["about"]]), keys, state))
        if ranks[-1].keys.keys() != ranks[0].keys.keys():
            key = sorted(ranks[-1].keys.keys() ^ ranks[0].keys.keys())[0]
            raise ThinwireError(f"'{key}' is not in the states of all ranks: one of them is incomplete")
    for header in (*(saved.header for saved in ranks), form.header):
        unlike = form.header.unlike_run(header)
        if unlike:
            raise ThinwireError(f"the state does not fit this run: {unlike}")
        if math.prod(header.nodes) != header.ranks:
            raise ThinwireError("resize is for data parallelism alone, not beside tensor or pipeline parallelism")
        if header.across:
            raise ThinwireError(f"resize: {header.across[0]} is not sharded along its first dimension, as it must be")
    starts = [describe_start(*(int(saved[key]) for key in _COUNTS), alone=alone) for saved in ranks]
    if rank := next((rank for rank, start in enumerate(starts) if start != starts[0]), 0):
        raise ThinwireError(
            f"the state of rank {rank} is of {starts[rank]}, and that of rank 0 of {starts[0]}: load the states of "
            "one checkpoint"
        )
    return ranks


def _usual_norms(ranks: list[_Saved], form: Form) -> dict[str, Tensor]:
    """Move the outlier clip's usual norms: take the mean square over ranks, and give shards equal parts of it."""
    norms = {}
    for key, like in form.shapes.items():
        if key.startswith("bound/usual norm/"):
            squares = sum(float(saved[key]) ** 2 for saved in ranks) / len(ranks)
            ratio = ranks[0].header.shard[1] / form.header.shard[1]
            norms[key] = torch.tensor(math.sqrt(squares * ratio), dtype=like.dtype, device="cpu")
        elif key.startswith("bound/"):
            norms[key] = torch.zeros(like.shape, dtype=like.dtype, device="cpu")  # what was cut on this rank
    return norms


# What has rows.


def _rows(ranks: list[_Saved], form: Form, method: Method, drop: bool) -> tuple[dict[str, Tensor], float]:
    waits = method.card.promise.waits
    shapes = {key: like for key, like in form.shapes.items() if has_rows(key)}
    new = {key: torch.zeros(like.shape, dtype=like.dtype, device="cpu") for key, like in shapes.items()}
    squares = 0.0
    for name, (shape, _) in form.header.parameters.items():
        kinds = _kinds(form.shapes, name)
        whole = {
            kind: _contribution(ranks, kind, name, math.prod(shape), has_one_row(method, kind))
            for kind in _kinds(ranks[0].keys, name)
        }
        for kind in [kind for kind in whole if kind in waits and (drop or kind not in kinds)]:
            waiting = whole.pop(kind)
            home = next((kind for kind in waits if kind in kinds), None)
            if drop:
                squares += float((waits[kind] * waiting).square().sum())
            elif home is not None:  # a server's error without a server joins what waits on all ranks
                waiting = waiting * (waits[kind] / waits[home])
                whole[home] = waiting if home not in whole else whole[home] + waiting
            elif waiting.any():
                raise ThinwireError(
                    f"{name} has unsent values ({kind}), and stays dense in this run: pass resize='reset' to drop them"
                )
        for kind in kinds:
            if kind in whole:
                form_shape = form.shapes[f"{kind}/{name}"].shape
                served = _is_served(form.header, form_shape[0], has_one_row(method, kind))
                new[f"{kind}/{name}"] = _cut(whole[kind], form.header, name, form_shape, served)
    return new, math.sqrt(squares)


def regroup(values: Mapping[str, Tensor], old: Header, new: Header, method: Method) -> dict[str, Tensor]:
    """Move what one rank holds (``dump_state``) from the membership of ``old`` to that of ``new``, by the same keys.

    Not collective. What the method finds anew among other ranks is left out.
    """
    moved: dict[str, Tensor] = {}
    for key, value in values.items():
        kind, _, name = key.removeprefix("=").partition("/")
        entry = kind_of(method.card.state_kinds, kind)
        if not has_rows(key):
            if entry.resized != "anew":
                moved[key] = value
            continue
        whole = torch.zeros(_length(old, name), dtype=torch.float32, device=value.device)
        for row, start, count in _row_spans(old, name, value.shape, entry.served):
            whole[start : start + count] = value[row, :count]
        residual = f"{kind.removesuffix('server')}residual/{name}"
        target, share = (residual, old.hops[-1][1]) if entry.served else (key, 1)
        rows = 1 if has_one_row(method, kind) else new.hops[-1][1]
        span = share * _cut(whole, new, name, (rows, -(-new.parameters[name][1] // rows)), served=False)
        moved[target] = moved[target] + span if target in moved else span
    return moved


def kind_of(kinds: Mapping[str, StateKind], kind: str) -> StateKind:
    """Return the properties of ``kind``: those of the first name or pattern that fits it."""
    return next((entry for pattern, entry in kinds.items() if fnmatchcase(kind, pattern)), StateKind())


def has_one_row(method: Method, kind: str) -> bool:
    """Has ``kind`` one row, where each rank gets the whole mean? Else it has one for each rank, or its owner's."""
    one_row = kind_of(method.card.state_kinds, kind).one_row
    return carrier_of(method).card.summed_by_network if one_row is None else one_row


def has_rows(key: str) -> bool:
    return "/" in key and not key.startswith(("=", "bound/"))


def _kinds(keys: Mapping[str, object], name: str) -> list[str]:
    return [key.partition("/")[0] for key in keys if has_rows(key) and key.partition("/")[2] == name]


def _contribution(ranks: list[_Saved], kind: str, name: str, numel: int, one_row: bool) -> Tensor:
    """Return C of ``kind`` of parameter ``name``: (numel,) float64."""
    total = torch.zeros(_length(ranks[0].header, name), dtype=torch.float64, device="cpu")
    for saved in ranks:
        values = saved[f"{kind}/{name}"].double().cpu()
        served = _is_served(saved.header, len(values), one_row)
        share = 1.0 if served else 1 / saved.header.hops[-1][1]
        for row, start, count in _row_spans(saved.header, name, values.shape, served):
            total[start : start + count] += share * values[row, :count]
    return total[:numel]


def _cut(whole: Tensor, header: Header, name: str, shape: tuple[int, ...], served: bool) -> Tensor:
    """Cut ``whole`` (numel,) into rows of ``shape`` (R, span), those of ``header``'s rank: float32."""
    padded = torch.nn.functional.pad(whole, (0, _length(header, name) - len(whole)))
    values = torch.zeros(shape, dtype=torch.float32, device=whole.device)
    for row, start, count in _row_spans(header, name, shape, served):
        values[row, :count] = padded[start : start + count]
    return values


def _is_served(header: Header, rows: int, one_row: bool) -> bool:
    """Tell whether a kind with ``rows`` rows has only its owner's row, while the bucket has one row for each rank.

    ``one_row``: see ``has_one_row``.
    """
    _, ranks, owner = header.hops[-1]
    return rows == 1 < ranks and (owner or not one_row)


def _length(header: Header, name: str) -> int:
    """Count the parameter's values in all shards or rows, padding included."""
    _, ranks, owner = header.hops[-1]
    return header.parameters[name][1] * header.nodes[0] * (ranks if owner else 1)


def _inside(header: Header) -> tuple[int, int]:
    """Return the rank's number in its node, and of how many; (0, 1) where there is one hop."""
    return header.hops[0][:2] if len(header.hops) == 2 else (0, 1)


def _row_spans(header: Header, name: str, shape: tuple[int, ...], served: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (row, start in the padded whole, number of values) for a kind of ``shape`` (R, span) on one rank."""
    (rows, span), local = shape, header.parameters[name][1]
    rank, _, owner = header.hops[-1]
    inside, shards = _inside(header)
    for row in range(rows):
        number = rank if served else row
        if owner:  # the row of the rank in node ``number`` with this rank's place in its node
            yield row, (number * shards + inside) * local, span
        else:
            yield row, inside * local + number * span, min(span, max(local - number * span, 0))


# What has none.


def _rowless(ranks: list[_Saved], form: Form, method: Method) -> dict[str, Tensor]:
    small = [key for key in ranks[0].keys if key.startswith("=") or key == "lengths"]
    nearest = _nearest(ranks, form)
    by_rank = [trim({key: saved[key] for key in small}) for saved in ranks]
    moved = {}
    for key in by_rank[0]:
        kind, _, name = key.removeprefix("=").partition("/")
        rule = kind_of(method.card.state_kinds, kind).resized
        if rule is None:
            raise ThinwireError(f"{method.name} does not say what becomes of its state '{kind}' on other ranks")
        if rule == "anew" or (rule == "equal" and key not in form.shapes):
            continue
        value = by_rank[nearest][key]
        if rule in ("shard", "mean"):
            values = [by_rank[rank][key] for rank in _same_shard(ranks, form, kind)]
            if rule == "shard" and not all(torch.equal(shard, values[0]) for shard in values):
                raise ThinwireError(
                    f"{method.name}: '{kind}' of {name} differs between ranks: go on from a state that was saved at "
                    "the end of a round, where all ranks hold the same weights"
                )
            value = torch.stack([value.double() for value in values]).mean(0).to(values[0].dtype)
        if key not in form.shapes or value.shape != form.shapes[key].shape:
            raise ThinwireError(f"{method.name}: '{kind}' of {name} cannot be moved from {ranks[0].header.engine} to "
                                f"{form.header.engine} with its shape {tuple(value.shape)}")  # fmt: skip
        moved[key] = value
    return moved


def _nearest(ranks: list[_Saved], form: Form) -> int:
    """Return the first of the saved ranks whose shard has the middle of that of ``form``'s rank."""
    (inside, shards), saved_shards = _inside(form.header), _inside(ranks[0].header)[1]
    nearest = (2 * inside + 1) * saved_shards // (2 * shards)
    return next(rank for rank, saved in enumerate(ranks) if _inside(saved.header)[0] == nearest)


def _same_shard(ranks: list[_Saved], form: Form, kind: str) -> list[int]:
    """List the saved ranks that hold the same shard as ``form``'s rank."""
    inside, shards = form.header.shard
    saved_shards = ranks[0].header.shard[1]
    if saved_shards != shards or (shards > 1 and ranks[0].header.engine != form.header.engine):
        raise ThinwireError(
            f"'{kind}' belongs to one of {saved_shards} shards on {ranks[0].header.engine}, and this run has {shards} "
            f"on {form.header.engine}: use as many shards as before"
        )
    return [rank for rank, saved in enumerate(ranks) if saved.header.shard[0] == inside]

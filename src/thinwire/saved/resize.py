"""How a saved state moves to other ranks: another number of them, or another engine.

What arrives of a step is the mean over the ranks that exchange, so what waits on rank n enters it as e_n / N. That is
what has to be kept: the *contribution*

    C = sum_n e_n / N          (HSDP and two levels: over the N nodes, shard beside shard; an owner's stands for all: s)

and not the sum of e_n, which is as much only where N stays what it was. Every new rank gets e' = C, so that C' = sum_n'
C / N' = C: no rank's part grows, and nothing depends on who took whose place. It holds, too, of an average that each
rank keeps of its own gradients (Adam's v in ``methods/update.py``): the new ranks have the mean of the old ones'.

The bridge between engines is the whole parameter, as its values lie in the order of their indices. A row of FSDP2's is
a chunk of dim 0, the last ones padded with zeros, so the rows one behind the other are the parameter, and what follows
is padding; DDP's rows are as many equal parts of the same values; a shard of HSDP's is one of FSDP2's chunks.

What has no rows (a mask, a low-rank basis, a counter) goes by the method's own word: ``StateKind.resized``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.method import Method, carrier_of
from thinwire.saved.format import About, Form, check_finite, split, trim


@dataclass(frozen=True)
class _Saved:
    """One rank's part of a saved state: what made it, and its values, which are looked up once each."""

    about: About
    keys: Mapping[str, str]
    state: Mapping[str, Tensor]

    def __getitem__(self, key: str) -> Tensor:
        value = self.state[self.keys[key]]
        check_finite(self.keys[key], value)
        return value


def move(state: Mapping[str, Tensor], form: Form, method: Method, *, drop: bool) -> tuple[dict[str, Tensor], float]:
    """What the rank of ``form`` goes on from, by key without the rank, and the norm of what was dropped of C.

    Args:
        state: of all ranks that saved, merged. method: of the run that goes on. drop: what waits.

    Raises:
        ThinwireError: a rank's part is missing; another method, settings, seed or model; tensor or pipeline
            parallelism; something that cannot be moved.
    """
    ranks = _read(state, form)
    rows, lost = _rows(ranks, form, method, drop)
    counts = {key: ranks[0][key] for key in ("step", "skipped", "flush")}
    return {**counts, **_usual(ranks, form), **rows, **_small(ranks, form, method)}, lost


def _read(state: Mapping[str, Tensor], form: Form) -> list[_Saved]:
    found = split(state)
    sizes = {ranks for _, ranks in found}
    if len(sizes) != 1:
        given = " and ".join(map(str, sorted(sizes))) or "no"
        raise ThinwireError(f"resize needs the states of one run, and was given those of {given} ranks")
    size = sizes.pop()
    if missing := [rank for rank in range(size) if (rank, size) not in found]:
        raise ThinwireError(f"resize needs the states of all {size} ranks that saved: rank {missing[0]}'s is missing")
    ranks = []
    for rank in range(size):
        keys = {key.partition("/")[2]: key for key in found[rank, size]}
        if "about" not in keys:
            raise ThinwireError(f"the state of rank {rank} has no 'about': it was not made by wire.state_dict()")
        ranks.append(_Saved(About.load(keys["about"], state[keys["about"]]), keys, state))
        if ranks[-1].keys.keys() != ranks[0].keys.keys():
            other = sorted(ranks[-1].keys.keys() ^ ranks[0].keys.keys())[0]
            raise ThinwireError(f"'{other}' is not in the states of all ranks: one of them is not whole")
    for of in (*(saved.about for saved in ranks), form.about):
        unlike = form.about.unlike_run(of)
        if unlike:
            raise ThinwireError(f"the state does not fit this run: {unlike}")
        if math.prod(rows for _, rows, _ in of.hops) != of.ranks:
            raise ThinwireError("resize is for data parallelism alone, not beside tensor or pipeline parallelism")
        if of.across:
            raise ThinwireError(f"resize: {of.across[0]} is sharded along another dimension than the first")
    return ranks


def _usual(ranks: list[_Saved], form: Form) -> dict[str, Tensor]:
    """The bound's usual norms: of the whole gradient the mean square over ranks, a shard's an equal part of it."""
    found = {}
    for key, like in form.shapes.items():
        if key.startswith("bound/usual norm/"):
            squares = sum(float(saved[key]) ** 2 for saved in ranks) / len(ranks)
            ratio = ranks[0].about.shard[1] / form.about.shard[1]
            found[key] = torch.tensor(math.sqrt(squares * ratio), dtype=like.dtype)
        elif key.startswith("bound/"):
            found[key] = torch.zeros(like.shape, dtype=like.dtype)  # what was cut on this rank
    return found


# What has rows.


def _rows(ranks: list[_Saved], form: Form, method: Method, drop: bool) -> tuple[dict[str, Tensor], float]:
    on_wire, waits = carrier_of(method).card.summed_by_network, method.card.promise.waits
    new = {key: torch.zeros(like.shape, dtype=like.dtype) for key, like in form.shapes.items() if _has_rows(key)}
    squares = 0.0
    for name, (shape, _) in form.about.parameters.items():
        there = _kinds(form.shapes, name)
        whole = {
            kind: _whole(ranks, kind, name, math.prod(shape), on_wire) for kind in _kinds(ranks[0].keys, name)
        }
        for kind in [kind for kind in whole if kind in waits and (drop or kind not in there)]:
            waiting = whole.pop(kind)
            home = next((kind for kind in waits if kind in there), None)
            if drop:
                squares += float((waits[kind] * waiting).square().sum())
            elif home is not None:  # a server's error has no server any more: it joins what waits on all
                waiting = waiting * (waits[kind] / waits[home])
                whole[home] = waiting if home not in whole else whole[home] + waiting
            elif waiting.any():
                raise ThinwireError(f"{kind} of {name} waits, and {name} stays dense in this run: pass resize='reset'")
        for kind in there:
            if kind in whole:
                new[f"{kind}/{name}"] = _cut(whole[kind], form, kind, name, on_wire)
    return new, math.sqrt(squares)


def _has_rows(key: str) -> bool:
    return "/" in key and not key.startswith(("=", "bound/"))


def _kinds(keys: Mapping[str, object], name: str) -> list[str]:
    return [key.partition("/")[0] for key in keys if _has_rows(key) and key.partition("/")[2] == name]


def _whole(ranks: list[_Saved], kind: str, name: str, numel: int, on_wire: bool) -> Tensor:
    """C of ``kind`` of parameter ``name``: (numel,) float64."""
    total = torch.zeros(_length(ranks[0].about, name), dtype=torch.float64)
    for saved in ranks:
        values = saved[f"{kind}/{name}"].double().cpu()
        served = _is_served(saved.about, len(values), on_wire)
        share = 1.0 if served else 1 / saved.about.hops[-1][1]
        for row, at, count in _places(saved.about, name, values.shape, served):
            total[at : at + count] += share * values[row, :count]
    return total[:numel]


def _cut(whole: Tensor, form: Form, kind: str, name: str, on_wire: bool) -> Tensor:
    """``whole`` (numel,) as the rank of ``form`` keeps it: (R, span) float32."""
    about, shape = form.about, form.shapes[f"{kind}/{name}"].shape
    padded = torch.nn.functional.pad(whole, (0, _length(about, name) - len(whole)))
    values = torch.zeros(shape, dtype=torch.float32)
    for row, at, count in _places(about, name, shape, _is_served(about, shape[0], on_wire)):
        values[row, :count] = padded[at : at + count]
    return values


def _is_served(about: About, rows: int, on_wire: bool) -> bool:
    """Is a kind with so many ``rows`` the owner's of one row, where a bucket has one for each rank?"""
    _, of, owner = about.hops[-1]
    return rows == 1 < of and (owner or not on_wire)


def _length(about: About, name: str) -> int:
    """Values of the parameter as all shards or rows hold it together, with their padding."""
    _, of, owner = about.hops[-1]
    shards = about.hops[0][1] if len(about.hops) == 2 else 1
    return about.parameters[name][1] * shards * (of if owner else 1)


def _places(about: About, name: str, shape: tuple[int, ...], served: bool) -> Iterator[tuple[int, int, int]]:
    """(row, where its values lie in the padded whole, how many) of a kind of ``shape`` (R, span) on one rank."""
    (rows, span), local = shape, about.parameters[name][1]
    rank, _, owner = about.hops[-1]
    inside, shards = about.hops[0][:2] if len(about.hops) == 2 else (0, 1)
    for row in range(rows):
        number = rank if served else row
        if owner:  # of node ``number`` the row that the rank with this place in its node owns
            yield row, (number * shards + inside) * local, span
        else:
            yield row, inside * local + number * span, min(span, max(local - number * span, 0))


# What has none.


def _small(ranks: list[_Saved], form: Form, method: Method) -> dict[str, Tensor]:
    there = [_trimmed(saved) for saved in ranks]
    found = {}
    for key in there[0]:
        kind, _, name = key.removeprefix("=").partition("/")
        word = next((of.resized for pattern, of in method.card.state_kinds.items() if fnmatchcase(kind, pattern)), None)
        if word is None:
            raise ThinwireError(f"{method.name} does not say what becomes of its state '{kind}' on other ranks")
        if word == "anew" or (word == "equal" and key not in form.shapes):
            continue
        value = there[0][key]
        if word in ("shard", "mean"):
            of = _same_shard(ranks, form, kind)
            if word == "shard" and not all(torch.equal(there[rank][key], there[of[0]][key]) for rank in of):
                raise ThinwireError(
                    f"{method.name}: '{kind}' of {name} differs between ranks: go on from a state that was saved at "
                    "the end of a round, where all ranks hold the same weights"
                )
            value = torch.stack([there[rank][key].double() for rank in of]).mean(0).to(there[of[0]][key].dtype)
        if key not in form.shapes or value.shape != form.shapes[key].shape:
            raise ThinwireError(f"{method.name}: '{kind}' of {name} cannot be moved from {ranks[0].about.engine} to "
                                f"{form.about.engine} with its shape {tuple(value.shape)}")  # fmt: skip
        found[key] = value
    return found


def _trimmed(saved: _Saved) -> dict[str, Tensor]:
    small = [key for key in saved.keys if key.startswith("=") or key == "lengths"]
    return trim({key: saved[key] for key in small})


def _same_shard(ranks: list[_Saved], form: Form, kind: str) -> list[int]:
    """The ranks that hold the shard of the rank of ``form``."""
    inside, shards = form.about.shard
    before = ranks[0].about.shard[1]
    if before != shards or (shards > 1 and ranks[0].about.engine != form.about.engine):
        raise ThinwireError(
            f"'{kind}' belongs to one of {before} shards on {ranks[0].about.engine}, and this run has {shards} on "
            f"{form.about.engine}: keep as many"
        )
    return [rank for rank, saved in enumerate(ranks) if saved.about.shard[0] == inside]

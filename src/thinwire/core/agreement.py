"""Checks once, in ``compress()``, that all ranks agree on their settings, before an exchange depends on it.

Ranks that differ in a setting may send messages of equal size and misread them, and nobody would notice. So each rank
writes down as text what must be the same on all. The ranks first exchange a short fingerprint of it, and the texts only
if fingerprints differ: then every rank names the same rank, and the first fact that differs.

    with Agreement(comms) as agreement:
        ...                         # whatever a rank may refuse by itself
        agreement.compare(facts)    # all ranks have come this far, and agree
        ...                         # groups are made, kernels compiled
                                    # all ranks have come to the end

A rank that fails inside sends its message in the next comparison, and all raise. (If the others are making a group just
then, all wait until the group's timeout.)
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.base.errors import LostRank, ThinwireError
from thinwire.core.method import Method
from thinwire.core.names import bare_name
from thinwire.network.comm import GroupComm
from thinwire.ops.backends import cpu_kernels

Facts = Mapping[str, str]
"""Settings that must be the same on all ranks, by name, in the order in which differences are reported."""

_FAILED = "error"


class Agreement:
    """A passage of the program that all ranks complete, or none.

    A rank may be in several groups (HSDP: the ranks that share its shard, and those of its node). Messages are gathered
    in the first group, the result in the second, and so on, so that every rank sees all and comes to the same verdict.

    Attributes:
        undo: called if no rank goes on.
    """

    def __init__(self, comms: Sequence[GroupComm], beside: GroupComm | None = None) -> None:
        """``comms``: groups in which all facts must agree. ``beside``: one in which only ``shared`` facts must."""
        self._comms = [*comms, *([] if beside is None else [beside])]
        self._stages = 1 if beside is None else beside.size
        self._over = False
        self.undo: Callable[[], None] = lambda: None

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                self.compare({})
            except BaseException:
                self.undo()
                raise
            return
        self.undo()
        if isinstance(error, Exception) and not isinstance(error, LostRank) and not self._over:
            text = str(error) if isinstance(error, ThinwireError) else f"{type(error).__name__}: {error}"
            with suppress(LostRank):  # this rank's own message is the one that helps
                self.collect({_FAILED: text}, {})

    def compare(self, facts: Facts, shared: Facts | None = None) -> None:
        """Check that all ranks have the same ``facts``, and those ``beside`` the same ``shared`` ones.

        Raises:
            ThinwireError: they differ, or a rank has failed. All ranks that have not failed name the same rank and why.
        """
        rows = self.collect(facts, shared or {})
        if rows is None:
            return
        self._over = True
        for rank, facts_of_rank, _ in rows:
            if _FAILED in facts_of_rank:
                raise ThinwireError(f"rank {rank}: {facts_of_rank[_FAILED]}")
        per_stage = len(rows) // self._stages
        for first in range(0, len(rows), per_stage):
            _check([(rank, facts_of_rank) for rank, facts_of_rank, _ in rows[first : first + per_stage]])
        _check([(rank, shared_of_rank) for rank, _, shared_of_rank in rows])

    def collect(self, facts: Facts, shared: Facts) -> list[tuple[int, Facts, Facts]] | None:
        """Return None if all ranks agree; else (rank, facts, shared) of each rank. Collective."""
        comm = self._comms[0]
        text = zlib.compress(json.dumps([comm.ranks[comm.rank], facts, shared]).encode())
        digests = [hashlib.sha256(json.dumps(named).encode()).digest() for named in (facts, shared)]
        numbers = [*b"".join(digests), *len(text).to_bytes(8, "big"), _FAILED in facts]
        summary = torch.tensor(numbers, dtype=torch.uint8, device="cpu")
        summaries = self._gather(summary)
        stages = summaries.view(self._stages, -1, len(summary))
        alike = bool((stages[:, :, :32] == stages[:, :1, :32]).all() and (stages[..., 32:64] == summary[32:64]).all())
        if alike and not bool(summaries[:, -1].any()):
            return None
        longest = max(int.from_bytes(bytes(row[64:72].tolist()), "big") for row in summaries)
        texts = self._gather(torch.tensor([*text, *bytes(longest - len(text))], dtype=torch.uint8, device="cpu"))
        return [json.loads(zlib.decompressobj().decompress(bytes(row.tolist()))) for row in texts]

    def _gather(self, row: Tensor) -> Tensor:
        """Gather the ``row`` (m,) of all ranks in all groups: (N, m), in the same order on all ranks."""
        rows = row.view(1, -1)
        for comm in self._comms:
            own_row = rows.reshape(-1).to(comm.device)
            gathered = torch.empty((comm.size, own_row.numel()), dtype=row.dtype, device=comm.device)
            comm.all_gather(gathered, own_row)
            rows = gathered.cpu().view(-1, row.numel())
        return rows


class Difference(NamedTuple):
    """The first fact in which ranks differ: its ``value`` on ``rank``, and the ``usual`` one on ``other_ranks``."""

    name: str
    rank: int
    value: str
    other_ranks: str
    usual: str


def find_difference(rows: Sequence[tuple[int, Facts]]) -> Difference | None:
    """Find the first fact in which ``rows`` of (rank, facts) differ, and a rank outside the largest party."""
    for name in dict.fromkeys(name for _, facts in rows for name in facts):
        values = [(rank, facts.get(name, "nothing")) for rank, facts in rows]
        usual, count = Counter(value for _, value in values).most_common(1)[0]
        if count == len(rows):
            continue
        odd_rank, value = next((rank, value) for rank, value in values if value != usual)
        if len(rows) == 2:
            other_ranks = next(f"rank {rank}" for rank, _ in values if rank != odd_rank)
        else:
            other_ranks = "the others" if count == len(rows) - 1 else f"{count} of {len(rows)} ranks"
        return Difference(name, odd_rank, value, other_ranks, usual)
    return None


INSTRUCTIONS, KERNELS, GPU = "torch's CPU instructions", "Thinwire's CPU kernels", "the GPU"
_ADVICE = {
    INSTRUCTIONS: (
        "each rank updates its own copy of the weights, and the copies would drift apart: set ATEN_CPU_CAPABILITY "
        "on all ranks to the lowest of them (avx2, say), or shard weights with fully_shard"
    ),
    KERNELS: (
        "their results differ in the last bits, and the ranks' weights would drift apart: pip install "
        "'thinwire[cpu]' on all hosts or on none"
    ),
    GPU: (
        "their matrix products differ in the last bits, and this method needs equal bits on all ranks: use GPUs of "
        "one kind, or another method"
    ),
}


def host_facts(
    method: Method, optimizers: Sequence[torch.optim.Optimizer], device: torch.device, *, replicated: bool
) -> dict[str, str]:
    """Read this host's facts that change bits which must be equal on all ranks, for tensors on ``device``.

    ``replicated``: several ranks hold the same weights. numba's own instruction set changes no bits
    (tests/core/test_hosts.py tries all methods). GPUs of another kind take other kernels for matrix products.
    """
    if device.type == "cuda":
        return {GPU: torch.cuda.get_device_name(device)} if method.card.same_arithmetic else {}
    facts: dict[str, str] = {}
    if device.type != "cpu":
        return facts
    if replicated or method.card.same_arithmetic:
        facts[INSTRUCTIONS] = torch.backends.cpu.get_cpu_capability()
    if method.card.same_arithmetic or any(type(optimizer).__name__ == "AdamS" for optimizer in optimizers):
        facts[KERNELS] = cpu_kernels()
    return facts


def _check(rows: Sequence[tuple[int, Facts]]) -> None:
    if difference := find_difference(rows):
        usual = "all ranks call compress() with the same model, optimizer and arguments"
        raise ThinwireError(
            f"rank {difference.rank} has {difference.name} = {_short(difference.value)}, but on "
            f"{difference.other_ranks} it is {_short(difference.usual)}: {_ADVICE.get(difference.name, usual)}"
        )


def _short(value: str, longest: int = 120) -> str:
    return value if len(value) <= longest else value[: longest - 3] + "..."


def model_facts(model: nn.Module) -> dict[str, str]:
    """Describe the model's device and, in order, each parameter's name, whole shape, dtype, and whether it is trained.

    The device matters: a method's left-overs, which all ranks must know, may differ between CPU and GPU
    (``thinwire.ops.sketch``).
    """
    return {"device": ", ".join(sorted({parameter.device.type for parameter in model.parameters()}))} | {
        f"parameter {number}": f"{bare_name(name)} {tuple(parameter.shape)} "
        f"{str(parameter.dtype).removeprefix('torch.')}{'' if parameter.requires_grad else ', frozen'}"
        for number, (name, parameter) in enumerate(model.named_parameters())
    }


def optimizer_facts(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> dict[str, str]:
    """Describe the optimizers' kinds, and the settings and parameters of each of their groups."""
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    facts = {"optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers)}
    for i, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__ + (f" {i}" if len(optimizers) > 1 else "")
        for number, group in enumerate(optimizer.param_groups):
            group_name = f"({kind}, group {number})"
            for setting, value in group.items():
                if setting not in ("params", "param_names"):
                    facts[f"{setting} {group_name}"] = describe_value(value)
            members = [numbers.get(id(parameter), -1) for parameter in group["params"]]
            facts[f"parameter numbers {group_name}"] = " ".join(map(str, members))
    return facts


def describe_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: describe_value(value) for name, value in settings.items()}


def describe_value(value: Any) -> str:
    """Write ``value`` as text without its address in memory."""
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else f"tensor of {value.numel()} values"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value) if isinstance(value, Method) else repr(value))

"""A timeline is what one rank does in the steady state, in order: kernels and messages, buffer by buffer.

It is pure data. :mod:`thinwire.predict.record` makes it from a dry run of the method's own code;
:mod:`thinwire.predict.play` plays it on a cluster. Nothing else describes a method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

RING = ("all_reduce", "reduce_scatter")
"""Verbs whose bytes go around a ring; those of other verbs go to each peer."""


@dataclass(frozen=True)
class Group:
    """The ranks of one message.

    Attributes:
        size: ranks, N. per_node: those of them on one node, L.
        beside: groups of this kind that use a node's NICs at once (HSDP: one for each local rank), 1 or more.
    """

    size: int
    per_node: int
    beside: int = 1

    @property
    def crosses(self) -> bool:
        """Are its ranks on several nodes?"""
        return self.per_node < self.size


@dataclass(frozen=True)
class Pass:
    """A launch of a kernel.

    Attributes:
        kernel: "aten.mul_", "thinwire.ops.quant.quantize", or "engine.copy_in", what the engine does by itself.
        nbytes: read and written in memory.
    """

    kernel: str
    nbytes: float


@dataclass(frozen=True)
class Message:
    """A collective.

    Attributes:
        verb: "all_reduce", "reduce_scatter", "all_gather", "all_to_all" or "broadcast".
        nbytes: handed to the network by each rank: a ring's to its neighbour, else the sum over all peers.
        rounds: messages of a rank that wait for each other: each costs the latency once.
    """

    verb: str
    nbytes: float
    group: Group
    rounds: int = 1

    def rank_bytes(self, link: str) -> float:
        """Return the bytes that the mean rank of the group sends on ``link``, "inter" or "intra"."""
        group = self.group
        if not group.crosses:
            share = 0.0
        elif self.verb in RING or self.verb == "broadcast":
            share = 1 / group.per_node  # the last rank of a node sends to the next node
        else:
            share = (group.size - group.per_node) / (group.size - 1)
        return self.nbytes * (share if link == "inter" else 1 - share)

    @property
    def nic_bytes(self) -> float:
        """Bytes that leave one node for this message and those of the groups beside it."""
        return self.rank_bytes("inter") * self.group.per_node * self.group.beside


@dataclass(frozen=True)
class Stretch:
    """The events of one buffer of gradients, one sharded module's weights, or around an optimizer's step.

    Attributes:
        parameters: names of the parameters in the buffer or module, in its order; empty around the optimizer's step.
        events: kernels and messages, in order.
    """

    parameters: tuple[str, ...]
    events: tuple[Pass | Message, ...]

    @property
    def messages(self) -> Iterator[Message]:
        return (event for event in self.events if isinstance(event, Message))


@dataclass(frozen=True)
class RecordedStep:
    """A step of a method's cycle. ``share``: of the steps of the steady state, 0 to 1.

    Attributes:
        forward: messages before and in the forward pass: broadcast buffers, gathered weights, the first module first.
        again: weights gathered again in the backward pass: the root's, then the last module's.
        gradients: buffers in the order in which the backward pass fills them.
        update: the ranks' agreement, the method's and the optimizer's own kernels and messages.
        beside: what then travels while the next ``delay`` steps compute, at whose end the rank needs it.
        later: weights gathered in the forward pass of a further micro-batch: some methods' are there by then.
    """

    share: float
    forward: tuple[Stretch, ...]
    again: tuple[Stretch, ...]
    gradients: tuple[Stretch, ...]
    update: Stretch
    beside: Stretch = Stretch((), ())
    delay: int = 0
    later: tuple[Stretch, ...] = ()

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        return (*self.forward, *self.again, *self.gradients, self.update, self.beside)

    def sent(self, micro_batches: int) -> Iterator[Message]:
        """Iterate over the messages of the step in ``micro_batches``: gradients once, weights in each."""
        further = (*self.later, *self.again) * (micro_batches - 1)
        return (message for stretch in (*self.stretches, *further) for message in stretch.messages)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device, or 0. ``method``: what the method needs at its peak, beside the engine."""

    weights: float
    gradients: float
    optimizer: float
    method: float


@dataclass(frozen=True)
class Timeline:
    """The steady state of one rank: the steps of the method's cycle.

    Attributes:
        method: with its knobs. ranks, per_node: of the job.
        numel: values of each trained parameter, by name.
        optimizer_bytes: read and written by the optimizer's step on this rank.
        notes: sentences that a reader of a prediction should know (padding of dim 0, say).
    """

    method: str
    ranks: int
    per_node: int
    numel: Mapping[str, int]
    steps: tuple[RecordedStep, ...]
    memory: Memory
    optimizer_bytes: float
    notes: tuple[str, ...] = ()

"""SDP4Bit: four bits for weight differences, two levels for gradients (arXiv 2410.15526); ZeRO++ and QSDP beside it.

Gradients (TLq-HS, Alg. 3), with Q8 and Q4 the quantizers of groups of 128 and H the Hadamard transform of 32 values,
one behind the other:

    inside the node:   all-to-all of Q8(H g_n);  g' = mean of what arrived          (l. 2-8)
    across nodes:      all-to-all of Q4(H g') between equal local ranks;  G = mean of what arrived      (l. 9-13)
    for an all-reduce: all-gather of Q4(H G), across and then inside: every rank decodes the same bytes

Ours transforms back after each hop; the paper's l. 6 and 8 cancel there: the same up to float32 rounding. Where all
ranks are on one node there is the inside hop alone, where each is on a node of its own the other one.

Weights (qWD, Alg. 4, where the engine shards them), with w the owner's master and r the replica that all ranks hold:

    all-gather of d = Q4(w - r) of each owner's shard;  r += d, at the owner too     (l. 7-8)

so that r is bit-equal on all ranks, and what Q4 left out is in the next difference: feedback without a buffer. (Alg. 4,
l. 6 as printed resets the master to r + update, which loses it: a misprint.) The replica is what the model computes
with. It is sent to once per optimizer step, whatever the engine asks for; a skipped step sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.bucket import PEERS, Bucket, Piece, Shards, padded
from thinwire.codecs.base import Codec
from thinwire.codecs.cast import Bf16, Fp32
from thinwire.codecs.grouped import GroupedBytes
from thinwire.codecs.intquant import ROUNDINGS, Integers, ShiftedInt8
from thinwire.collectives import Exchange
from thinwire.comm import Then
from thinwire.errors import ThinwireError
from thinwire.methods.base import CONSERVES, SMALL, Method, Parameter, Promise, Rounding, check_smallest, exempt_small
from thinwire.ops.quant import ORDER
from thinwire.streams import Seeds, seed_of

WEIGHTS = ("difference", "plain", "dense")
_EVERYTHING = {"send": ("*",)}
_DENSE = {"bits": 32, "intra_bits": 32}


@dataclass
class SDP4Bit(Method):
    """Weight differences in 4 bits, gradients in 8 bits inside a node and 4 across (arXiv 2410.15526).

    Args:
        weights: what is sent of them where the engine shards them: "difference" (qWD: to a replica of all weights on
            every rank, n values more memory), "plain" (qW: the weights themselves, whose small changes are rounded
            away) or "dense".
        weight_bits: 4 or 8. weight_group: values that share a scale (larger => fewer bytes, more error).
        weight_rounding: "nearest", "stochastic" (the authors'; twice the variance, and differences need no
            unbiasedness: what is left out comes next) or "shift" (QSDP's: 8 bits, one random shift for all values).
        bits: of gradient values across nodes: 4, 8, 16 (bfloat16) or 32. intra_bits: the same inside a node.
        group: gradient values that share a scale, a power of two from 32.
        hadamard: transform gradients before they are quantized (halves the error of heavy tails).
        rounding: of gradients, "stochastic" (unbiased) or "nearest" (half the variance, and a bias that adds up).
        smallest: elements below which a tensor stays dense (higher => fewer tensors compressed).
    """

    name: ClassVar[str] = "sdp4bit"
    on_wire: ClassVar[bool] = False
    two_level: ClassVar[bool] = True
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {**_EVERYTHING, "weight_rounding": "stochastic"},
        "qwd": {**_EVERYTHING, **_DENSE},
        "qw": {**_EVERYTHING, **_DENSE, "weights": "plain"},
        "tlq-hs": {**_EVERYTHING, "weights": "dense"},
        "tlq": {**_EVERYTHING, "weights": "dense", "hadamard": False},
        "ulq": {**_EVERYTHING, "weights": "dense", "hadamard": False, "intra_bits": 4},
    }

    weights: str = "difference"
    weight_bits: int = 4
    weight_group: int = 2048
    weight_rounding: str = "nearest"
    bits: int = 4
    intra_bits: int = 8
    group: int = 128
    hadamard: bool = True
    rounding: str = "stochastic"
    smallest: int = SMALL

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ThinwireError(f"{self.name}: weights is one of {', '.join(WEIGHTS)}, got '{self.weights}'")
        for knob, allowed in (("rounding", ROUNDINGS), ("weight_rounding", (*ROUNDINGS, "shift"))):
            if getattr(self, knob) not in allowed:
                raise ThinwireError(f"{self.name}: {knob} is {' or '.join(allowed)}, got '{getattr(self, knob)}'")
        if self.weight_rounding == "shift" and self.weight_bits != 8:
            raise ThinwireError(f"{self.name}: weight_rounding='shift' has 8 bits, got weight_bits={self.weight_bits}")
        if self.weight_bits not in (4, 8):
            raise ThinwireError(f"{self.name}: weight_bits is 4 or 8, got {self.weight_bits} (weights='dense' for all)")
        super().__post_init__()
        check_smallest(self.name, self.smallest)
        if self.group < 1:
            raise ThinwireError(f"{self.name}: group must be 1 value or more, got {self.group}")
        self._intra_codec = self._gradients(self.intra_bits)
        self._weight_codec = self.make_weight_codec()
        self._replicas: dict[tuple[str, ...], _Replica] = {}
        self._scratch = torch.empty(0)
        self._bits: dict[str, tuple[int, int]] = {}  # of each parameter: bits sent, values

    @property
    def promise(self) -> Promise:
        fewest, plain = min(self.bits, self.intra_bits), self.weights == "plain"
        if fewest == 32 and not plain:
            return CONSERVES
        named = [f"{self.weight_bits} bits cannot hold of the weights"] if plain else []
        if fewest < 32:
            named.append(f"{self._rounding().bits} cannot hold of the gradients")
        returned = ": weights='difference' returns it" if fewest == 32 else ""
        return Promise("rounds", f"what {' and '.join(named)} is not returned{returned}", rounding=self._rounding())

    def _rounding(self) -> Rounding:
        """Of gradients, on the coarser of the two hops."""
        bits = min(self.bits, self.intra_bits)
        if bits >= 16:
            return Rounding("bfloat16", value=2.0**-8) if bits == 16 else Rounding("float32")
        # A code is right to half a step or, stochastically, to one and the 2^-17 to which its random bits reach.
        step = (0.5 if self.rounding == "nearest" else 1 + 2.0**-17) / (7 if bits == 4 else 127)
        return Rounding(f"{bits} bits", step=step, group=self.group, block=ORDER if self.hadamard else 1)

    def make_codec(self) -> Codec:
        return self._gradients(self.bits)

    def make_weight_codec(self, shift: float = 0.0) -> GroupedBytes:
        """``shift``: of a gathering's lattice, with weight_rounding="shift"."""
        if self.weight_rounding == "shift":
            return ShiftedInt8(self.weight_group, shift)
        return Integers(self.weight_group, self.weight_bits, rounding=self.weight_rounding)

    def _gradients(self, bits: int) -> Codec:
        if bits in (16, 32):
            return Bf16() if bits == 16 else Fp32()
        if bits not in (4, 8):
            raise ThinwireError(f"{self.name}: bits and intra_bits are 4, 8, 16 or 32, got {bits}")
        return Integers(self.group, bits, self.hadamard, self.rounding)

    def intra(self) -> SDP4Bit:
        return replace(self, bits=self.intra_bits, weights="dense")

    def policy(self, parameter: Parameter) -> str | None:
        return exempt_small(parameter, self.smallest)

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        codec = self._intra_codec if exchange.one_node else self.codec
        assert codec is not None
        for part in bucket.segments:
            self._bits[part.name] = 8 * len(bucket.rows) * codec.wire_bytes(part.width), part.piece.numel
        seed = self._seeds(bucket, exchange) if codec.draws else None
        exchange.mean(bucket, codec, on_wire=self.on_wire, seed=seed)

    def _seeds(self, bucket: Bucket, exchange: Exchange) -> Seeds:
        stream = f"{type(exchange).__name__}/{self.run.hop}/{self.run.rank}"
        return Seeds(tuple(
            (part.start, part.start + part.width, seed_of(self.run.seed, f"{stream}/{part.name}", bucket.step))
            for part in bucket.segments
        ))  # fmt: skip

    @property
    def encodes_weights(self) -> bool:
        return self.weights != "dense"

    @property
    def resident(self) -> bool:
        return self.weights == "difference"

    def gather(self, shards: Shards, *, async_op: bool = False) -> dist.Work | None:
        key = shards.module
        if key not in self._replicas:
            self._replicas[key] = _Replica(self, shards)
        replica = self._replicas[key]
        shift = seed_of(self.run.seed, f"shift/{key}", shards.step) / 2**63 - 0.5
        codec, stream = self.make_weight_codec(shift), f"weights/{shards.comm.rank}"
        seed = Seeds(tuple(
            (first, last, seed_of(self.run.seed, f"{stream}/{name}", shards.step))
            for first, last, name in replica.columns
        )) if codec.draws else None  # fmt: skip
        if self.weights == "plain":
            return replica.send(shards, codec, seed, async_op)
        return replica.follow(shards, codec, seed, async_op)

    def state_changed(self) -> None:
        for replica in self._replicas.values():
            replica.step = None

    def facts(self) -> dict[str, float]:
        """Bits per value, with scales and padding; of weights also what stays dense among them."""
        found = {}
        if self._bits:
            bits, values = (sum(column) for column in zip(*self._bits.values(), strict=True))
            found["bits per gradient" if self.run.hop == 1 else "bits per gradient, across"] = bits / values
        sent = [replica for replica in self._replicas.values() if replica.bits]
        if sent:
            found["bits per weight"] = sum(of.bits for of in sent) / sum(of.values for of in sent)
        return found

    def scratch(self, rows: int, width: int, device: torch.device) -> Tensor:
        """(rows, width) float32 for decoded shards, with which all modules take turns."""
        if self._scratch.numel() < rows * width or self._scratch.device != device:
            self._scratch = torch.empty(rows * width, device=device)
        return self._scratch[: rows * width].view(rows, width)


class _Replica:
    """All ranks' weights of one FSDP module as all ranks have them, and the message that moves them on.

    Attributes:
        step: optimizer steps taken when the weights were last sent; None: never, or they are no longer ours.
        bits, values: of the last message.
    """

    def __init__(self, method: SDP4Bit, shards: Shards) -> None:
        self._method, self.state = method, method.state
        self.names = [piece.name for piece in shards.pieces]
        self.step: int | None = None
        self.bits = self.values = 0
        self._sent: list[tuple[Piece, int]] = []  # and its first column among the values to encode
        self._kept: list[tuple[Piece, int]] = []  # and its first byte in the message, behind what is encoded
        width = 0
        kept: list[Piece] = []
        for piece in shards.pieces:
            if method.keep_dense(method.run.parameters[piece.name]) is None:
                self._sent.append((piece, width))
                width += padded(piece.numel, method.weight_group)
            else:
                kept.append(piece)
        if not method.resident:
            kept += shards.frozen
        place = self._encoded = method._weight_codec.wire_bytes(width)
        for piece in kept:
            self._kept.append((piece, place))
            place += piece.numel * shards.own.element_size()
        device = shards.own.device
        self._values = torch.zeros((1, width), device=device)  # float32
        self._message = torch.zeros(padded(place, 4), dtype=torch.uint8, device=device)
        self._everybody = torch.zeros((shards.comm.size, len(self._message)), dtype=torch.uint8, device=device)
        self._own: Tensor | None = None  # this rank's row of the replica
        self._out: Tensor | None = None

    @property
    def columns(self) -> list[tuple[int, int, str]]:
        """First and last column of each parameter among the values to encode."""
        group = self._method.weight_group
        return [(first, first + padded(piece.numel, group), piece.name) for piece, first in self._sent]

    def follow(self, shards: Shards, codec: Codec, seed: Seeds | None, async_op: bool) -> dist.Work | None:
        """Send the difference, once per optimizer step."""
        if self._own is None or self._out is None or self._out.data_ptr() != shards.out.data_ptr():
            self._own, self._out, self.step = shards.own.clone(), shards.out, None
        elif shards.changed and self.step is not None:  # a copy that was just loaded, and not used yet, is kept
            self.step = None
            for name in self.names:
                self.state.discard("replica", name)
        if self.step is None and self._share(shards) == shards.step:
            self._remember(shards.step)
            return None
        if self.step == shards.step or not self.names:
            shards.own.copy_(self._own)  # the engine has put the master there
            return None
        for piece, column in self._sent:
            at = slice(piece.offset, piece.offset + piece.numel)
            torch.sub(shards.own[at], self._own[at], out=self._values[0, column : column + piece.numel])
        self._remember(shards.step)
        return self._exchange(shards, codec, seed, async_op, add=True)

    def send(self, shards: Shards, codec: Codec, seed: Seeds | None, async_op: bool) -> dist.Work | None:
        """Send the weights themselves: what their bytes decode to is what all compute with, the owner too."""
        for piece, column in self._sent:
            self._values[0, column : column + piece.numel].copy_(shards.own[piece.offset : piece.offset + piece.numel])
        return self._exchange(shards, codec, seed, async_op, add=False)

    def _share(self, shards: Shards) -> int:
        """Everybody's row as its owner has it, saved or else the weights as they are. The step that it belongs to."""
        assert self._own is not None
        step, saved = shards.step, {name: self.state.get("replica", name) for name in self.names}
        master = shards.own.clone()
        for piece in shards.pieces:
            values = saved[piece.name]
            if values is None:
                continue
            if values.numel() != piece.numel:
                raise ThinwireError(
                    f"state 'replica' of {piece.name} has {values.numel()} values, this run needs {piece.numel}: "
                    "it was saved with another world size"
                )
            shards.own[piece.offset : piece.offset + piece.numel].copy_(values)
            found = self.state.get("replica step", piece.name)
            assert found is not None
            step = int(found)
        shards.comm.all_gather(shards.out, shards.own)
        self._own.copy_(shards.own)
        if step != shards.step:
            shards.own.copy_(master)
        return step

    def _remember(self, step: int) -> None:
        """Have this rank's row in the saved state: views, which follow."""
        assert self._own is not None
        if self.step is None:
            for piece in (piece for pieces in (self._sent, self._kept) for piece, _ in pieces):
                self.state.set("replica", piece.name, self._own[piece.offset : piece.offset + piece.numel])
        self.step = step
        for name in self.names:
            self.state.set("replica step", name, torch.tensor(step))

    def _exchange(
        self, shards: Shards, codec: Codec, seed: Seeds | None, async_op: bool, *, add: bool
    ) -> dist.Work | None:
        ledger, message = shards.comm.ledger, self._message
        sent = [piece for pieces in (self._sent, self._kept) for piece, _ in pieces]
        self.bits, self.values = 8 * len(message), sum(piece.numel for piece in sent)
        with ledger.span("encode", message):
            if self._sent:
                codec.encode(self._values, message[: self._encoded].view(1, -1), seed=seed)
            for piece, place in self._kept:
                self._as_sent(message, piece, place, shards.own.dtype).copy_(
                    shards.own[piece.offset : piece.offset + piece.numel]
                )
        # On CUDA everything is in the order of the engine's own stream: there is nothing to wait for on the host.
        work = shards.comm.all_gather(self._everybody, message, async_op=async_op and not message.is_cuda)

        def receive() -> None:
            with ledger.span("decode", message), torch.no_grad():
                self._receive(shards, codec, add)

        if work is None:
            receive()
            return None
        return Then(work, receive)

    def _receive(self, shards: Shards, codec: Codec, add: bool) -> None:
        if add and self._own is not None:
            shards.own.copy_(self._own)
        everybody = zip(shards.out.view(shards.comm.size, -1).split(PEERS), self._everybody.split(PEERS), strict=True)
        for rows, messages in everybody:
            values = self._method.scratch(len(rows), self._values.shape[1], rows.device)
            if self._sent:
                codec.decode(messages[:, : self._encoded], values)
            for piece, column in self._sent:
                got, target = values[:, column : column + piece.numel], rows[:, piece.offset :][:, : piece.numel]
                target.add_(got) if add else target.copy_(got)
            for piece, place in self._kept:
                got = self._as_sent(messages, piece, place, rows.dtype)
                rows[:, piece.offset : piece.offset + piece.numel].copy_(got)
        if add and self._own is not None:
            self._own.copy_(shards.own)

    @staticmethod
    def _as_sent(message: Tensor, piece: Piece, place: int, dtype: torch.dtype) -> Tensor:
        """``piece`` in ``message`` (..., bytes)."""
        return message[..., place : place + piece.numel * dtype.itemsize].view(dtype)


@dataclass
class ZeROPP(SDP4Bit):
    """ZeRO++ (arXiv 2306.10209): weights in 8 bits, gradients in 4 bits on both levels. All knobs are sdp4bit's.

    What it rounds away of small weight changes is lost. Its secondary copy of the weights inside each node (hpZ) is
    what HSDP does anyway.
    """

    name: ClassVar[str] = "zeropp"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"w4": {**_EVERYTHING, "weight_bits": 4}}

    weights: str = "plain"
    weight_bits: int = 8
    intra_bits: int = 4
    hadamard: bool = False


@dataclass
class QSDP(SDP4Bit):
    """QSDP (arXiv 2302.02390): weights in 8 bits on a randomly shifted lattice, gradients in 8 bits. Knobs: sdp4bit's.

    One level: all-to-all between all ranks.
    """

    name: ClassVar[str] = "qsdp"
    two_level: ClassVar[bool] = False
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    weights: str = "plain"
    weight_bits: int = 8
    weight_group: int = 1024
    weight_rounding: str = "shift"
    bits: int = 8
    group: int = 1024
    hadamard: bool = False

"""SDP4Bit: four bits for weight differences, two levels for gradients (arXiv 2410.15526).

Gradients (TLq-HS, Alg. 3), with Q8 and Q4 the quantizers of groups of 128 and H the Hadamard transform of 32 values,
one behind the other:

    inside the node:   all-to-all of Q8(H g_n);  g' = mean of what arrived                              (l. 2-7)
    across nodes:      all-to-all of Q4(H g') between equal local ranks;  G = mean of what arrived      (l. 8-13)
    for an all-reduce: all-gather of Q4(H G), across and then inside: every rank decodes the same bytes

The all-reduce is ours; the paper shards, and needs none. Ours transforms back once per hop, behind the sum. The paper
leaves out l. 6 and 8, which cancel (Sec. 3.3): the same up to float32 rounding. Where all ranks are on one node there
is the inside hop alone, where each is on a node of its own the other one.

Weights (qWD, Alg. 4, where the engine shards them), with w the owner's master and r the replica that all ranks hold:

    r = w at first (:class:`thinwire.core.weights.Replica`)                               (l. 2)
    all-gather of d = Q4(w - r) of each owner's shard;  r += d, at the owner too     (l. 7-8)

so that r is bit-equal on all ranks, and what Q4 left out is in the next difference: feedback without a buffer. (Alg. 4,
l. 6 as printed resets the master to r + update, which loses it: a misprint.) The replica is what the model computes
with. It is sent to once per optimizer step, whatever the engine asks for; a skipped step sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire.base.alignment import padded
from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import Within, knobs_of
from thinwire.base.random import Pool, Seeds, seed_of
from thinwire.codecs.base import Codec
from thinwire.codecs.cast import Bf16, Fp32
from thinwire.codecs.grouped import GroupedBytes
from thinwire.codecs.intquant import Integers, ShiftedInt8
from thinwire.core.bucket import Bucket, Shard
from thinwire.core.card import Card
from thinwire.core.exchange import Exchange
from thinwire.core.method import SMALL, Method, Smallest, exempt_small
from thinwire.core.promise import CONSERVES, Promise, Rounding
from thinwire.core.run import Parameter, Run
from thinwire.core.selection import keep_dense
from thinwire.core.weights import Columns, Message, lay_out
from thinwire.ops import shards
from thinwire.ops.quant import ORDER
from thinwire.ops.rows import CopyTable

Weights = Literal["difference", "plain", "dense"]
Bits = Literal[4, 8, 16, 32]
DECODE_CHUNK_VALUES = 1 << 24
"""Values of shards that are decoded at once where no kernel knows the codec. More => fewer launches, more scratch
memory (4 bytes each)."""
_EVERYTHING = {"send": ("*",)}
_DENSE = {"bits": 32, "intra_bits": 32}


@dataclass
class SDP4Bit(Method):
    """Weight differences in 4 bits; gradients in 8 bits inside a node, in 4 across (arXiv 2410.15526, Alg. 3-4).

    Args:
        weights: what is sent of sharded weights: "difference" (qWD: the change since the last message; each rank
            keeps a copy of all weights), "plain" (qW: the weights, whose small changes are rounded away) or "dense".
        weight_bits: bits of a weight value, 4 or 8 (fewer => fewer bytes, more error).
        weight_group: weight values that share a scale (larger => fewer bytes, more error).
        weight_rounding: "nearest", "stochastic" (the authors'; twice the variance, and differences need no
            unbiasedness: what is left out comes next) or "shift" (QSDP's: 8 bits, one random shift for all values).
        bits: bits per gradient value across nodes: 4, 8, 16 (bfloat16) or 32 (fewer => fewer bytes, more error).
        intra_bits: bits per gradient value inside a node: 4, 8, 16 or 32.
        group: gradient values that share a scale, a power of two from 32.
        hadamard: transform gradients before they are quantized (halves the error of heavy tails).
        rounding: of gradients: "stochastic" (unbiased) or "nearest" (half the variance, and a bias that adds up).
        smallest: tensors of fewer elements stay dense (higher => fewer tensors compressed).
    """

    name: ClassVar[str] = "sdp4bit"
    two_level: ClassVar[bool] = True
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {**_EVERYTHING, "weight_rounding": "stochastic"},
        "qwd": {**_EVERYTHING, **_DENSE},
        "qw": {**_EVERYTHING, **_DENSE, "weights": "plain"},
        "tlq-hs": {**_EVERYTHING, "weights": "dense"},
        "tlq": {**_EVERYTHING, "weights": "dense", "hadamard": False},
        "ulq": {**_EVERYTHING, "weights": "dense", "hadamard": False, "intra_bits": 4},
    }

    weights: Weights = "difference"
    weight_bits: Literal[4, 8] = 4
    weight_group: int = 2048
    weight_rounding: Literal["nearest", "stochastic", "shift"] = "nearest"
    bits: Bits = 4
    intra_bits: Bits = 8
    group: Annotated[int, Within(lambda group: group >= 1, "must be 1 value or more")] = 128
    hadamard: bool = True
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    smallest: Smallest = SMALL

    def __post_init__(self) -> None:
        if self.weight_rounding == "shift" and self.weight_bits != 8:
            raise ThinwireError(f"{self.name}: weight_rounding='shift' needs weight_bits=8, got {self.weight_bits}")
        super().__post_init__()
        self._intra_codec = self._gradients(self.intra_bits)
        self.make_weight_codec()  # refuses what no codec takes
        self._messages: dict[tuple[str, ...], QuantizedWeights] = {}  # by module
        # Of the last step: its stream, and the seed of each parameter.
        self._pool: tuple[tuple[str, int], dict[str, int], Pool] = ("", -1), {}, Pool(())
        self._bits: dict[str, tuple[int, int]] = {}  # of each parameter: bits sent, values

    def describe(self) -> Card:
        assert self.codec is not None
        knobs = {knob.name: getattr(self, knob.name) for knob in knobs_of(SDP4Bit)}
        return replace(
            super().describe(), promise=self._promise(), summed_by_network=False, rows_apart=True,
            group=math.lcm(self.codec.group, self._intra_codec.group),  # either may be due
            encodes_weights=self.weights != "dense", row_codec=self._intra_codec if self._stays_inside else self.codec,
            intra=SDP4Bit(**{**knobs, "bits": self.intra_bits, "weights": "dense"}),  # Alg. 3, l. 2-7
        )  # fmt: skip

    @property
    def _stays_inside(self) -> bool:
        """Is it known that all ranks are of one node?"""
        return "run" in vars(self) and self.run.exchange.comm.one_node

    @property
    def _fewest_bits(self) -> int:
        return self.intra_bits if self._stays_inside else min(self.bits, self.intra_bits)

    def _promise(self) -> Promise:
        fewest, plain = self._fewest_bits, self.weights == "plain"
        if fewest == 32 and not plain:
            return CONSERVES
        named = [f"the weights to {self.weight_bits} bits"] if plain else []
        if fewest < 32:
            named.append(f"the gradients to {self._rounding().bits}")
        end = ": weights='difference' keeps it" if fewest == 32 else ""
        return Promise("rounds", f"the error of rounding {' and '.join(named)} is lost{end}", rounding=self._rounding())

    def _rounding(self) -> Rounding:
        """Return the rounding of gradients, on the coarser of the two hops."""
        bits = self._fewest_bits
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
        return Integers(self.group, bits, self.hadamard, self.rounding)

    def policy(self, parameter: Parameter) -> str | None:
        return exempt_small(parameter, self.smallest)

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._sent = [name for name, parameter in run.parameters.items() if keep_dense(self, parameter) is None]

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Do one hop of Alg. 3, in its order: inside the node (l. 2-7), or across nodes (l. 8-13)."""
        quantizer = self._intra_codec if exchange.comm.one_node else self.codec  # Q8 inside, Q4 across
        assert quantizer is not None
        seed = self._seeds(bucket, exchange) if quantizer.draws else None
        # l. 2 (across: 8)   g^ = Hadamard(grad)                Integers.encode: transforms and
        # l. 3 (9)           qg = Quantize(g^)                  quantizes in one pass
        # l. 4 (10)          list(qg) = AlltoAll(qg)            on_wire=False: all-to-all, no sum by the network
        # l. 5 (11)          list(g^) = Dequantize(list(qg))    Integers.decode_sum: in one pass the values,
        # l. 7 (12)          g = Reduction(list(g^))            their mean,
        # l. 6 (13)          g = Hadamard(g)                    and one transform behind it (Sec. 3.3)
        exchange.mean(bucket, quantizer, on_wire=False, seed=seed)
        for segment in bucket.segments:
            bits = 8 * len(bucket.rows) * quantizer.wire_bytes(segment.width)
            self._bits[segment.name] = bits, segment.piece.numel

    def _seeds(self, bucket: Bucket, exchange: Exchange) -> Seeds:
        stream = f"{type(exchange).__name__}/{self.run.hop}/{self.run.rank}"
        if self._pool[0] != (stream, bucket.step):
            seeds = {name: seed_of(self.run.seed, f"{stream}/{name}", bucket.step) for name in self._sent}
            self._pool = (stream, bucket.step), seeds, Pool(seeds.values())
        _, seeds, pool = self._pool
        return Seeds(tuple((s.start, s.start + s.width, seeds[s.name]) for s in bucket.segments), pool)

    def weight_message(self, shard: Shard, rank: int) -> Message:
        message = self._messages[shard.names] = QuantizedWeights(self, shard, rank)
        return message

    def facts(self) -> dict[str, float]:
        """Bits per value, with scales and padding; of weights also what stays dense among them."""
        figures = {}
        if self._bits:
            bits, values = (sum(column) for column in zip(*self._bits.values(), strict=True))
            figures["bits per gradient" if self.run.hop == 1 else "bits per gradient, across"] = bits / values
        sent = [message for message in self._messages.values() if message.bits]
        if sent:
            figures["bits per weight"] = sum(message.bits for message in sent) / sum(message.values for message in sent)
        return figures


class QuantizedWeights(Message):
    """A module's weights, Q(w), or what has changed of them, Q(w - r); what stays dense travels behind as it is.

    Attributes:
        bits: of the last message. values: in it.
    """

    def __init__(self, method: SDP4Bit, shard: Shard, rank: int) -> None:
        self.resident = method.weights == "difference"
        self.bits = 0
        self._make_codec, self._seed = method.make_weight_codec, method.run.seed
        self._rank, self._module = rank, shard.names
        self._codec = self._make_codec()  # of the last message
        encoded = [piece for piece in shard.pieces if keep_dense(method, method.run.parameters[piece.name]) is None]
        dense = [piece for piece in shard.pieces if piece not in encoded]
        dense += [] if self.resident else shard.frozen
        size, group = shard.dtype.itemsize, self._codec.group
        self._encoded, self._width = lay_out((piece, padded(piece.numel, group)) for piece in encoded)
        self._head = self._codec.wire_bytes(self._width)
        whole, end = lay_out(((piece, piece.numel) for piece in dense), self._head // size)  # behind what is encoded
        self._columns, self._dense_columns, self._end = Columns(self._encoded), Columns(whole), end * size
        self.values = sum(piece.numel for piece in (*encoded, *dense))

    def write(self, own_weights: Tensor, peers_copy: Tensor | None, step: int) -> Tensor:
        """d = Q(w - r), or Q(w) (Alg. 4, l. 7)."""
        self._codec = codec = self._make_codec(seed_of(self._seed, f"shift/{self._module}", step) / 2**63 - 0.5)
        message = torch.empty(padded(self._end, 4), dtype=torch.uint8, device=own_weights.device)
        wire, whole = message[: self._head].view(1, -1), message.view(own_weights.dtype)
        if isinstance(codec, Integers):
            drawn = codec.drawn(self._width, self._seeds(step)) if self._encoded else None
            codes, scales = codec.codes_of(wire, self._width)
            tables = self._copy_tables(own_weights.device)
            shards.write(own_weights, peers_copy, *tables, codec.format, codes, scales, whole, drawn)
        else:
            values = torch.empty((1, self._width), dtype=torch.float32, device=own_weights.device)
            self._columns.pack((own_weights if peers_copy is None else own_weights - peers_copy).view(1, -1), values)
            codec.encode(values, wire, seed=self._seeds(step))
            self._dense_columns.pack(own_weights.view(1, -1), whole.view(1, -1))
        if len(message) > self._end:
            message[self._end :].zero_()
        self.bits = 8 * len(message)
        return message

    def _seeds(self, step: int) -> Seeds | None:
        if not self._codec.draws:
            return None
        return Seeds(tuple(
            (first, first + width, seed_of(self._seed, f"weights/{self._rank}/{piece.name}", step))
            for piece, first, width in self._encoded
        ))  # fmt: skip

    def read(self, peers: slice, messages: Tensor, rows: Tensor, peers_copy: Tensor | None) -> None:
        """r += d, at the owner too, or r = Q(w) (Alg. 4, l. 8)."""
        own_row, wires, whole = self._rank - peers.start, messages[:, : self._head], messages.view(rows.dtype)
        if isinstance(self._codec, Integers):
            codes, scales = self._codec.codes_of(wires, self._width)
            tables = self._copy_tables(rows.device)
            shards.read(codes, scales, whole, *tables, self._codec.format, rows, own_row, peers_copy)
            return
        if peers_copy is not None:
            rows[own_row].copy_(peers_copy)
        chunk_rows = max(DECODE_CHUNK_VALUES // max(rows.shape[1], 1), 1)
        for chunk, wire in zip(rows.split(chunk_rows), wires.split(chunk_rows), strict=True):
            values = torch.empty((len(chunk), self._width), dtype=torch.float32, device=rows.device)
            self._codec.decode(wire, values)
            self._columns.unpack(values, chunk, add=peers_copy is not None)
        self._dense_columns.unpack(whole, rows)
        if peers_copy is not None:
            peers_copy.copy_(rows[own_row])

    def _copy_tables(self, device: torch.device) -> tuple[CopyTable, CopyTable]:
        """Return the copies of what is encoded, and of what is not."""
        return self._columns.copy_table(device, shards.PER_PROGRAM), self._dense_columns.copy_table(device)

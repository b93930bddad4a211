"""Sharded weights gathered at a mask: what SCAPE and the shared masks of update space have in common.

A step that is zero off a mask, which all ranks know, moves weights at the mask alone. Elsewhere weights only decay, and
every rank applies the decay to its copy. The owner sends w at the mask (SCAPE's Alg. 2, l. 3-5), and the copy is bit
for bit what a whole gather brings. Parameters that had no mask in the last step travel whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.base.alignment import padded
from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Bucket, Piece, Shard
from thinwire.core.run import Run, Step
from thinwire.core.weights import Columns, Message, lay_out
from thinwire.ops import mask as masks

WORD = masks.WORD


class BucketMasks(NamedTuple):
    """The masks of all of a bucket's parameters, beside each other.

    Attributes:
        names: parameters. counts: values at each mask in a row. words: (R, w) bits. bit_offsets: directory of words.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    words: Tensor
    bit_offsets: Tensor | None

    @property
    def k(self) -> int:
        """Values at all masks in a row."""
        return sum(self.counts)

    def of_rows(self, rows: int | slice) -> tuple[Tensor, Tensor | None]:
        """Return the masks of one row, (w,), or of several, and their directory."""
        return self.words[rows], None if self.bit_offsets is None else self.bit_offsets[rows]


class MaskedExchange(NamedTuple):
    """A parameter's last exchange: the step, the masks (R, w) of its rows, values at each."""

    step: int
    words: Tensor
    k: int
    bucket: BucketMasks  # of all parameters that were exchanged with it


class WeightsAtMask:
    """At which masks the last step moved weights, and what it left of them elsewhere: what their gather has to know.

    A method reports what it has exchanged (``note``), and that it is about to take its step (``before_step``).

    Attributes:
        why_whole: why weights are not gathered at masks, where nobody asked for that; "": they are, or somebody did.
    """

    def __init__(self, method: str, weights: Literal["auto", "masked", "dense"], run: Run) -> None:
        """Take the knob ``weights``. Raises ThinwireError for "masked" where the engine gathers less than float32."""
        self._run, self.why_whole = run, ""
        self._used: dict[str, MaskedExchange] = {}
        self._keep: dict[str, float] = {}
        narrow, dtypes = run.gathers - {torch.float32}, ", ".join(sorted(map(str, run.gathers)))
        self._wanted = weights != "dense" and not narrow
        if weights == "masked" and narrow:
            raise ThinwireError(
                f"{method}: weights='masked' keeps gathered weights up to date in float32, and FSDP2 gathers them in "
                f"{dtypes}: use weights='auto', or leave param_dtype out of MixedPrecisionPolicy"
            )
        if weights != "dense" and narrow:
            self.why_whole = (
                f"{method} keeps weights up to date in float32 only, and FSDP2 gathers them in {dtypes}: they are "
                "gathered whole (sdp4bit compresses them; so does leaving param_dtype out of MixedPrecisionPolicy)"
            )
        elif self._wanted and run.gathers and run.hop > 1:
            self.why_whole = (
                "with a hop inside the node a rank has the masks of its own shard alone: weights are gathered whole"
            )

    @property
    def encoded(self) -> bool:
        """Are weights gathered at masks? Not with a hop inside the node, whose other shards' masks a rank lacks."""
        return self._wanted and self._run.exchange.owner and self._run.hop == 1

    def note(self, bucket: Bucket, used: BucketMasks | None) -> None:
        """Note that the step under way moves the bucket's weights at the masks ``used``; None: anywhere.

        The masks' memory must not change until the bucket's next exchange.
        """
        for i, segment in enumerate(bucket.segments if self.encoded else ()):
            if used is None:
                self._used.pop(segment.name, None)
            else:
                self._used[segment.name] = MaskedExchange(
                    bucket.step, used.words[:, segment.groups(WORD)], used.counts[i], used
                )

    def before_step(self, step: Step, moved: Collection[str]) -> None:
        """Forget the masks of parameters that are not in ``moved``, those exchanged for this step; note the decay."""
        if not self.encoded:
            return
        for name, weight in step.weights.items():
            if name not in moved or weight.grad is None:  # without a gradient it does not decay either
                self._used.pop(name, None)
        for name, (optimizer, group) in self._run.holders.items():
            if optimizer in step.optimizers or name not in self._keep:  # others' rates may be those of the next step
                self._keep[name] = 1 - float(group["lr"]) * group["weight_decay"]

    def state_changed(self) -> None:
        """Forget all masks: another state was loaded."""
        self._used.clear()

    def message(self, shard: Shard, rank: int) -> Message:
        """Return the message of the weights of ``shard``, which is ``rank``'s."""
        return AtMask(self._used, self._keep, shard.pieces, rank)


class AtMask(Message):
    """Weights of one module at the mask, and all of those that have none: float32 (Alg. 2, l. 3-5)."""

    exact = True

    def __init__(
        self, used: Mapping[str, MaskedExchange], keep: Mapping[str, float], pieces: tuple[Piece, ...], rank: int
    ) -> None:
        """Take by parameter: ``used``, the last step's exchange if it had a mask; ``keep``, the factor 1 - lr decay."""
        self._used, self._keep, self._pieces, self._rank = used, keep, pieces, rank
        self._layouts: dict[tuple[int | None, ...], _Layout] = {}
        self._layout = self._lay_out([None] * len(pieces))  # of the last message
        self._faded: list[masks.MaskedSegment] = []
        self._masks: BucketMasks  # of the last message, side by side

    def reaches(self, since: int, step: int) -> bool:
        exchanges = (self._used.get(piece.name) for piece in self._pieces)
        return since == step - 1 and all(used is None or used.step == since for used in exchanges)

    def write(self, own_weights: Tensor, peers_copy: Tensor | None, step: int) -> Tensor:
        """Write w at the mask (Alg. 2, l. 3), then the pieces that have no mask."""
        exchanges = [self._used.get(piece.name) for piece in self._pieces]
        self._layout = layout = self._lay_out([None if used is None else used.k for used in exchanges])
        message = own_weights.new_empty(layout.length)
        if not layout.masked:
            layout.whole.pack(own_weights.view(1, -1), message.view(1, -1))
            return message
        self._masks = self._join([used for used in exchanges if used is not None])
        self._faded = [
            masks.MaskedSegment(piece.offset, piece.numel, padded(piece.numel, WORD), k, self._keep[piece.name])
            for piece, k in layout.masked
        ]
        words, bit_offsets = self._masks.of_rows(slice(self._rank, self._rank + 1))
        table = layout.whole.copy_table(own_weights.device)
        return masks.collect(own_weights, words, self._faded, table, message, bit_offsets)

    def read(self, peers: slice, messages: Tensor, rows: Tensor, peers_copy: Tensor | None) -> None:
        """Set w at the mask to what was sent (Alg. 2, l. 4), and to (1 - lr decay) w off it, where m' is 0 (l. 5)."""
        whole = self._layout.whole
        if not self._layout.masked:
            whole.unpack(messages, rows)
            return
        words, bit_offsets = self._masks.of_rows(peers)
        masks.renew(messages, words, self._faded, whole.copy_table(rows.device), rows, bit_offsets)

    def _join(self, exchanges: Sequence[MaskedExchange]) -> BucketMasks:
        """Join the masks of all pieces that have one; return the bucket's own if the pieces are all of the bucket."""
        names, bucket = tuple(piece.name for piece, _ in self._layout.masked), exchanges[0].bucket
        if bucket.names == names:
            return bucket
        words = torch.cat([used.words for used in exchanges], 1)
        return BucketMasks(names, tuple(used.k for used in exchanges), words, masks.directory(words))

    def _lay_out(self, counts: Sequence[int | None]) -> _Layout:
        """Lay out a message; ``counts``: values at the mask of each piece, None where it has no mask."""
        if (key := tuple(counts)) not in self._layouts:
            masked = [(piece, k) for piece, k in zip(self._pieces, counts, strict=True) if k is not None]
            unmasked = [piece for piece, k in zip(self._pieces, counts, strict=True) if k is None]
            whole, length = lay_out(((piece, piece.numel) for piece in unmasked), sum(k for _, k in masked))
            self._layouts[key] = _Layout(masked, Columns(whole), length)
        return self._layouts[key]


class _Layout(NamedTuple):
    """A message's layout: first the values at masks, then the pieces that have none."""

    masked: list[tuple[Piece, int]]  # with how many values are at each mask
    whole: Columns  # the other pieces, in the message
    length: int

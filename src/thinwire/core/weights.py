"""All ranks' weights of a sharded module on this rank, and what has to travel for them: decided once per gather.

A sharded engine gathers a module's weights before it computes with them, mostly twice per optimizer step. Where a
method sends something else than the weights, one of three things is due:

    nothing     the weights of this optimizer step are there
    whole       a plain all-gather: the first time, after a change by hand, after a state was loaded, and where the
                method's message cannot bring what is there up to date
    message     what the method writes of this rank's shard, gathered, and read by all

The method writes and reads (:class:`Message`); all else about it is here (:class:`Replica`). A message need not wait
until it is asked for: it can leave when the optimizers have stepped (:class:`EarlySender`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Piece, Shard
from thinwire.core.fingerprint import Fingerprint
from thinwire.core.state import State
from thinwire.network.comm import ChainedWork, Comm, Work
from thinwire.ops import rows as ops


class Message(ABC):
    """A method's message about the weights of one module: two functions, one for each end.

    Attributes:
        resident: a message moves on what the last gather left, which therefore stays in memory. False: it brings the
            weights by itself, whatever was there, and is sent in every gather.
        exact: the others come to hold this rank's weights as they are. False: what they make of its messages, and this
            rank computes with the same.
    """

    resident: bool = True
    exact: bool = False

    def reaches(self, since: int, step: int) -> bool:
        """Can a message bring the weights of step ``since`` to ``step``? The same answer on all ranks."""
        return True

    @abstractmethod
    def write(self, own_weights: Tensor, peers_copy: Tensor | None, step: int) -> Tensor:
        """This rank's message (m,), uint8 or float32; m is the same on all ranks.

        Args:
            own_weights: (n,). peers_copy: (n,) these weights as the other ranks hold them; None if they hold nothing
                (``resident`` is False), or the weights of an earlier step (``exact``).
            step: optimizer steps taken so far.
        """

    @abstractmethod
    def read(self, peers: slice, messages: Tensor, rows: Tensor, peers_copy: Tensor | None) -> None:
        """Bring ``rows`` (P, n) up to date: the weights of the ranks ``peers``, whose ``messages`` are (P, m).

        It follows a ``write`` of the same step. ``peers_copy``: (n,) as in ``write``, brought up to date too, and this
        rank's row, which holds its weights, becomes the same; unless the message is ``exact``.
        """


class Columns:
    """Copies pieces of shards (P, n) to columns of rows (P, m), such as messages are, and back: in one launch each."""

    def __init__(self, placements: Sequence[tuple[Piece, int, int]]) -> None:
        """``placements``: pieces, each with its first column and its width; what a piece does not fill is padding."""
        self._pieces = placements
        self._tables: dict[tuple[object, ...], ops.CopyTable] = {}

    def pack(self, shards: Tensor, rows: Tensor) -> Tensor:
        """Copy the values of ``shards`` to ``rows``, both contiguous; zeros to the padding."""
        ops.pack(shards.view(-1), self._table(shards, rows), rows.view(-1))
        return rows

    def unpack(self, rows: Tensor, shards: Tensor, *, add: bool = False) -> Tensor:
        """Copy the values of ``rows`` to ``shards``, both contiguous, or ``add`` them there."""
        ops.unpack(rows.view(-1), self._table(shards, rows), shards.view(-1), add=add)
        return shards

    def _table(self, shards: Tensor, rows: Tensor) -> ops.CopyTable:
        return self.copy_table(shards.device, peers=len(shards), n=shards.shape[1], m=rows.shape[1])

    def copy_table(
        self, device: torch.device, per_program: int = ops.PER_PROGRAM, *, peers: int = 1, n: int = 0, m: int = 0
    ) -> ops.CopyTable:
        """Return the copies of all pieces in ``peers`` shards of ``n`` values and as many rows of ``m`` columns."""
        key, away = (device, per_program, peers, n, m), (peers - 1) * n
        if key not in self._tables:
            parts = [
                ops.CopySegment(of.offset, away + of.numel, n or of.numel, first, width, of.numel, m or width, peers)
                for of, first, width in self._pieces
            ]
            self._tables[key] = ops.CopyTable(parts, device, per_program)
        return self._tables[key]


def lay_out(pieces: Iterable[tuple[Piece, int]], start: int = 0) -> tuple[list[tuple[Piece, int, int]], int]:
    """Place ``pieces``, with their widths, side by side from column ``start`` on; return them and their end."""
    placements = []
    for piece, width in pieces:
        placements.append((piece, start, width))
        start += width
    return placements, start


class _MessageUnderWay(NamedTuple):
    """A message under way: its step, this rank's (m,), all ranks' (N, m), and the work to wait for.

    ``stream``: the one on which it was sent, on a GPU, which waits by itself.
    """

    step: int
    message: Tensor
    all_messages: Tensor
    work: Work | None
    stream: Any


class Replica:
    """The weights of one module of a sharded engine as this rank has them: its own shard, and the other ranks'.

        replica = Replica(method.weight_message(shard, comm.rank), method.state, shard, comm, device)
        out = replica.allocate()            # (N * n,); put this rank's weights into its row
        work = replica.gather(out, step)    # the others' rows are filled when that is over

    Where the message is due it may have left before (``send``). Until it is read it has changed nothing: it can be
    dropped on all ranks, as it is where weights were changed or a state was loaded since.

    What the others hold of this rank's weights is saved with the method's state, where it differs from the weights
    ("replica", and its step, "replica step"): a loaded run goes on with what it had.

    Attributes:
        step: optimizer steps taken when the weights were last brought up to date; None: never, or they are no longer
            to be relied on.
        changed: this rank's weights were given other values since the last gather, and not by an optimizer.
    """

    def __init__(
        self,
        message: Message,
        state: State,
        shard: Shard,
        comm: Comm,
        device: torch.device,
        version: Callable[[], int] = lambda: 0,
        weights: Callable[[], Sequence[Tensor]] = lambda: (),
    ) -> None:
        """``version``: rises with every change of this rank's ``weights`` that the engine can see."""
        self.message, self.shard, self.comm, self.device = message, shard, comm, device
        self.step: int | None = None
        self.changed = False
        self._state, self._loads = state, state.loads
        self._version, self._seen_version = version, version()
        self._fingerprint = Fingerprint(weights)
        self._fingerprint.take()
        self._row: Tensor | None = None  # this rank's weights as the others hold them, where those differ
        self._ahead: _MessageUnderWay | None = None  # left before it was asked for
        self._out = self._empty() if self.message.resident else None

    def allocate(self) -> Tensor:
        """Return memory (N * n,) in which the next gather finds this rank's weights, and puts the others'."""
        return self._empty() if self._out is None else self._out

    @property
    def resident(self) -> Tensor | None:
        """The weights (N * n,) between two gathers, the same on all ranks of ``comm``; None where none stay."""
        return None if self.step is None else self._out

    @property
    def whole_bytes(self) -> int:
        """The bytes of all ranks' weights."""
        return self.comm.size * self.shard.numel * self.shard.dtype.itemsize

    @property
    def bytes_ahead(self) -> int:
        """The bytes of messages that have left, and wait to be read."""
        return 0 if self._ahead is None else self._ahead.all_messages.nbytes

    def look(self) -> None:
        """Note whether something has changed the weights since the last look."""
        version = self._version()
        self.changed, self._seen_version = self.changed or version != self._seen_version, version

    def stepped(self) -> None:
        """Trust the weights: an optimizer has just changed them."""
        self._seen_version = self._version()
        self._fingerprint.take()

    def changed_unseen(self) -> bool:
        """Were this rank's weights changed in a way that torch does not count, through ``.data``? Waits for the device.

        The ranks need not agree: other values may have come to some shards alone.
        """
        self.look()
        return not self.changed and self._fingerprint.differs()

    def sends(self, step: int) -> bool:
        """Can the message of ``step`` leave before it is asked for? Not where the weights have to be gathered whole."""
        self.look()
        doubted = self.changed or self._loads != self._state.loads
        return not doubted and self._ahead is None and self._due(step) == "message"

    def send(self, own_weights: Tensor, step: int) -> None:
        """Let the message of ``step`` leave: the next ``gather`` reads it. ``own_weights``: (n,)."""
        self._ahead = self._exchange(own_weights, step, async_op=True)

    def wait_for_message(self) -> None:
        """Wait for a message that has left ahead; it is not read."""
        if self._ahead is not None and self._ahead.work is not None:
            self._ahead.work.wait()

    def drop(self) -> None:
        """Wait for a message that has left ahead, and forget it."""
        self.wait_for_message()
        self._ahead = None

    def gather(self, out: Tensor, step: int, *, unsettled: bool = False, async_op: bool = False) -> Work | None:
        """Gather all ranks' weights of ``step`` into ``out`` (N * n,), from ``allocate``, its row ``comm.rank`` filled.

        Args:
            step: optimizer steps taken so far.
            unsettled: some optimizers have taken the next one and others have not.
            async_op: a work may be returned, whose ``wait`` completes ``out``.
        """
        own_weights = out.view(self.comm.size, -1)[self.comm.rank]
        self._doubt(unsettled)
        if self._ahead is not None and self._ahead.step != step:
            self.drop()
        if self._ahead is not None:
            ready, self._ahead = self._ahead, None
            return self._receive(ready, out, async_op)
        action = self._due(step)
        if action == "whole":
            self._gather_whole(out, own_weights, step)
            action = self._due(step)  # what was saved may be of an earlier step
        if action == "nothing":
            if self._row is not None:
                own_weights.copy_(self._row)
            return None
        return self._receive(self._exchange(own_weights, step, async_op), out, async_op)

    def _doubt(self, unsettled: bool) -> None:
        """Doubt the resident weights once a state was loaded or the weights were changed."""
        self.look()
        changed, self.changed = self.changed or unsettled, unsettled
        if changed:
            self._fingerprint.take()
        if changed or self._loads != self._state.loads:
            self.drop()
        if self._loads != self._state.loads:
            self._loads, self.step = self._state.loads, None
        elif changed and self.step is not None:  # a row that was just loaded, and not used yet, is kept
            self.step = None
            for piece in self.shard.pieces:
                self._state.keep("replica", piece.name, None)

    def _due(self, step: int) -> Literal["nothing", "whole", "message"]:
        if not self.message.resident:
            return "message"
        if self.step is None:
            return "whole"
        if self.step == step or not self.shard.pieces:
            return "nothing"
        return "message" if self.message.reaches(self.step, step) else "whole"

    def _gather_whole(self, out: Tensor, own_weights: Tensor, step: int) -> None:
        """Gather the weights; or, where others hold something else of them, that: as it was saved, if it was."""
        if self.message.exact:
            self.comm.all_gather(out, own_weights)
            self.step = step
            return
        row, master = own_weights.clone(), own_weights.clone()
        for piece in self.shard.pieces:
            saved = self._state.get("replica", piece.name)
            if saved is None:
                continue
            if saved.numel() != piece.numel:
                raise ThinwireError(
                    f"state 'replica' of {piece.name} has {saved.numel()} values, this run needs {piece.numel}: "
                    "it was saved with another world size"
                )
            row[piece.columns].copy_(saved)
            saved_step = self._state.get("replica step", piece.name)
            assert saved_step is not None
            step = int(saved_step)
        self.comm.all_gather(out, row)
        own_weights.copy_(master)
        self._row = row
        for piece in self.shard.pieces:
            self._state.keep("replica", piece.name, row[piece.columns])  # a view, which follows
        self._set_step(step)

    def _set_step(self, step: int) -> None:
        self.step = step
        if self._row is not None:
            for piece in self.shard.pieces:
                self._state.keep("replica step", piece.name, torch.tensor(step))

    def _exchange(self, own_weights: Tensor, step: int, async_op: bool) -> _MessageUnderWay:
        with self.comm.ledger.span("encode", own_weights):
            message = self.message.write(own_weights, self._row, step)
        all_messages = message.new_empty((self.comm.size, len(message)))
        streams = devices.streams(message.device)
        # On a GPU everything is in the order of the engine's own stream: there is nothing to wait for on the host.
        work = self.comm.all_gather(all_messages, message, async_op=async_op and streams is None)
        return _MessageUnderWay(step, message, all_messages, work, streams and streams.current_stream(message.device))

    def _receive(self, under_way: _MessageUnderWay, out: Tensor, async_op: bool) -> Work | None:
        ledger = self.comm.ledger

        def receive() -> None:
            with ledger.span("decode", under_way.all_messages), torch.no_grad():
                self._read(under_way.all_messages, out.view(self.comm.size, -1))
            if self.message.resident:
                self._set_step(under_way.step)

        if under_way.work is not None:
            if async_op:
                return ChainedWork(under_way.work, receive)
            with ledger.span("wire"):
                under_way.work.wait()
        with devices.on(under_way.stream, out.device):
            receive()
        return None

    def _read(self, messages: Tensor, rows: Tensor) -> None:
        rank, size = self.comm.rank, self.comm.size
        for peers in (slice(0, rank), slice(rank + 1, size)) if self.message.exact else (slice(0, size),):
            if peers.start < peers.stop:  # its own message only if it needs what that comes to
                self.message.read(peers, messages[peers], rows[peers], self._row)

    def _empty(self) -> Tensor:
        return torch.empty(self.comm.size * self.shard.numel, dtype=self.shard.dtype, device=self.device)


class EarlySender:
    """Messages that leave once the optimizers have stepped, in the order in which the last step asked for the weights.

    What has left and is not read yet takes less memory than the largest module does when it is gathered whole, but for
    one message; the others follow as these are read. The order of sending is the same on all ranks, because that of
    asking is.
    """

    def __init__(self) -> None:
        self._asked: dict[Replica, Callable[[int], None]] = {}  # in this step, and what sends its message
        self._next: dict[Replica, Callable[[int], None]] = {}  # still to leave
        self._sent: list[Replica] = []
        self._step = 0

    def asks(self, replica: Replica, send: Callable[[int], None]) -> None:
        """Note that the engine is about to gather ``replica``; ``send(step)`` lets its message leave, if one can."""
        self._asked.setdefault(replica, send)
        self._next.pop(replica, None)

    def begin(self, step: int) -> None:
        """Begin to send: all optimizers have stepped, ``step`` times so far."""
        self._step, self._next, self._asked, self._sent = step, self._asked, {}, []
        self.go_on()

    def go_on(self) -> None:
        """Let as many messages leave as there is room for."""
        if not self._next:
            return
        room = max(replica.whole_bytes for replica in (*self._next, *self._sent))
        while self._next and sum(replica.bytes_ahead for replica in self._sent) < room:
            replica = next(iter(self._next))
            self._sent.append(replica)
            self._next.pop(replica)(self._step)

    def stop(self) -> None:
        """Drop all that is under way; nothing more leaves in this step."""
        for replica in self._sent:
            replica.drop()
        self._next, self._sent = {}, []

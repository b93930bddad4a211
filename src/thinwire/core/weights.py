"""All ranks' weights of a sharded module on this rank, and the traffic that they need.

A sharded engine gathers a module's weights before it computes with them, mostly twice per optimizer step. Where a
method does not send the weights themselves, a :class:`Replica` chooses for each gather one of three:

    nothing     this rank has the weights of this optimizer step already
    whole       a plain all-gather: the first time, after a change by hand or a loaded state, and where the method's
                message cannot bring the present weights up to date
    message     an all-gather of the messages that the method writes and reads (:class:`Message`)

A message can leave as soon as the optimizers have stepped (:class:`EarlySender`). As one rank alone may see its part of
the weights change, and all must choose alike, they agree on that where a forward pass begins (:func:`agree`).
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
        resident: a message updates the weights from the last gather, which therefore stay in memory. False: it carries
            the weights by itself and is sent in every gather.
        exact: the other ranks hold this rank's weights as they are. False: they hold an approximation made from its
            messages, and this rank computes with the same one.
    """

    resident: bool = True
    exact: bool = False

    def reaches(self, since: int, step: int) -> bool:
        """Can a message bring the weights of step ``since`` to ``step``? The same answer on all ranks."""
        return True

    @abstractmethod
    def write(self, own_weights: Tensor, peers_copy: Tensor | None, step: int) -> Tensor:
        """Write this rank's message (m,), uint8 or float32; m is the same on all ranks.

        Args:
            own_weights: (n,). peers_copy: (n,) these weights as the other ranks hold them; None if they hold nothing
                (``resident`` is False), or the weights of an earlier step (``exact``).
            step: optimizer steps taken so far.
        """

    @abstractmethod
    def read(self, peers: slice, messages: Tensor, rows: Tensor, peers_copy: Tensor | None) -> None:
        """Bring ``rows`` (P, n), the weights of the ranks ``peers``, up to date with their ``messages`` (P, m).

        It follows a ``write`` of the same step. Unless ``exact``, it also updates ``peers_copy``, (n,) as in ``write``,
        and this rank's row, which holds its weights, becomes the same.
        """


class Columns:
    """Copies pieces of shards (P, n) to columns of rows (P, m), such as messages, and back: in one launch each."""

    def __init__(self, placements: Sequence[tuple[Piece, int, int]]) -> None:
        """``placements``: pieces, each with its first column and its width, whose rest is padding."""
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
    """Place ``pieces`` with their widths side by side from column ``start`` on; return the placements and their end."""
    placements = []
    for piece, width in pieces:
        placements.append((piece, start, width))
        start += width
    return placements, start


class _MessageUnderWay(NamedTuple):
    """A message under way: ``message`` (m,), ``all_messages`` (N, m), the work to wait for; on a GPU its ``stream``."""

    step: int
    message: Tensor
    all_messages: Tensor
    work: Work | None
    stream: Any


class Replica:
    """All ranks' shards of one module of a sharded engine, as this rank holds them.

        replica = Replica(method.weight_message(shard, comm.rank), method.state, shard, comm, device)
        out = replica.allocate()            # (N * n,); put this rank's weights into its row
        work = replica.gather(out, step)    # the others' rows are filled when that is over

    ``send`` may let a message leave before the gather. It changes nothing until it is read, so all ranks can drop it,
    and do where weights were changed or a state was loaded since.

    The method's state keeps the other ranks' copy of this rank's weights, where it differs from the weights ("replica",
    and its step, "replica step"): a loaded run goes on with that copy.

    Attributes:
        step: optimizer steps taken when the weights were last brought up to date; None: never, or the weights are no
            longer valid.
        changed: something else than an optimizer changed weights since the last gather, as all ranks know.
        written: this rank's were, as it alone knows until ``agree``: ``_WRITTEN``, ``_UNCOUNTED``, or 0.
        missed: what was written was not in the last gather, so that the others have the former values.
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
        """``version`` rises with every change of this rank's ``weights`` that the engine can see."""
        self.message, self.shard, self.comm, self.device = message, shard, comm, device
        self.step: int | None = None
        self.changed = self.missed = False
        self.written = 0
        self._state, self._loads = state, state.loads
        self._version, self._seen_version = version, version()
        self._fingerprint = Fingerprint(weights)
        self._fingerprint.take()
        self._row: Tensor | None = None  # the others' copy of this rank's weights, if it differs
        self._ahead: _MessageUnderWay | None = None  # sent before its gather
        self._out = self._empty() if self.message.resident else None

    def allocate(self) -> Tensor:
        """Return memory (N * n,) for the next gather, which reads this rank's row and fills the others."""
        return self._empty() if self._out is None else self._out

    @property
    def resident(self) -> Tensor | None:
        """The weights (N * n,) kept between gathers, the same on all ranks of ``comm``; None where none are."""
        return None if self.step is None else self._out

    @property
    def whole_bytes(self) -> int:
        return self.comm.size * self.shard.numel * self.shard.dtype.itemsize

    @property
    def bytes_ahead(self) -> int:
        """The bytes of messages sent ahead and not read yet."""
        return 0 if self._ahead is None else self._ahead.all_messages.nbytes

    def look(self, *, samples: bool = False) -> None:
        """Note whether this rank's weights have changed since the last look.

        ``samples``: also through ``.data``, which torch does not count. Waits for the device.
        """
        version = self._version()
        if version != self._seen_version:
            self.written, self._seen_version = _WRITTEN, version
        elif samples and not self.written and not self.changed and self._fingerprint.differs():
            self.written = _UNCOUNTED

    def distrust(self) -> None:
        """Gather the weights anew, as all ranks do."""
        self.look()
        self.changed, self.written = True, 0

    def stepped(self) -> None:
        """Accept the weights' present values, which an optimizer has just made."""
        self._seen_version = self._version()
        self._fingerprint.take()

    def sends(self, step: int) -> bool:
        """Can the message of ``step`` leave before its gather? Not where the weights have to be gathered whole."""
        doubted = self.changed or self._loads != self._state.loads
        return not doubted and self._ahead is None and self._due(step) == "message"

    def send(self, own_weights: Tensor, step: int) -> None:
        """Send the message of ``step``, which the next ``gather`` reads. ``own_weights``: (n,)."""
        self._ahead = self._exchange(own_weights, step, async_op=True)

    def wait_for_message(self) -> None:
        """Wait for a message sent ahead, without reading it."""
        if self._ahead is not None and self._ahead.work is not None:
            self._ahead.work.wait()

    def drop(self) -> None:
        """Wait for a message sent ahead, and forget it."""
        self.wait_for_message()
        self._ahead = None

    def gather(self, out: Tensor, step: int, *, unsettled: bool = False, async_op: bool = False) -> Work | None:
        """Gather all ranks' weights of ``step`` into ``out`` (N * n,), from ``allocate``, its row ``comm.rank`` filled.

        Args:
            step: optimizer steps taken so far.
            unsettled: some optimizers have taken the next step and others have not.
            async_op: may return a work, whose ``wait`` completes ``out``.
        """
        own_weights = out.view(self.comm.size, -1)[self.comm.rank]
        self._doubt(unsettled)
        if self._ahead is not None and self._ahead.step != step:
            self.drop()
        action, (ready, self._ahead) = self._due(step), (self._ahead, None)
        fresh = ready is None and (action == "whole" or not self.message.resident)
        if fresh and self.written:
            self._fingerprint.take()
            self.written = 0
        self.missed = bool(self.written)
        if ready is not None:
            return self._receive(ready, out, async_op)
        if action == "whole":
            self._gather_whole(out, own_weights, step)
            action = self._due(step)  # what was saved may be of an earlier step
        if action == "nothing":
            if self._row is not None:
                own_weights.copy_(self._row)
            return None
        return self._receive(self._exchange(own_weights, step, async_op), out, async_op)

    def _doubt(self, unsettled: bool) -> None:
        """Invalidate the resident weights if a state was loaded or the weights were changed."""
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
        """Gather the weights; or, unless ``exact``, the other ranks' copy of them, where one was saved."""
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
            devices.keep(saved)  # loaded on another stream, and replaced below
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
                self._state.keep("replica step", piece.name, torch.tensor(step, device="cpu"))

    def _exchange(self, own_weights: Tensor, step: int, async_op: bool) -> _MessageUnderWay:
        with self.comm.ledger.span("encode", own_weights):
            message = self.message.write(own_weights, self._row, step)
        all_messages = message.new_empty((self.comm.size, len(message)))
        streams = devices.streams(message.device)
        # On a GPU everything is in the order of the engine's own stream: the host has nothing to wait for.
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
            if peers.start < peers.stop:  # its own message only if not exact
                self.message.read(peers, messages[peers], rows[peers], self._row)

    def _empty(self) -> Tensor:
        return torch.empty(self.comm.size * self.shard.numel, dtype=self.shard.dtype, device=self.device)


_WRITTEN, _UNCOUNTED = 1, 2
"""Codes of a change of a rank's weights: in place, as torch counts, or through ``.data``."""
_BY_DATA = (
    "{name}, or a weight of the same module, was changed through .data, which torch does not notice: call "
    "wire.weights_changed() after that, on all ranks, or write parameter.copy_(...)"
)


def agree(replicas: Sequence[Replica], comm: Comm, *, training: bool) -> str | None:
    """Agree with the ranks of ``comm`` on whose weights something else than an optimizer has changed. Collective.

    Return why no step may follow, as in the middle of ``training`` a rank has changed weights through ``.data``.

    On a CPU, and where the program turns from ``training`` to an evaluation or back, all ranks wait for the answer, and
    one rank's change is known to all. In training on a GPU ranks that see no change go on at once. So those that see
    one count it only if all do; else they miss it as well (``Replica.missed``).
    """
    device = replicas[0].device
    waits = not training or devices.streams(device) is None
    for replica in replicas:
        replica.look(samples=waits)
    codes = [replica.written for replica in replicas]
    rows = torch.tensor([codes, [-code for code in codes]], dtype=torch.float32, device="cpu")
    rows = rows.to(device, non_blocking=True)  # the host does not wait
    comm.all_reduce(rows.view(-1), "max")
    if not waits and not any(codes):
        return None
    (most, least), refusal = rows.int().tolist(), None
    for replica, code, negative in zip(replicas, most, least, strict=True):
        if training and code == _UNCOUNTED:
            refusal = refusal or _BY_DATA.format(name=replica.shard.names[0])
        if code and (waits or negative):
            replica.distrust()
    return refusal


class EarlySender:
    """Sends messages once the optimizers have stepped, in the order of the last step's gathers, on all ranks the same.

    Unread messages take less memory than the largest module gathered whole, except for the last message sent; further
    messages follow as these are read.
    """

    def __init__(self) -> None:
        self._asked: dict[Replica, Callable[[int], None]] = {}  # in this step, each with its ``send``
        self._next: dict[Replica, Callable[[int], None]] = {}  # still to leave
        self._sent: list[Replica] = []
        self._step = 0

    def asks(self, replica: Replica, send: Callable[[int], None]) -> None:
        """Note that the engine is about to gather ``replica``; ``send(step)`` sends its message, if it may leave."""
        self._asked.setdefault(replica, send)
        self._next.pop(replica, None)

    def begin(self, step: int) -> None:
        """Begin to send, after all optimizers have stepped for the ``step``-th time."""
        self._step, self._next, self._asked, self._sent = step, self._asked, {}, []
        self.go_on()

    def go_on(self) -> None:
        """Send as many messages as there is room for."""
        if not self._next:
            return
        room = max(replica.whole_bytes for replica in (*self._next, *self._sent))
        while self._next and sum(replica.bytes_ahead for replica in self._sent) < room:
            replica = next(iter(self._next))
            self._sent.append(replica)
            self._next.pop(replica)(self._step)

    def stop(self) -> None:
        """Drop all messages under way, and send no more in this step."""
        for replica in self._sent:
            replica.drop()
        self._next, self._sent = {}, []

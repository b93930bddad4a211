"""The state that travels between replicas on torchft: an HTTP server in each, and those that read from it.

    GET  /now                   the clock of the tape
    GET  /snapshot/CLOCK        the state after some step, without its tensors; then /tape/CLOCK/FIRST: what was heard
    GET  /state/STEP/KIND       the state of the step under way, without its tensors, for who joins in it
    POST /tensors/NAME          those tensors of a state that who reads lacks, by their hashes

Nothing is encrypted or authenticated, and who reads a state with the manager's own parts in it (/state) unpickles what
it is sent, as with torchft's own transport.
"""

from __future__ import annotations

import hashlib
import io
import ipaddress
import math
import os
import pickle
import re
import socket
import threading
import time
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

from thinwire.base.errors import ThinwireWarning
from thinwire.base.extras import load
from thinwire.engines.replicas import any_of, fewest
from thinwire.network.comm import Comm
from thinwire.saved.tape import Entry, Tape
from thinwire.saved.turnover import Held

LARGE = 4096
"""Bytes from which on a tensor is sent only to those that lack it."""
PIECE = 1 << 20
LONGEST = 1 << 24
"""Bytes of the longest request: the hashes of half a million tensors."""
IDLE_S = 2.0
"""Seconds that a replica may wait for others before it tells who asks for a state that it should join at once."""
ANSWER_S = 5.0
"""Seconds to wait for the lighthouse's or a replica's word before a replica joins without having fetched a state."""


class Missing(NamedTuple):
    """A tensor that a message leaves out, by the hash of its bytes."""

    digest: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def _bytes_of(tensor: Tensor) -> Any:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def digest_of(tensor: Tensor) -> str:
    """Return a hash of the tensor's bytes."""
    return hashlib.blake2b(_bytes_of(tensor), digest_size=16).hexdigest()


def _leaves(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, Missing))


def without_tensors(tree: Any, *, hashed: bool = True) -> tuple[bytes, dict[str, Tensor]]:
    """Return ``tree`` with ``Missing`` in place of large tensors, as bytes, and these tensors by hash, or by number."""
    tensors: dict[str, Tensor] = {}
    pairs, form = _leaves(tree)
    leaves = [leaf for _, leaf in pairs]
    for number, leaf in enumerate(leaves):
        if type(leaf) is Tensor and leaf.nbytes >= LARGE:
            tensors[digest := digest_of(leaf) if hashed else f"{number}"] = leaf
            leaves[number] = Missing(digest, tuple(leaf.shape), leaf.dtype)
    return _dump(tree_unflatten(leaves, form)), tensors


def completed(tree: Any, stock: Held | None, fetch: Callable[[Sequence[Missing]], Sequence[Tensor]]) -> Any:
    """Return ``tree`` with its tensors: those in ``stock``, where they equal what is missing or each replica has
    its own, and the others as ``fetch`` returns them."""
    pairs, form = _leaves(tree)
    equal, apart = ({}, {}) if stock is None else (dict(_leaves(tree)[0]) for tree in stock)
    leaves = [leaf for _, leaf in pairs]
    lacking: dict[int, Missing] = {}
    for number, (path, leaf) in enumerate(pairs):
        if not isinstance(leaf, Missing):
            continue
        equal_leaf, older = equal.get(path), apart.get(path)
        if isinstance(equal_leaf, Tensor) and equal_leaf.dtype == leaf.dtype and digest_of(equal_leaf) == leaf.digest:
            leaves[number] = equal_leaf.view(leaf.shape)
        elif isinstance(older, Tensor) and older.shape == leaf.shape and older.dtype == leaf.dtype:
            leaves[number] = older
        else:
            lacking[number] = leaf
    for number, tensor in zip(lacking, fetch(list(lacking.values())), strict=True):
        leaves[number] = tensor
    return tree_unflatten(leaves, form)


class Offer:
    """A state that a peer has sent without its tensors."""

    def __init__(self, url: str, name: str, tree: Any, timeout: float) -> None:
        self._url, self.name, self.tree, self._timeout = url, name, tree, timeout

    def complete(self, stock: Held | None = None) -> Any:
        """Return the state; fetch what is not in ``stock``. Raises OSError."""
        return completed(self.tree, stock, self._fetch)

    def _fetch(self, missing: Sequence[Missing]) -> list[Tensor]:
        if not missing:
            return []
        body = "\n".join(tensor.digest for tensor in missing).encode()
        tensors = []
        with urllib.request.urlopen(f"{self._url}tensors/{self.name}", body, timeout=self._timeout) as answer:
            for lacking in missing:
                tensors.append(torch.empty(lacking.shape, dtype=lacking.dtype, device="cpu"))
                view = _bytes_of(tensors[-1])
                while len(view):
                    if not (got := answer.readinto(view)):
                        raise ConnectionError("the other replica has gone, or its state has become too old")
                    view = view[got:]
                if not lacking.digest.isdigit() and digest_of(tensors[-1]) != lacking.digest:
                    raise ConnectionError("a tensor has arrived damaged, or was changed as it was sent")
        return tensors


def _offer(url: str, path: str, timeout: float, *, plain: bool) -> Offer:
    return Offer(url, path.replace("/", "-"), _load(f"{url}{path}", timeout, plain=plain), timeout)


def _load(url: str, timeout: float, *, plain: bool = True) -> Any:
    """``plain``: the answer holds tensors and plain values; anything else is refused, not unpickled."""
    with urllib.request.urlopen(url, timeout=timeout) as answer, torch.serialization.safe_globals([Missing]):
        return torch.load(io.BytesIO(answer.read()), weights_only=plain)


def _dump(tree: Any) -> bytes:
    message = io.BytesIO()
    torch.save(tree, message)
    return message.getvalue()


class Transport:
    """A replica's server, and torchft's ``CheckpointTransport``: who is behind gets the state in the step it joins.

    Attributes:
        tape: of this replica, once it has a wire. holds: has it a part of the state, so that it asks for hashes?
        asks_since: by the monotonic clock, when it began to wait for the lighthouse's answer; infinity: it does not.
    """

    tape: Tape | None = None
    holds = False
    asks_since = math.inf

    def __init__(self, host: str, timeout: timedelta) -> None:
        """``host``: by which others reach this machine. ``timeout``: for which a read or a wait may stop."""
        self._host, self._timeout = host, timeout.total_seconds()
        self._offers: dict[str, tuple[bytes, dict[str, Tensor]]] = {}
        self._state: tuple[str, Any] = "", None  # of the step under way, by the step
        self._reads = 0
        self._changed = threading.Condition()
        self._making = threading.Lock()  # of a snapshot's hashes, which take seconds
        self._server = _server_at(host, type("Handler", (_Handler,), {"transport": self, "timeout": self._timeout}))
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def metadata(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}/"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Offer ``state_dict`` to who joins in this step."""
        with self._changed:
            self._state = str(step), state_dict
            self._changed.notify_all()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state of the peer at ``metadata``; our part of it is an ``Offer``, still to be completed."""
        path = f"state/{step}/{'hashed' if self.holds else 'whole'}"
        offer = _offer(metadata, path, timeout.total_seconds(), plain=False)
        user = offer.tree["user"]
        thinwire = Offer(metadata, offer.name, user["thinwire"], timeout.total_seconds())
        offer.tree = {**offer.tree, "user": {key: value for key, value in user.items() if key != "thinwire"}}
        state = offer.complete()
        state["user"]["thinwire"] = thinwire
        return state

    def disallow_checkpoint(self) -> None:
        """Withdraw the state of the step that is over, once who reads it has read it, and one that has no tape."""
        with self._changed:
            self._state = "", None
            if any(name.startswith("state-") for name in self._offers):
                self._changed.wait_for(lambda: not self._reads, self._timeout)
            follows = self.tape is not None and self.tape.runs
            self._offers = {k: offer for k, offer in self._offers.items() if follows and k.startswith("snapshot-")}

    def shutdown(self, wait: bool = True) -> None:
        self._server.shutdown()
        self._server.server_close()

    # The server's threads.

    def answer(self, path: str, body: bytes) -> Iterator[bytes | memoryview] | None:
        """Yield the answer to a request; None: there is none."""
        word, _, argument = path.strip("/").partition("/")
        if word == "state":
            step, _, kind = argument.partition("/")
            with self._changed:
                came, state = self._changed.wait_for(lambda: self._state[0] == step, self._timeout), self._state[1]
            return self._made(f"state-{step}-{kind}", state, kind) if came else None
        if word == "tensors" and (offer := self._offers.get(argument)) is not None:
            digests = body.decode(errors="replace").split("\n")
            return self._read(argument, [offer[1][key] for key in digests]) if offer[1].keys() >= {*digests} else None
        if word == "now" and self.tape is not None:
            return iter([str(self.tape.clock).encode()])
        if word == "snapshot" and self.tape is not None:
            return self._snapshot(self.tape, int(argument))
        if word == "tape" and self.tape is not None:
            begun, first = map(int, argument.split("/"))
            entries = self.tape.since(begun, first)
            return iter([_dump(entries and [vars(entry) for entry in entries])])
        return None

    def _snapshot(self, tape: Tape, clock: int) -> Iterator[bytes] | None:
        end = time.monotonic() + self._timeout
        while (snapshot := tape.snapshot(clock, 0.2)) is None:
            if tape.refuses or time.monotonic() > self.asks_since + IDLE_S:  # it waits itself, maybe for who asks
                return iter([_dump(None)])
            if time.monotonic() > end:
                return None
        return self._made(f"snapshot-{snapshot['clock']}", snapshot, "hashed")

    def _made(self, name: str, state: Any, kind: str) -> Iterator[bytes]:
        """Offer ``state`` by ``name``, and yield it without its tensors."""
        with self._making:
            if (offer := self._offers.get(name)) is None:
                offer = without_tensors(state, hashed=kind == "hashed")
                with self._changed:
                    self._offers = {**self._offers, name: offer}
            return iter([offer[0]])

    def _read(self, name: str, tensors: Sequence[Tensor]) -> Iterator[memoryview]:
        counts = name.startswith("state-")
        with self._changed:
            self._reads += counts
        try:
            for view in map(_bytes_of, tensors):
                for first in range(0, len(view), PIECE):
                    if not counts and name not in self._offers:
                        return  # its tape was cut, so that who reads would fetch all of it again
                    if self.tape is not None and not counts:
                        self.tape.touch()
                    yield view[first : first + PIECE]
        finally:
            with self._changed:
                self._reads -= counts
                self._changed.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None: ...  # who read has gone


def _server_at(host: str, handler: type[BaseHTTPRequestHandler]) -> _Server:
    """Listen at ``host`` alone if it is an address of this machine, else on all interfaces."""
    addresses = [(socket.AF_INET6, "::"), (socket.AF_INET, "")]
    with suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        addresses.insert(0, (family, host))
    errors = []
    for family, address in addresses:
        try:
            return type("Server", (_Server,), {"address_family": family})((address, 0), handler)
        except OSError as error:  # an address by which others know this machine, but not this machine itself
            errors.append(error)
    raise errors[-1]


class _Handler(BaseHTTPRequestHandler):
    transport: Transport

    def do_GET(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > LONGEST:
            self.send_error(413)
            return
        try:
            pieces = self.transport.answer(self.path, self.rfile.read(int(length)))
        except ValueError:  # a path without its numbers
            pieces = None
        if pieces is None:
            self.send_error(410)
            return
        self.send_response(200)
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


class Follower:
    """The reader of a tape, in a replica that is about to join.

    Attributes:
        tree: the state from which on it follows. count: of the steps since then that it has taken again.
    """

    def __init__(self, url: str, tree: Any, timeout: float) -> None:
        self._url, self.tree, self._timeout = url, tree, timeout
        self.count, self.closed = 0, False

    def next(self) -> list[Entry]:
        """Return the steps that have counted since the first ``count``; none if there are none, or no longer."""
        if self.closed:
            return []
        entries = None
        with suppress(*_GONE):
            entries = _load(f"{self._url}tape/{self.tree['clock']}/{self.count}", self._timeout)
        self.closed = entries is None
        return [Entry(**entry) for entry in entries or ()]

    def close(self) -> None:
        self.closed = True


def follow(group_rank: int, timeout: float, inside: Sequence[Comm] = ()) -> Follower | None:
    """Fetch the state of a replica that goes on, which serves it beside its steps. Collective in this replica.

    None: nobody has taken a step, or who joins would save no time by that; or, with a warning, it cannot be fetched.
    """
    name, url, clock, offer, tree = 0, "", -1, None, None
    with _warning_if_gone():
        name, url = _source(group_rank)
        with urllib.request.urlopen(f"{url}now", timeout=ANSWER_S) as answer:
            clock = int(answer.read())
    if any_of(inside, clock < 0) or any_of(inside, fewest(inside, name) < name):
        return None
    clock = 1 + len(inside) - fewest(inside, -clock)  # the same on all ranks, which are at most a step apart
    with _warning_if_gone():
        offer = _offer(url, f"snapshot/{clock}", timeout, plain=True)
        if offer.tree is None:  # it would save no time
            offer = None
        else:
            clock = offer.tree["clock"]
            offer.name = f"snapshot-{clock}"
    if any_of(inside, offer is None) or any_of(inside, fewest(inside, clock) < clock):
        return None
    with _warning_if_gone():
        tree = None if offer is None else offer.complete()
    return None if any_of(inside, tree is None) else Follower(url, tree, timeout)


_GONE = (
    OSError, EOFError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, ImportError, HTTPException,
    pickle.UnpicklingError,
)  # fmt: skip
"""The errors of reading from a replica that is gone, or is another program or version."""


@contextmanager
def _warning_if_gone() -> Iterator[None]:
    """Warn, instead of raising, if what is to be read cannot be had."""
    try:
        yield
    except _NoRun:
        pass
    except _GONE as error:
        words = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"the state of the others cannot be fetched while they go on ({type(error).__name__}: {words}): they wait "
            "for this replica as it joins", ThinwireWarning, stacklevel=4,
        )  # fmt: skip


class _NoRun(Exception):
    """Nobody has taken a step that could be followed."""


def _source(group_rank: int) -> tuple[int, str]:
    """Choose a replica that goes on, from the lighthouse's page; return a number for its name, and its server.

    Of those with most steps the first by name: under FIXED_WITH_SPARES the last ones are spares.
    """
    torchft: Any = load("torchft._torchft")
    if not (lighthouse := os.environ.get("TORCHFT_LIGHTHOUSE")):
        raise LookupError("TORCHFT_LIGHTHOUSE is not set")
    with urllib.request.urlopen(f"{lighthouse.rstrip('/')}/status", timeout=ANSWER_S) as answer:
        page = answer.read(1 << 20).decode(errors="replace")
    alive = {name for age, name in re.findall(r'<li class="heartbeat\s*(\w*)\s*">\s*(\S+): seen', page) if age != "old"}
    members = re.findall(r"<b>([^<]+)</b>\s*<br/>\s*Step:\s*(\d+)\s*<br/>\s*Manager:\s*(\S+)", page)
    steps = [(-int(step), name, address) for name, step, address in members if name in alive]
    if not any(step for step, *_ in steps):
        raise _NoRun
    _, name, address = min(steps)
    patience = timedelta(seconds=ANSWER_S)
    url = torchft.ManagerClient(address, connect_timeout=patience)._checkpoint_metadata(group_rank, timeout=patience)
    return zlib.crc32(name.encode()) % (1 << 20), url

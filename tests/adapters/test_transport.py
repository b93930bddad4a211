"""The server from which replicas that join read: whole, in part, from one that is gone, and with nobody there."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.adapters import transport
from thinwire.adapters.transport import Transport, completed, follow, without_tensors
from thinwire.base.errors import ThinwireWarning
from thinwire.saved.tape import Entry, Tape
from thinwire.saved.turnover import Held

LIMIT = timedelta(seconds=5)
PAGE = Path(__file__).parent / "data" / "lighthouse.html"


@contextmanager
def serving(tape: Tape | None = None) -> Iterator[Transport]:
    server = Transport("127.0.0.1", LIMIT)
    server.tape = tape
    try:
        yield server
    finally:
        server.shutdown()


def state(seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(64, 64, generator=draw) for name in "ab"}
    return {"weights": weights, "optimizers": [{"lr": 0.1, "betas": (0.9, 0.99)}], "step": 3, "small": torch.ones(2),
            "alone": False}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Do two states hold the same large tensors, by their hashes?"""
    return without_tensors(a)[1].keys() == without_tensors(b)[1].keys()


@pytest.mark.parametrize("holds", [True, False])
def test_who_is_behind_gets_the_state_of_the_step_and_of_it_what_it_lacks(holds: bool) -> None:
    """Nothing is hashed for who holds nothing, while the others wait."""
    whole = state()
    with serving() as source, serving() as joiner:
        joiner.holds = holds
        source.send_checkpoint([1], 3, {"user": {"thinwire": whole, "own": state(5)}, "torchft": {"step": 3}}, LIMIT)
        received = joiner.recv_checkpoint(0, source.metadata(), 3, LIMIT)
        assert received["torchft"] == {"step": 3} and same(received["user"]["own"], state(5))
        offer = received["user"]["thinwire"]
        assert same(offer.complete(), whole)
        fetched: list[int] = []
        fetch = offer._fetch
        offer._fetch = lambda missing: fetched.append(len(missing)) or fetch(missing)
        half = {"weights": {"a": whole["weights"]["a"].clone(), "b": torch.zeros(64, 64)}}
        assert same(offer.complete(Held(half, {})), whole)
        assert fetched == [1 if holds else 2]
        source.disallow_checkpoint()
        with pytest.raises(OSError):
            offer.complete()


def test_an_equal_hash_of_another_dtype_is_not_the_tensor() -> None:
    message, _ = without_tensors({"a": torch.zeros(64, 64)})
    tree = transport.torch.load(transport.io.BytesIO(message), weights_only=False)
    held = Held({"a": torch.zeros(64, 64, dtype=torch.int32)}, {})
    assert completed(tree, held, lambda missing: [torch.zeros(64, 64) for _ in missing])["a"].dtype == torch.float32


def test_a_tensor_that_changes_as_it_is_sent_is_refused() -> None:
    whole = state()
    with serving() as source, serving() as joiner:
        joiner.holds = True
        source.send_checkpoint([1], 3, {"user": {"thinwire": whole}, "torchft": {}}, LIMIT)
        offer = joiner.recv_checkpoint(0, source.metadata(), 3, LIMIT)["user"]["thinwire"]
        whole["weights"]["a"][0] = 7
        with pytest.raises(ConnectionError, match="damaged"):
            offer.complete()


@pytest.mark.parametrize("path", ["", "now", "snapshot/0", "snapshot/x", "tape/0/0", "tape/1", "tensors/x", "none"])
def test_what_is_not_there_is_gone(path: str) -> None:
    with serving() as source, pytest.raises(urllib.error.HTTPError, match="410"):
        urllib.request.urlopen(f"{source.metadata()}{path}", timeout=5)


def test_a_request_that_is_too_long_is_not_read() -> None:
    with serving() as source:
        request = urllib.request.Request(f"{source.metadata()}tensors/x", headers={"Content-Length": str(1 << 40)})
        with pytest.raises(urllib.error.HTTPError, match="413"):
            urllib.request.urlopen(request, timeout=5)


def test_it_listens_at_its_address_alone_and_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())  # another test's thread may end meanwhile
    with serving() as source:
        assert source._server.server_address[0] == "127.0.0.1"
    assert set(threading.enumerate()) <= before
    elsewhere = Transport("192.0.2.1", LIMIT)  # an address by which others know it, but none of this machine
    assert elsewhere.metadata().startswith("http://192.0.2.1:")
    assert elsewhere._server.server_address[0] in ("::", "0.0.0.0")
    elsewhere.shutdown()


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A page of torchft's lighthouse, and managers that say where ``replicas`` serve."""
    replicas: dict[str, str] = {}

    def answer(self: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE.read_bytes())

    handler = type("Page", (transport.BaseHTTPRequestHandler,), {"do_GET": answer, "log_message": lambda *_: None})
    server = transport._server_at("127.0.0.1", handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{server.server_address[1]}")

    def client(address: str, connect_timeout: timedelta) -> Any:
        return SimpleNamespace(_checkpoint_metadata=lambda rank, timeout: replicas[address])

    monkeypatch.setattr(transport, "load", lambda name: SimpleNamespace(ManagerClient=client))
    yield replicas
    server.shutdown()
    server.server_close()


FIRST = "http://127.0.0.1:39350"
"""The manager of "ra:1": of the two at step 7 that live the first by name. "rc:3", at step 9, is dead."""


def test_a_state_is_fetched_beside_the_steps_and_then_what_was_heard(lighthouse: Any) -> None:
    tape = Tape()
    with serving(tape) as source:
        lighthouse[FIRST] = source.metadata()
        steps = threading.Thread(target=train, args=(tape,))
        steps.start()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            follower = follow(0, 5.0)
        steps.join()
        assert follower is not None and same(follower.tree["weights"], state()["weights"])
        tape.add(Entry((0, (0,), 4, ("r",)), 2, 0, heard=[torch.arange(4.0)]), dict)
        entries = follower.next()
        assert [entry.step for entry in entries][-1] == 2 and entries[-1].heard[0].tolist() == [0, 1, 2, 3]
        tape.cut()
        assert follower.next() == []


def train(tape: Tape) -> None:
    while not tape.runs:
        threading.Event().wait(0.01)
    for step in range(2):
        threading.Event().wait(0.05)
        tape.add(Entry((0, (0,), 4, ("r",)), step, 0), state)


def test_who_cannot_follow_says_why_and_joins(lighthouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(ThinwireWarning, match="cannot be fetched while they go on .*39350"):
        assert follow(0, 5.0) is None  # its manager does not answer
    with serving(Tape()) as source, warnings.catch_warnings():
        lighthouse[FIRST] = source.metadata()
        source.asks_since = -1e9  # it waits for others, who may wait for this one: nothing has failed
        warnings.simplefilter("error")
        assert follow(0, 5.0) is None
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE")
    with pytest.warns(ThinwireWarning, match="TORCHFT_LIGHTHOUSE is not set"):
        assert follow(0, 5.0) is None


def test_nobody_to_follow_needs_no_words(lighthouse: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(f"{__name__}.PAGE", tmp_path / "page")
    (tmp_path / "page").write_text("Num participants: 0 <br>")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert follow(0, 5.0) is None


def test_a_message_of_another_kind_is_not_unpickled(lighthouse: Any) -> None:
    tape = Tape()
    with serving(tape) as source:
        lighthouse[FIRST] = source.metadata()
        tape.want(0)
        tape.add(None, lambda: {**state(), "odd": Path("x")})
        with pytest.warns(ThinwireWarning, match="UnpicklingError"):
            assert follow(0, 5.0) is None

"""What a gather of sharded weights sends: nothing, the weights, or the method's message, and when; on ranks as threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ranks
import thinwire
from breadth import alternating, dealt
from engines import adamw, build, train
from models import Net, flat, loss_of
from thinwire.base.errors import ThinwireError
from thinwire.core import weights as replicas
from thinwire.core.bucket import Piece, Shard
from thinwire.core.state import State, dump_state, load_state
from thinwire.core.weights import Message, Replica
from thinwire.engines import fsdp2_module
from thinwire.network.comm import Work
from thinwire.network.ledger import KINDS, Ledger
from thinwire.proof.ranks import ThreadComm, Threads

SIZE, N = 3, 10
PIECES = (Piece("a", 0, 6), Piece("b", 6, 4))
CPU = torch.device("cpu")


class Alone(Message):
    """Whole numbers, a byte each, whatever was there."""

    resident = False

    def __init__(self) -> None:
        self.heard: list[int] = []  # whose messages were read last
        self.rank = 0

    def write(self, own: Tensor, held: Tensor | None, step: int) -> Tensor:
        assert (held is not None) == (self.resident and not self.exact)
        self.heard.clear()
        return own.sub(0 if held is None else held).round().to(torch.int8).view(torch.uint8)

    def read(self, peers: slice, messages: Tensor, rows: Tensor, held: Tensor | None) -> None:
        assert len(messages) == len(rows) == peers.stop - peers.start > 0  # nobody is asked to read nothing
        self.heard += range(peers.start, peers.stop)
        got = messages.view(torch.int8).float()
        if held is None:
            rows.copy_(got)
            return
        mine = self.rank - peers.start
        rows[mine] = held
        held.copy_(rows.add_(got)[mine])


class Follows(Alone):
    """What has changed, rounded: the rest is in the next difference."""

    resident = True


class Exact(Alone):
    """Every step's, and only from one step to the next."""

    resident = exact = True

    def reaches(self, since: int, step: int) -> bool:
        return since == step - 1


class Rank:
    """One rank's weights, an optimizer that moves them, and what each gather sent."""

    def __init__(self, world: Threads, rank: int, kind: type[Alone], *, pieces=PIECES, state: State | None = None):
        self.ledger, self.state, self.version = Ledger(), state or State(), 0
        self.comm = ThreadComm(world, rank, self.ledger)
        shard = Shard(pieces, () if pieces else PIECES, N, torch.float32)
        self.replica = Replica(kind(), self.state, shard, self.comm, CPU, lambda: self.version)
        self.replica.message.rank = rank
        self.master = torch.arange(float(N)) - rank

    def moves(self, by: float) -> None:
        self.master += by
        self.version += 1

    def does(self, event: str) -> str | None:
        """g1: a forward pass of step 1 begins, and gathers; b1: a gather inside it; u1: one while some optimizers have
        stepped and others not. l: a state is loaded.

        a1: the message of step 1 leaves ahead, if it can.

        The weights change: o: by an optimizer, s: by one that nobody speaks of, c: by hand, x: by hand on one rank
        alone, d: by hand where the engine does not see it, v: to what they were.
        """
        what, step = event[0], int(event[1:] or 0)
        if what == "o":
            self.replica.look()
            self.moves(1.0 if self.replica.message.exact else 1.3)
            self.replica.stepped()
        elif what in "scv" or (what == "x" and self.comm.rank == 1):
            self.moves({"s": 1.0, "c": -5.0, "x": -5.0, "v": 0.0}[what])
        elif what == "d":
            self.master -= 3.0
            self.replica.distrust()
        elif what == "a":
            if self.replica.sends(step):
                self.replica.send(self.master.clone(), step)
        elif what == "l":
            load_state(self.state, dump_state(self.state))
        elif what != "x":
            if what != "b":
                with self.ledger.aside():
                    replicas.agree([self.replica], self.comm, training=True)
            return self.gathers(step, unsettled=what == "u")
        return None

    def gathers(self, step: int, *, unsettled: bool = False) -> str:
        self.rows = self.replica.allocate().view(SIZE, N)
        self.rows[self.comm.rank] = self.master
        self.replica.gather(self.rows.view(-1), step, unsettled=unsettled)
        sent, message = sum(self.ledger.current.bytes.values()), (SIZE - 1) * N
        self.ledger.close_step()
        names = {0: "nothing", 1: "message", 2: "twice", 4: "whole", 5: "both", 6: "all"}
        return names[sent // message]


ALONE = "message message message message"


@pytest.mark.parametrize(
    ("events", "follows", "exact"),
    [
        ("g0 g0", "whole nothing", "whole nothing"),
        ("g0 o g1 g1", "whole message nothing", "whole message nothing"),
        ("g4 o o g6 o g7", "whole message message", "whole whole message"),
        ("g0 c g0 g0", "whole whole nothing", "whole whole nothing"),
        ("g0 d g0 g0", "whole whole nothing", "whole whole nothing"),
        ("g0 x g0 g0", "whole whole nothing", "whole whole nothing"),
        ("g0 o x g1 o g2", "whole whole message", "whole whole message"),
        ("g0 x o g1", "whole whole", "whole whole"),
        ("g0 o c g1 o g2", "whole whole message", "whole whole message"),
        ("g0 c o g1", "whole whole", "whole whole"),
        # after wire.close() nobody says that it is an optimizer that steps, and the steps are not counted
        ("g0 o g1 s g1 s g1", "whole message whole whole", "whole message whole whole"),
        ("g0 o u1 g1 g1", "whole whole whole nothing", "whole whole whole nothing"),
        ("g0 o g1 l g1 g1", "whole message whole nothing", "whole message whole nothing"),
        # what is saved is what the others had in step 1: shared, and moved on by a message
        ("g0 o g1 l o g2", "whole message both", "whole message whole"),
        # weights and state were loaded: the row that comes with the state is right
        ("g0 o g1 v l g1", "whole message whole", "whole message whole"),
    ],
)
def test_what_is_due(events, follows, exact):
    """And after each gather all ranks have the right weights."""
    for kind, expected in ((Follows, follows), (Exact, exact), (Alone, ALONE)):
        turns = list(zip(*on_ranks(kind, events), strict=True))
        assert [word for word, _, _ in (turn[0] for turn in turns)] == expected.split()[: len(turns)], kind
        for turn in turns:
            words, rows, masters = zip(*turn, strict=True)
            assert set(words) == {words[0]} and all(torch.equal(rows[0], others) for others in rows)
            off = (rows[0] - torch.stack(masters)).abs().max()
            fresh = words[0] == "whole" and "l" not in events
            assert off <= (0 if kind is Exact or fresh else 0.5), (kind, words[0])


@pytest.mark.parametrize(
    ("events", "follows", "exact", "alone"),
    [
        ("g0 o a1 g1 b1", "whole message nothing", "whole message nothing", "message message message"),
        # it is void once weights were changed, or a state loaded: all of it is gathered, or sent again
        ("g0 o a1 c g1", "whole both", "whole both", "message twice"),
        ("g0 o a1 d g1", "whole both", "whole both", "message twice"),
        ("g0 o a1 x g1", "whole both", "whole both", "message twice"),
        ("g0 x o a1 g1", "whole both", "whole both", "message twice"),
        ("g0 o a1 u1 g1", "whole both whole", "whole both whole", "message twice message"),
        ("g0 o a1 l g1", "whole all", "whole both", "message twice"),
        # nobody asked for it: the next one starts from what there was before
        ("g0 o a1 o a2 g2", "whole twice", "whole both", "message twice"),
        # the weights have to be gathered whole, which ranks know when somebody asks
        ("g0 o c a1 g1", "whole both", "whole both", "message twice"),
        ("g0 d a0 g0", "whole whole", "whole whole", "message message"),
        ("a0 g0 a0 g0", "whole nothing", "whole nothing", "message message"),
    ],
)
def test_a_message_that_leaves_ahead_is_read_by_the_next_gather(events, follows, exact, alone):
    """And whatever comes between, all ranks have what they would have without."""
    for kind, expected in ((Follows, follows), (Exact, exact), (Alone, alone)):
        without = " ".join(event for event in events.split() if event[0] != "a")
        for with_it, plain in zip(on_ranks(kind, events), on_ranks(kind, without), strict=True):
            assert [word for word, _, _ in with_it] == expected.split(), kind
            assert all(torch.equal(one, other) for (_, one, _), (_, other, _) in zip(with_it, plain, strict=True))


@pytest.mark.parametrize("kind", [Follows, Exact])
def test_on_a_gpu_ranks_wait_for_no_answer_and_count_a_change_that_all_see(kind, monkeypatch):
    """One that a rank alone sees is missed, which this rank knows; until all are told."""
    one_stream = SimpleNamespace(current_stream=lambda device: None)
    gpu = SimpleNamespace(**{**vars(replicas.devices), "streams": lambda device: one_stream})
    monkeypatch.setattr(replicas, "devices", gpu)
    world = Threads(SIZE)

    def body(rank):
        one, turns = Rank(world, rank, kind), []
        for event in ["g0", "o", "x", "g1", "d", "g1", "o", "c", "g2", "g2"]:
            if word := one.does(event):
                turns.append((word, one.replica.missed))
        return turns

    for rank, turns in enumerate(world.run(body)):
        assert turns == [("whole", False), ("message", rank == 1), *[("whole", False)] * 2, ("nothing", False)]


class Module:
    """A replica for which there is only its size."""

    def __init__(self, whole: int, message: int, left: list[Module]) -> None:
        self.whole_bytes, self.bytes_ahead, self.message, self.left = whole, 0, message, left
        self.dropped = False

    def send(self, step: int) -> None:
        self.bytes_ahead = self.message
        self.left.append(self)

    def drop(self) -> None:
        self.bytes_ahead, self.dropped = 0, True


def test_messages_leave_in_the_order_in_which_weights_were_asked_for():
    """As many as there is room for; the others when one is read; none twice, and none of a module that has its own."""
    left: list[Module] = []
    ahead, (a, b, c, d) = replicas.EarlySender(), (Module(8, 6, left) for _ in range(4))
    for module in (c, a, d, b, a, c):
        ahead.asks(module, module.send)
    assert not left
    ahead.begin(1)
    assert left == [c, a]
    for module in (c, d):  # which has not left yet
        ahead.asks(module, module.send)
        module.bytes_ahead = 0
    ahead.go_on()
    assert left == [c, a, b]
    ahead.stop()
    assert a.dropped and b.dropped and not d.dropped
    ahead.begin(2)
    assert left == [c, a, b, c, d]  # asked for in step 1


def on_ranks(kind, events: str, **options) -> list[list[tuple[str, Tensor, Tensor]]]:
    """Per rank and gather: what was sent, everybody's weights (SIZE, N), this rank's own."""
    world = Threads(SIZE)

    def body(rank):
        one, found = Rank(world, rank, kind, **options), []
        for event in events.split():
            if word := one.does(event):
                found.append((word, one.rows.clone(), one.master.clone()))
        return found

    return world.run(body)


def test_a_module_without_trained_parameters_is_gathered_once():
    for kind in (Follows, Exact):
        for found in on_ranks(kind, "g0 o g1 c g2", pieces=()):
            assert [word for word, _, _ in found] == ["whole", "nothing", "whole"]


def test_a_saved_row_is_gone_on_with():
    """Bit for bit, in another process; the state has the same keys as ever, and another world size is refused."""
    world = Threads(SIZE)

    def body(rank):
        one = Rank(world, rank, Follows)
        for event in ["g0", "o", "g1", "o", "g2"]:
            one.does(event)
        saved, state = dump_state(one.state), State()
        load_state(state, saved)
        other = Rank(world, rank, Follows, state=state)
        other.master.copy_(one.master)
        assert other.does("g2") == "whole" and torch.equal(other.rows, one.rows)
        for event in ("o", "g3"):
            assert one.does(event) == other.does(event)
        assert torch.equal(other.rows, one.rows) and not torch.equal(one.rows[rank], one.master)
        now = dump_state(state)
        assert [key for key in now if key.startswith("=replica/") and torch.equal(now[key], saved[key])] == []
        short = State()
        load_state(short, {**saved, "=replica/b": torch.zeros(3)})
        with pytest.raises(ThinwireError, match="'replica' of b has 3 values, this run needs 4: it was saved with"):
            Rank(world, rank, Follows, state=short).does("g2")
        return sorted(saved)

    keys = ["=replica step/a", "=replica step/b", "=replica/a", "=replica/b"]
    assert world.run(body) == [keys] * SIZE
    assert not any(dump_state(Rank(Threads(1), 0, kind).state) for kind in (Exact, Alone))


def test_whose_messages_are_read():
    """All of them, the own one only where it says something that its weights do not."""
    for kind in (Follows, Exact, Alone):
        world = Threads(SIZE)

        def body(rank, kind=kind, world=world):
            one = Rank(world, rank, kind)
            for event in ("g0", "o", "g1"):
                one.does(event)
            return one.replica.message.heard

        for rank, heard in enumerate(world.run(body)):
            assert heard == [r for r in range(SIZE) if r != rank or kind is not Exact]


class Later(Work):
    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then

    def wait(self, *timeout) -> bool:
        self.then()
        return True


class Slow(ThreadComm):
    """Nothing has arrived before somebody waits for it."""

    def _all_gather(self, out, row, async_op):
        if async_op:
            return Later(lambda: super(Slow, self)._all_gather(out, row, False))
        return super()._all_gather(out, row, False)


@pytest.mark.parametrize("kind", [Follows, Exact, Alone])
def test_a_work_completes_the_weights(kind):
    world = Threads(SIZE)

    def body(rank):
        one = Rank(world, rank, kind)
        one.does("g0")
        before = one.rows.clone()
        one.does("o")
        one.replica.comm = Slow(world, rank, one.ledger)
        rows = one.replica.allocate().view(SIZE, N)
        if kind is Alone:
            rows.copy_(before)
        rows[rank] = one.master
        work = one.replica.gather(rows.view(-1), 1, async_op=True)
        others = [r for r in range(SIZE) if r != rank]
        assert work is not None and torch.equal(rows[others], before[others])
        work.wait()
        return rows.clone()

    found, expected = world.run(body), on_ranks(kind, "g0 o g1")
    for rows, turns in zip(found, expected, strict=True):
        assert torch.equal(rows, turns[-1][1])


@pytest.mark.parametrize("kind", [Follows, Exact, Alone])
def test_a_module_is_as_large_as_its_weights_and_what_is_ahead_as_its_messages(kind):
    """In bytes, of all ranks: by these is told how many messages leave. What has arrived may be dropped unread."""
    world = Threads(SIZE)

    def body(rank):
        one, waited = Rank(world, rank, kind), []
        assert one.replica.whole_bytes == SIZE * N * 4 and one.replica.bytes_ahead == 0
        one.does("g0")
        one.does("o")
        one.replica.comm = Slow(world, rank, one.ledger)
        one.replica.wait_for_message()
        one.does("a1")
        assert one.replica.bytes_ahead == SIZE * N and not one.replica.sends(1)
        sent = one.replica._ahead
        then, sent.work.then = sent.work.then, lambda: waited.append(then())
        one.replica.drop()
        assert len(waited) == 1 and one.replica.bytes_ahead == 0 and one.replica.sends(1)
        half = Shard(PIECES, (), N, torch.bfloat16)
        assert Replica(kind(), State(), half, one.comm, CPU).whole_bytes == SIZE * N * 2

    world.run(body)


@pytest.mark.parametrize("ahead", ["", "a1 "])
@pytest.mark.parametrize("kind", [Follows, Exact, Alone])
def test_the_time_that_a_message_takes_is_counted_by_what_is_done(kind, ahead):
    """Writing it is encoding, reading it is decoding; a gather of whole weights is neither."""
    world = Threads(SIZE)

    def body(rank):
        one = Rank(world, rank, kind)
        for event in f"g0 o {ahead}g1".split():
            one.does(event)
        return [set(account.seconds) for account in one.ledger.steps]

    for first, second in world.run(body):
        assert ("encode" in first, "decode" in first) == (kind is Alone,) * 2
        assert second >= {"encode", "decode"} and first | second <= set(KINDS)


@pytest.mark.parametrize("peers", [1, 3])
def test_columns_hold_the_values_of_pieces_and_zeros(peers):
    """And give them back, or add them, where they were; all else stays. Also of rows wider than the pieces are."""
    pieces, end = replicas.lay_out([(Piece("a", 1, 5), 8), (Piece("b", 7, 3), 4)], start=2)
    assert pieces == [(Piece("a", 1, 5), 2, 8), (Piece("b", 7, 3), 10, 4)] and end == 14
    columns, n, m = replicas.Columns(pieces), 12, 16
    shards = torch.arange(float(peers * n)).view(peers, n) + 1
    rows, expected = torch.full((peers, m), -1.0), torch.full((peers, m), -1.0)
    expected[:, 2:14] = 0.0
    expected[:, 2:7], expected[:, 10:13] = shards[:, 1:6], shards[:, 7:10]
    assert columns.pack(shards, rows) is rows and torch.equal(rows, expected)
    for add in (False, True):
        out, there = torch.full((peers, n), 100.0), torch.full((peers, n), 100.0)
        for place in (slice(1, 6), slice(7, 10)):
            there[:, place] = shards[:, place] + 100.0 * add
        assert columns.unpack(rows, out, add=add) is out and torch.equal(out, there)
    (part, _), (alone, _) = columns.copy_table(CPU, peers=peers, n=n, m=m).segments, columns.copy_table(CPU).segments
    assert (part.numel, part.rows, part.step, part.stride) == ((peers - 1) * n + 5, peers, n, m)
    assert (alone.numel, alone.rows, alone.step, alone.stride) == (5, 1, 5, 8)
    assert columns.copy_table(CPU) is columns.copy_table(CPU) is not columns.copy_table(CPU, peers=peers, n=n, m=m)


METHODS = (
    "sdp4bit(weight_group=32, smallest=100)",
    "sdp4bit(weights='plain', weight_bits=8, hadamard=False, weight_group=32, smallest=100)",
    "scape(density=0.1, warmup=1, smallest=100)",
)  # fmt: skip


def _with_and_without(rank, world):
    return [_ahead(rank, world, sent) for sent in (True, False)]


def _ahead(rank, world, sent: bool):
    """Of each method: losses, states and bytes of a run in which much happens between steps; what was under way."""
    found = []
    for method in METHODS:
        model = build("fsdp2", world, net=Net)
        optimizer = thinwire.AdamS(model.parameters()) if method.startswith("scape") else adamw(model)
        wire = thinwire.compress(model, optimizer, method)
        if not sent:
            wire.engine.send_weights = lambda step: None
        under_way, losses = [], []

        def step(number, *, poison=None):
            losses.extend(train(model, optimizer, rank, [number], wire, poison=poison))  # noqa: B023
            under_way.append(sum(replica.bytes_ahead > 0 for replica in wire.engine.replicas))  # noqa: B023

        for number in range(3):
            step(number)
        losses.append(loss_of(model, 7, rank).item())  # an evaluation
        step(3)
        state = wire.state_dict()
        step(4, poison=(4, 1))  # is skipped
        step(5)
        with torch.no_grad():  # as an average of weights does
            for parameter in model.parameters():
                parameter.mul_(0.5)
        step(6)
        with contextlib.suppress(ZeroDivisionError):  # in the middle of a forward pass
            hook = model.blocks[1].register_forward_pre_hook(lambda *of: 1 / 0)
            loss_of(model, 7, rank)
        hook.remove()
        step(7)
        handle = model.blocks[0].register_full_backward_hook(lambda *of: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            loss_of(model, 8, rank).backward()
        handle.remove()
        bytes_of = [account.bytes for account in wire.ledger.steps]
        wire.close()
        assert not any(replica.bytes_ahead for replica in wire.engine.replicas)
        found.append((losses, {key: value.tolist() for key, value in state.items()}, bytes_of, under_way))
    return found


def test_weights_leave_when_the_optimizer_has_stepped():
    """Losses and states are the same bits as without, bytes too, but for what was sent of weights that were changed."""
    for with_it, without in ranks.run(_with_and_without, 2):
        for (losses, state, sent, under_way), (others, other, plain, nothing) in zip(with_it, without, strict=True):
            assert losses == others and state == other
            assert under_way[0] >= 2  # as large as the weights, with scape
            assert under_way[1:] == [3, 3, 3, 0, 3, 3, 3] and not any(nothing)
            more = [number for number, (one, two) in enumerate(zip(sent, plain, strict=True)) if one != two]
            assert more == [6]


def _closed(rank, world):
    """Losses of weights that the optimizer, and then somebody else, has changed after wire.close()."""
    found = {}
    for method in ("dense", "sdp4bit(weight_group=32, smallest=100)", "scape(density=0.1, warmup=1, smallest=100)"):
        model = build("fsdp2", world)
        optimizer = thinwire.AdamS(model.parameters()) if method.startswith("scape") else adamw(model)
        wire = thinwire.compress(model, optimizer, method)
        train(model, optimizer, rank, range(3), wire)
        wire.close()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            for group in optimizer.param_groups:
                group["lr"] = 10.0
            optimizer.step()
            moved = loss_of(model, 0, 0).item()
            for parameter in model.parameters():
                parameter.zero_()
            found[method] = moved, loss_of(model, 0, 0).item()
    return found


def test_after_close_any_change_is_noticed():
    for found in ranks.run(_closed, 2):
        (_, zero), *others = found.values()
        assert all(moved > 2 * zero and end == zero for moved, end in others)


def _evaluated(rank, world, kind):
    """Of each method: the bytes of each step, without and with evaluations of the user's own, also inside of steps."""
    found = {}

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            loss_of(model, 50, rank)
            loss_of(model, 51, rank)
        model.train()

    for method in dealt([*METHODS, "dense", "int8(smallest=0)"], kind, ("fsdp2", "hsdp", "")):
        of_steps = []
        for evaluates in (False, True):
            model = build(kind, world, net=Net)
            optimizer = thinwire.AdamS(model.parameters()) if method.startswith("scape") else adamw(model)
            wire = thinwire.compress(model, optimizer, method)
            for number in range(4):
                with wire.accumulate(last=False):
                    loss_of(model, number, rank).backward()
                if evaluates:
                    evaluate(model)
                loss = loss_of(model, number, rank)
                if evaluates:
                    evaluate(model)
                loss.backward()
                wire.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                if evaluates:
                    evaluate(model)
            of_steps.append([(dict(account.bytes), account.weight_bytes) for account in wire.ledger.steps])
            wire.close()
        found[method] = of_steps
    return found


@pytest.mark.parametrize(("kind", "world"), alternating(0, [("fsdp2", 2), ("hsdp", 4)]))
def test_an_evaluation_between_two_steps_or_passes_or_inside_of_one_counts_in_none(kind, world):
    for found in ranks.run(_evaluated, world, kind):
        assert {method for method, (without, with_them) in found.items() if without != with_them} == set()


class Checkpointed(Net):
    """Records no gradients in its blocks' first passes."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def _checkpointed(rank, world, kind):
    """Of each method and mode: bytes of each step, agreements on weights and weights, without and with checkpoints."""
    found, agreed = {}, []
    agree = fsdp2_module.agree
    fsdp2_module.agree = lambda *given, training: (agreed.append(training), agree(*given, training=training))[1]
    for method in dealt([*METHODS, "dense"], kind, ("fsdp2", "hsdp", "fsdp2-keep")):
        for trains in (True, False):
            runs = []
            for net in (Net, Checkpointed):
                model = build(kind, world, net=net).train(trains)
                optimizer = thinwire.AdamS(model.parameters()) if method.startswith("scape") else adamw(model)
                wire = thinwire.compress(model, optimizer, method)
                agreed.clear()
                for number in range(2):
                    with wire.accumulate(last=False):
                        loss_of(model, number, rank).backward()
                    train(model, optimizer, rank, [number], wire)
                account = [(dict(step.bytes), step.weight_bytes, step.dense_bytes) for step in wire.ledger.steps]
                wire.close()
                runs.append((account, list(agreed), flat(model).tolist()))
            found[method, trains] = runs
    fsdp2_module.agree = agree
    return found


@pytest.mark.parametrize(("kind", "world"), alternating(1, [("fsdp2", 2), ("fsdp2-keep", 2), ("hsdp", 4)]))
def test_a_block_that_a_checkpoint_runs_without_recording_is_trained_not_evaluated(kind, world):
    """Its bytes are the step's, also with dropout off, and ranks agree on their weights as often as without it."""
    for found in ranks.run(_checkpointed, world, kind):
        assert {case for case, (without, with_them) in found.items() if without != with_them} == set()

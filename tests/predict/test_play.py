"""A timeline that is played: small cases computed by hand, and laws that hold on every cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from test_cluster import plain
from thinwire.base.errors import ThinwireError
from thinwire.predict.cluster import Constant, Kernel, read_cluster
from thinwire.predict.play import play
from thinwire.predict.timeline import Group, Memory, Message, Pass, RecordedStep, Stretch, Timeline

TWO = Group(2, 1)
NOTHING = Stretch((), ())


@dataclass(frozen=True)
class Module:
    parameters: tuple[str, ...]
    forward_flops: float
    backward_flops: float
    activation_bytes: float = 1.0


@dataclass(frozen=True)
class Profile:
    modules: tuple[Module, ...]


def model(*seconds: float) -> Profile:
    """Modules a, b, ... that take so long forwards, and twice as long backwards."""
    return Profile(tuple(Module((name,), time, 2 * time) for name, time in zip("abcdefgh", seconds, strict=False)))


def step(forward=(), again=(), gradients=(), update=NOTHING, share=1.0, later=()) -> RecordedStep:
    return RecordedStep(share, tuple(forward), tuple(again), tuple(gradients), update, later=tuple(later))


def timeline(*steps: RecordedStep, group: Group = TWO, optimizer: float = 0.0) -> Timeline:
    return Timeline(
        "a method", group.size, group.per_node, dict.fromkeys("abc", 1), steps, Memory(1, 2, 3, 4), optimizer
    )


def send(name: str, *events: Pass | Message) -> Stretch:
    return Stretch((name,), events)


def ring(nbytes: float, group: Group = TWO) -> Message:
    return Message("all_reduce", nbytes, group, rounds=0)


def free(**changes):
    """A cluster with rates of 1 and without latencies: FLOPs and bytes are seconds."""
    zero = Constant(0.0, "measured")
    return plain(
        **{
            **dict.fromkeys(("intra_latency", "inter_latency", "launch_seconds", "host_seconds_per_byte"), zero),
            **changes,
        }
    )


def seconds(*steps, cluster=None, profile=None, **settings) -> float:
    prediction = play(timeline(*steps), profile or model(1, 1), cluster or free(), sequences=1, **settings)
    assert sum(prediction.split.values()) == pytest.approx(prediction.seconds)
    return prediction.seconds


def test_buckets_leave_in_order_as_the_backward_pass_fills_them():
    buckets = [send("b", ring(3)), send("a", ring(1))]
    # Forward to 2; b's gradient at 4, sent from 4 to 7; a's at 6, sent from 7 to 8.
    assert seconds(step(gradients=buckets)) == 8
    # The first bucket has a's gradient in it, so nothing leaves before 6.
    assert seconds(step(gradients=[send("a", ring(1)), send("b", ring(3))])) == 10


def test_encode_send_decode_of_a_bucket_are_one_chain():
    events = Pass("encode", 1), ring(1), Pass("decode", 1), ring(1)
    # On a GPU, b's chain is from 4 to 8; a's from 8 to 12.
    both = step(gradients=[send("b", *events), send("a", *events)])
    assert seconds(both) == 12
    # On a CPU b's two kernels delay a's gradient from 6 to 8, a's own end at 12.
    assert seconds(both, cluster=free(codec_on_core=True)) == 12
    # Where the network takes nothing, a CPU computes 6 and its four kernels take 4; on a GPU the last two are left.
    fast = {"inter_rate": Constant(1e12, "measured")}
    assert seconds(both, cluster=free(codec_on_core=True, **fast)) == pytest.approx(10)
    assert seconds(both, cluster=free(**fast)) == pytest.approx(8)


def test_messages_take_a_cpus_core_beside_the_link():
    both = step(gradients=[send("b", ring(1)), send("a", ring(1))])
    host = {"codec_on_core": True, "host_seconds_per_byte": Constant(0.5, "measured")}
    # b's message costs the core half a second, so a's gradient comes at 6.5, and is sent at 7.5.
    assert seconds(both, cluster=free(**host)) == 7.5
    prediction = play(timeline(both), model(1, 1), free(**host), sequences=1)
    assert prediction.busy["host"] == 1 and prediction.busy["network"] == 2
    assert prediction.split["exposed communication"] == 1.5


def test_sharded_modules_are_gathered_one_ahead():
    gather = [send(name, Message("all_gather", 2, TWO, rounds=0)) for name in "abc"]
    scatter = [send(name, Message("reduce_scatter", 1, TWO, rounds=0)) for name in "cba"]
    profile = model(1, 3, 1)
    # Forward: a is there at 2; b's gather 2-4, a computes 2-3; b computes 4-7 while c's goes 4-6; c computes 7-8.
    assert seconds(step(forward=gather), profile=profile) == 8 + 10
    # Backward: c at 10, b's gather 10-12; c computes 10-12 and sends 12-13; b 12-18 while a's gather goes 13-15,
    # for the link is c's up to 13; b sends 18-19; a computes 18-20 and sends 20-21.
    whole = step(forward=gather, again=gather[::-1], gradients=scatter)
    assert seconds(whole, profile=profile) == 21
    # A module that is not gathered again does not wait.
    assert seconds(step(forward=gather, again=gather[1::-1], gradients=scatter), profile=profile) == 19
    # Without a network, computing alone is left.
    silent = free(inter_rate=Constant(1e15, "measured"))
    assert seconds(whole, cluster=silent, profile=profile) == pytest.approx(15)


def test_micro_batches_exchange_gradients_once_and_gather_each_time():
    gather, scatter = [send("a", Message("all_gather", 2, TWO, rounds=0))], [send("a", ring(4))]
    whole = step(forward=gather, again=gather, gradients=scatter, later=gather)
    one, three = (seconds(whole, profile=model(1), micro_batches=count) for count in (1, 3))
    assert one == 2 + 1 + 2 + 2 + 4 and three == 3 * (2 + 1 + 2 + 2) + 4


def test_weights_that_stay_are_sent_once_and_others_in_each_micro_batch():
    gather, scatter = [send("a", Message("all_gather", 2, TWO, rounds=0))], [send("a", ring(4))]
    stay = step(forward=gather, gradients=scatter)
    assert seconds(stay, profile=model(1), micro_batches=3) == 2 + 3 * (1 + 2) + 4
    plain = step(forward=gather, again=gather, gradients=scatter, later=gather)
    for whole, gathers in ((stay, 1), (plain, 6)):
        sent = play(timeline(whole), model(1), free(), sequences=1.0, micro_batches=3).rank_bytes
        assert sum(sent.values()) == 2 * gathers + 4


def test_buffers_are_broadcast_before_the_first_forward_pass():
    buffers = Stretch((), (Message("broadcast", 5, TWO, rounds=0),))
    assert seconds(step(forward=[buffers]), micro_batches=2) == 5 + 12


def test_steps_of_a_cycle_count_by_their_share():
    quiet, loud = step(share=0.75), step(gradients=[send("a", ring(8))], share=0.25)
    assert seconds(quiet, loud) == 6 + 0.25 * 8
    # The mean of the bytes would hide behind the backward pass: 2 of 8 bytes in each step.
    early = step(gradients=[send("b", ring(8))], share=0.25)
    assert seconds(quiet, early) == 6 + 0.25 * 6


def test_the_update_waits_for_all_gradients_and_the_optimizer_for_it():
    update = Stretch((), (ring(1), Pass("scale", 2)))
    prediction = play(
        timeline(step(gradients=[send("b", ring(9))], update=update), optimizer=5), model(1, 1), free(), sequences=1
    )
    assert prediction.seconds == 4 + 9 + 3 + 5
    assert prediction.split == {"computing": 6, "codec": 2, "optimizer": 5, "exposed communication": 8}
    assert prediction.bound_by == "computing" and prediction.rank_bytes == {"inter": 10, "intra": 0}


def test_a_node_sends_a_ring_once_and_messages_to_peers_from_each_rank():
    group = Group(8, 4)
    cluster = free(intra_rate=Constant(1e9, "measured"), inter_rate=Constant(2.0, "measured"))
    cluster = replace(cluster, per_node=4)

    def wire(message: Message):
        return play(timeline(step(gradients=[send("a", message)]), group=message.group), model(1), cluster, sequences=1)

    scatter = wire(Message("reduce_scatter", 70, group, rounds=0))
    assert scatter.nic_bytes == 70 and scatter.seconds == 3 + 35
    peers = wire(Message("all_to_all", 70, group, rounds=0))
    assert peers.nic_bytes == 4 * 40 and peers.seconds == 3 + 80
    beside = wire(Message("reduce_scatter", 70, Group(8, 4, beside=2), rounds=0))
    assert beside.nic_bytes == 140 and beside.seconds == 3 + 70


def test_an_all_reduce_of_many_ranks_takes_a_tree_where_it_is_faster():
    cluster = free(inter_latency=Constant(1.0, "measured"))
    group = Group(1024, 1)
    small = step(update=Stretch((), (Message("all_reduce", 1023 / 1024 * 2, group, rounds=2 * 1023),)))
    assert play(timeline(small, group=group), model(1), cluster, sequences=1).seconds == pytest.approx(3 + 20 + 2)
    cpu = replace(cluster, codec_on_core=True)
    assert play(timeline(small, group=group), model(1), cpu, sequences=1).seconds > 2046


def test_kernels_go_by_their_measured_rate_and_the_others_are_named():
    encode = step(update=Stretch((), (Pass("encode", 10), Pass("decode", 10))))
    cluster = free(kernels={"encode": Kernel(1.0, 5.0)}, memory_share=Constant(0.5, "assumed", 0.5, 2.0))
    prediction = play(timeline(encode), model(1), cluster, sequences=1)
    assert prediction.seconds == 3 + (1 + 2) + 20
    assert prediction.assumed == ("memory_share", "kernel decode")
    assert prediction.low < prediction.seconds < prediction.high


def test_the_range_comes_from_the_constants():
    wide = free(inter_rate=Constant(1.0, "assumed", 0.5, 2.0))
    whole = timeline(step(gradients=[send("a", ring(100))]))
    prediction = play(whole, model(1), wide, sequences=1)
    assert prediction.low == pytest.approx(3 + 50, rel=0.15) and prediction.high == pytest.approx(3 + 200, rel=0.15)
    certain = play(whole, model(1), free(), sequences=1)
    assert certain.seconds == 103  # where every constant is certain, what predictions have been off is left
    assert (certain.low, certain.high) == (pytest.approx(103 * 0.94, rel=0.02), pytest.approx(103 * 1.04, rel=0.02))
    assert play(whole, model(1), wide, sequences=1) == prediction


def test_another_models_profile_and_other_nodes_are_refused():
    with pytest.raises(ThinwireError, match="no module with c: it is of another model"):
        play(timeline(step(gradients=[send("c", ring(1))])), model(1, 1), free(), sequences=1)
    with pytest.raises(ThinwireError, match="name a cluster with per_node = "):
        play(timeline(step(), group=Group(16, 8)), model(1, 1), free(), sequences=1)


# Laws, on clusters that are shipped


def some_step(group: Group) -> RecordedStep:
    ranks = group.size
    gathers = [send(name, Message("all_gather", 4e8, group, ranks - 1)) for name in "abc"]
    events = (
        Pass("encode", 1e9),
        Message("all_to_all", 1e8, group),
        Pass("decode", 1e9),
        Message("all_gather", 1e8, group),
    )
    gradients = [send("c", *events), send("b", Message("all_reduce", 8e8, group, 2 * ranks - 2)), send("a", *events)]
    return step(gathers, gathers[::-1], gradients, Stretch((), (Message("all_reduce", 8, group, 2 * ranks - 2),)))


@pytest.mark.parametrize("name", ("perlmutter-a100", "h100-400g", "wan-1g"))
def test_twice_every_rate_halves_communication_and_names_change_nothing(name):
    cluster = read_cluster(name)
    group = Group(4 * cluster.per_node, cluster.per_node)
    whole, profile = timeline(some_step(group), group=group, optimizer=1e9), model(1e12, 2e12, 3e12)
    slow = play(whole, profile, cluster, sequences=1)
    twice = {
        field: replace(constant, value=constant.value * (2 if field.endswith("rate") else 0.5))
        for field, constant in cluster.constants.items()
        if field.endswith(("_rate", "_latency", "_seconds"))
    }
    fast = play(whole, profile, replace(cluster, **twice), sequences=0.5)  # half of the computing, too
    assert fast.seconds == pytest.approx(slow.seconds / 2, rel=1e-9)
    assert fast.busy["network"] == pytest.approx(slow.busy["network"] / 2, rel=0.02)
    assert fast.split["exposed communication"] == pytest.approx(slow.split["exposed communication"] / 2, rel=0.02)
    renamed = play(replace(whole, method="another"), profile, replace(cluster, name="x", device="y"), sequences=1)
    assert renamed == slow


@pytest.mark.parametrize("name", ("perlmutter-a100", "h100-400g", "wan-1g"))
def test_a_step_is_no_shorter_than_what_is_busiest_and_exposes_no_less_than_nothing(name):
    cluster = read_cluster(name)
    group = Group(4 * cluster.per_node, cluster.per_node)
    for flops in (1e9, 1e12, 1e15):
        for nodes in (cluster, replace(cluster, codec_on_core=True)):
            prediction = play(
                timeline(some_step(group), group=group), model(flops, 2 * flops, flops), nodes, sequences=1
            )
            assert min(prediction.split.values()) >= 0
            assert prediction.seconds >= max(prediction.busy.values()) * (1 - 1e-9)
            assert prediction.seconds == pytest.approx(sum(prediction.split.values()))
            assert prediction.low <= prediction.seconds <= prediction.high
            assert prediction.spans and all(span.begin <= span.end for span in prediction.spans)


def test_permuted_layers_change_overlap_alone():
    cluster = read_cluster("h100-400g")
    group = Group(32, 8)
    whole, profile = timeline(some_step(group), group=group), model(1e12, 8e12, 3e12)
    permuted = Profile((profile.modules[1], profile.modules[0], profile.modules[2]))
    ours, other = (play(whole, modules, cluster, sequences=1) for modules in (profile, permuted))
    assert ours.seconds != other.seconds
    for name in ("rank_bytes", "nic_bytes", "memory"):
        assert getattr(ours, name) == getattr(other, name)
    assert ours.split["computing"] == other.split["computing"]
    assert ours.busy == pytest.approx(other.busy)


def test_what_travels_beside_is_waited_for_as_it_is_needed():
    """A step computes for 6; a message of 10 that has two steps waits 0, one of 15 waits 3, on CPU and GPU."""
    for nbytes, whole in ((10, 6), (15, 9)):
        beside = replace(step(), beside=Stretch((), (ring(nbytes),)), delay=2)
        assert seconds(beside) == whole
        exposed = play(timeline(beside), model(1, 1), free(), sequences=1).split["exposed communication"]
        assert exposed == whole - 6
    stops = replace(step(), update=Stretch((), (ring(15),)))
    assert seconds(stops) == 21
    encoded = replace(step(), beside=Stretch((), (Pass("encode", 2), ring(10))), delay=2)
    assert seconds(encoded) == 6 and seconds(encoded, cluster=free(codec_on_core=True)) == 8

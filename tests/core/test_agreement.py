"""Ranks that do not agree, that do not come, and that hold other weights: all ranks say so, and none waits for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import engines
import restarted
import thinwire
from models import Net, loss_of
from patience import PATIENCE
from ranks import alone, run
from thinwire.base.elastic import meet
from thinwire.base.errors import LostRank, ThinwireError
from thinwire.core.agreement import Agreement, _check
from thinwire.core.replica_check import WIDTH, digest
from thinwire.network.comm import GroupComm, timeout_of
from thinwire.network.ledger import Ledger

SMALL = "smallest=100"
CASES = {  # settings of rank 0, of rank 1, and what every rank says
    "formats of one size": (
        {"method": f"int8({SMALL})"}, {"method": f"sign({SMALL})"},
        "rank 1 has method = sign(smallest=100), but on rank 0 it is int8(smallest=100)",
    ),
    "group": ({"method": f"int8({SMALL})"}, {"method": f"int8({SMALL},group=64)"}, "int8(smallest=100, group=64)"),
    "dense=": ({"method": f"int8({SMALL})"}, {"method": f"int8({SMALL},dense=('head*',))"}, "dense=('head*',)"),
    "theta": ({"method": f"tagc({SMALL},theta=0.9)"}, {"method": f"tagc({SMALL},theta=0.8)"}, "theta=0.8"),
    "T": ({"method": f"radius({SMALL},start=1,T=3)"}, {"method": f"radius({SMALL},start=1,T=5)"}, "T=5"),
    "no compression": ({"method": "dense"}, {"method": "bf16"}, "rank 1 has method = bf16, but on rank 0 it is dense"),
    "seed": ({"method": f"separate({SMALL})"}, {"method": f"separate({SMALL})", "seed": 1}, "rank 1 has seed = 1"),
    "guard": ({}, {"safety": thinwire.Safety(False)}, "rank 1 has guard = False, but on rank 0 it is True"),
    "two levels": ({}, {"two_level": True}, "rank 1 has two_level = True, but on rank 0 it is None"),
    "steps": ({"steps": 8}, {"steps": 16}, "rank 1 has steps = 16, but on rank 0 it is 8"),
    "lr": ({}, {"lr": 2e-3}, "rank 1 has lr (AdamW, group 0) = 0.002, but on rank 0 it is 0.001"),
    "optimizer": ({}, {"optimizer": torch.optim.SGD}, "rank 1 has optimizers = SGD, but on rank 0 it is AdamW"),
    "frozen": ({}, {"frozen": "head.weight"}, "rank 1 has parameter 13 = head.weight (51, 18) float32, frozen, but on"),
    "buckets": ({}, {"bucket_cap_mb": 1}, "rank 1 has bucket_bytes_cap = 1048576, but on rank 0 it is 26214400"),
    "one is refused at once": ({}, {"method": "int8(group=3)"}, "rank 1: "),
    "one is refused by the engine": ({}, {"hooked": True}, "rank 1: this DDP model already has a communication hook"),
    "one crashes later": ({"method": "int8"}, {"crash": True}, "rank 1: AttributeError: nobody expected this"),
}  # fmt: skip
SHARDED = {
    "formats of one size": CASES["formats of one size"],
    "layers": ({}, {"layers": 3}, "rank 1 has parameter 13 = blocks.2.norm.weight (18,) float32, but on rank 0"),
    "width": ({}, {"width": 20}, "rank 1 has parameter 0 = embedding.weight (51, 20) float32, but on rank 0"),
}


class Crashes(thinwire.Int8):
    def begin(self, run):
        raise AttributeError("nobody expected this")


def _compress(sharded: bool, group: dist.ProcessGroup | None = None, **settings) -> tuple:
    optimizer, lr = settings.pop("optimizer", torch.optim.AdamW), settings.pop("lr", 1e-3)
    frozen, hooked, crash = (settings.pop(name, None) for name in ("frozen", "hooked", "crash"))
    torch.manual_seed(0)
    model = Net(**{name: settings.pop(name) for name in ("layers", "width") if name in settings})
    if sharded:
        mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=settings.pop("bucket_cap_mb", None)
        )
    if frozen:  # behind DDP's back, which would see it
        model.module.get_parameter(frozen).requires_grad_(False)
    if hooked:
        model.register_comm_hook(None, lambda state, bucket: None)
    stepper = optimizer(model.parameters(), lr=lr)
    if crash:
        settings["method"] = Crashes()
    return model, stepper, thinwire.compress(model, stepper, **settings)


def _disagree(rank: int, world: int) -> dict[str, str]:
    said = {}
    for sharded, cases in ((False, CASES), (True, SHARDED)):
        for name, case in cases.items():
            try:
                _compress(sharded, **case[rank])
                said[f"{name}, {sharded}"] = "nothing"
            except Exception as error:
                said[f"{name}, {sharded}"] = f"{type(error).__name__}: {error}"
    # The groups are as they were.
    model, optimizer, wire = _compress(False, method=f"int8({SMALL})")
    loss_of(model, 0, rank).backward()
    optimizer.step()
    said["steps"] = str(wire.step)
    return said


def test_ranks_that_do_not_agree_are_told_so_on_all_of_them():
    zero, one = run(_disagree, 2)
    for sharded, cases in ((False, CASES), (True, SHARDED)):
        for name, (_, _, what) in cases.items():
            first, second = zero[f"{name}, {sharded}"], one[f"{name}, {sharded}"]
            assert what in first, (name, first)
            if "rank 1 has" in first:
                assert first == second and first.startswith("ThinwireError: "), (name, second)
            else:  # the one that failed shows its own error
                assert second.removeprefix("ThinwireError: ") in first, (name, second)
    assert zero["steps"] == one["steps"] == "1"


def test_the_odd_one_out_is_named():
    facts = [{"method": "int8"}] * 4
    facts[2] = {"method": "sign"}
    with pytest.raises(ThinwireError, match=r"^rank 2 has method = sign, but on the others it is int8: "):
        _check(list(enumerate(facts)))
    facts[3] = {"method": "bf16"}
    with pytest.raises(ThinwireError, match=r"^rank 2 has method = sign, but on 2 of 4 ranks it is int8: "):
        _check(list(enumerate(facts)))


def _grid(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    inner, outer = (GroupComm.aside(mesh.get_group(name), torch.device("cpu")) for name in ("inner", "outer"))
    with mock.patch("thinwire.network.comm._devices", lambda group: [torch.device("cuda")]):  # as NCCL alone has
        assert GroupComm(inner.group, Ledger()).device.type == inner.device.type == "cpu"
        numbered = torch.device("cuda", rank)  # "cuda" is the current device, cuda:0 on every rank if nobody sets it
        assert GroupComm.aside(inner.group, numbered).device == numbered
    stage, guard = str(rank // 2), str(rank < 2)
    cases = [
        ([inner, outer], None, {"method": "sign" if rank == 3 else "int8"}, {}),
        ([inner, outer], None, {"error": "no such file"} if rank == 1 else {"method": "int8"}, {}),
        ([inner], outer, {"model": stage}, {"guard": "True"}),
        ([inner], outer, {"model": stage}, {"guard": guard}),
        ([inner], outer, {"model": str(rank)}, {"guard": "True"}),
    ]
    said = []
    for comms, beside, facts, shared in cases:
        try:
            with Agreement(comms, beside) as agreement:
                if "error" in facts:
                    raise ThinwireError(facts["error"])
                agreement.compare(facts, shared)
            said.append("agreed")
        except ThinwireError as error:
            said.append(str(error).partition(": all ranks")[0])
    return said


def test_all_ranks_of_a_mesh_come_to_one_verdict_and_stages_have_their_own_models():
    found = run(_grid, 4)
    assert found[0] == found[2] == found[3] == [
        "rank 3 has method = sign, but on the others it is int8", "rank 1: no such file", "agreed",
        "rank 2 has guard = False, but on 2 of 4 ranks it is True",
        "rank 1 has model = 1, but on rank 0 it is 0",
    ]  # fmt: skip
    assert found[1][1] == "no such file" and [*found[1][:1], *found[1][2:]] == [*found[0][:1], *found[0][2:]]


LIMIT_S = 2.0


def _late(rank: int, world: int) -> dict[str, object]:
    """Rank 1 leaves something out, for ever; what rank 0 says of it, and the limits of all groups."""
    found: dict[str, object] = {}
    for name, sharded in (("backward", False), ("step", False), ("backward", True), ("compress", False)):
        dist.barrier()  # of the job's own group, on which nothing has failed
        group = dist.new_group([0, 1], timeout=timedelta(seconds=LIMIT_S))
        if name == "compress":
            model = DistributedDataParallel(Net(), process_group=group)
            if rank == 0:
                try:
                    thinwire.compress(model, torch.optim.SGD(model.parameters()), "int8")
                except LostRank as lost:
                    found["compress"] = (str(lost), lost.lost, lost.step, lost.seconds)
            dist.barrier()
            continue
        model, optimizer, wire = _compress(sharded, group, method=f"int8({SMALL})")
        for step in range(3):
            if rank == 1 and step == 2 and name == "backward":
                break
            try:
                loss_of(model, step, rank).backward()
                if rank == 1 and step == 2:
                    break
                optimizer.step()
                optimizer.zero_grad()
            except LostRank as lost:
                found[f"{name}, {sharded}"] = (str(lost), lost.lost, lost.step, lost.seconds)
        found[f"limits {name}, {sharded}"] = [timeout_of(comm.group).total_seconds() for comm in wire.engine.comms]
        dist.barrier()
        wire.close()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Net(), mesh=mesh)
    wire = thinwire.compress(model, torch.optim.SGD(model.parameters()), "int8")
    found["limits of a mesh"] = [timeout_of(comm.group) == timeout_of(dist.group.WORLD) for comm in wire.engine.comms]
    return found


def test_who_does_not_come_is_missed_within_the_limit_and_by_name():
    found, other = run(_late, 2)
    expected = {
        "backward, False": ("rank 0, step 3: waited ", "the exchange of gradients of "),
        "step, False": ("rank 0, step 3: waited ", "optimizer.step() (all-reduce)"),
        "backward, True": ("rank 0, step 3: waited ", "the exchange of "),
        "compress": ("rank 0: waited ", "in compress() (all-gather)"),
    }
    for name, (begins, contains) in expected.items():
        text, lost, step, seconds = found[name]
        assert text.startswith(begins) and contains in text and "s for rank 1 in" in text, text
        assert "\n" not in text and "cast" not in text and "Timed out waiting" in text
        assert lost == (1,) and step == (None if name == "compress" else 3) and seconds < 10 * LIMIT_S
    assert found["limits backward, False"] == found["limits step, False"] == found["limits backward, True"] == [LIMIT_S]
    assert found["limits of a mesh"] == other["limits of a mesh"] == [True, True]


def test_the_ranks_of_an_attempt_meet_where_no_earlier_one_has_been():
    store, limit = dist.HashStore(), timedelta(seconds=60 * PATIENCE)
    with ThreadPoolExecutor(3) as ranks:
        names = [list(ranks.map(lambda rank: meet(store, rank, 3, limit), range(3))) for _ in range(3)]
    assert all(len(set(of)) == 1 for of in names) and len({of[0] for of in names}) == 3


def test_torchrun_restarts_a_run_that_lost_a_rank_and_it_ends_as_if_nothing_had_happened(tmp_path):
    (tmp_path / "whole").mkdir()
    whole = run(restarted.train, 2, str(tmp_path / "whole"))
    alone(restarted.under_an_agent, str(tmp_path))
    for rank in range(2):
        assert torch.load(tmp_path / f"end-{rank}.pt").tolist() == whole[rank]


def _spoilt(rank: int, world: int) -> str:
    """Every loss from step 3 on is NaN on rank 0."""
    model, optimizer, _ = _compress(False, method=f"topk({SMALL},density=0.1)", safety=thinwire.Safety(max_skipped=3))
    for step in range(8):
        try:
            loss = loss_of(model, step, rank)
            (loss * torch.nan if step >= 2 and rank == 0 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        except ThinwireError as error:
            return f"{step}: {error}"
    return "nothing"


def test_a_run_that_has_diverged_ends_on_all_ranks():
    found = run(_spoilt, 2)
    assert found[0] == found[1]
    assert found[0].startswith("4: 3 steps in a row were skipped, from step 3 on, because of values that are not finit")
    assert "(the gradient of embedding.weight among them)" in found[0]


def test_a_hash_sees_every_bit_and_its_place():
    values = torch.randn(3 * WIDTH + 5)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = values.to(dtype)
        before, bits = digest(tensor), tensor.view(torch.uint8)
        assert digest(tensor.clone().view(5 * 1, -1) if len(tensor) % 5 == 0 else tensor.clone()) == before
        for place in (0, 3, WIDTH - 1, WIDTH, len(bits) - 1):
            for bit in (1, 128):
                bits[place] ^= bit
                assert digest(tensor) != before
                bits[place] ^= bit
        bits[3] ^= 128  # two signs: plain sums of words would not see it
        bits[7] ^= 128
        assert digest(tensor) != before
    assert digest(values) != digest(values.flip(0)) and digest(values[1:9]) == digest(values[1:9].clone())


SCAPE = f"scape({SMALL},density=0.02,warmup=2,refresh=5)"
REPLICAS = {  # engine, method, what rank 1 spoils after step 4, and what is said then
    "ddp": (False, SCAPE, "weight", "after step 4, the weights blocks.1.up.weight"),
    "masks": (False, SCAPE, "mask", "after step 4, mask of blocks.1.up.weight"),
    "rounds": (False, f"local-steps(every=3,outer='int8({SMALL})')", "weight", "nothing"),
    "fsdp2": (True, f"sdp4bit({SMALL})", "replica", "after step 4, the gathered weights "),
}  # fmt: skip


def _drift(rank: int, world: int) -> dict[str, str]:
    said = {}
    for name, (sharded, method, spoils, _) in REPLICAS.items():
        for what in (None, spoils):
            kind = thinwire.AdamS if method.startswith("scape") else torch.optim.AdamW
            safety = thinwire.Safety(check_every=2)
            model, optimizer, wire = _compress(sharded, method=method, optimizer=kind, safety=safety, steps=6)
            said[f"{name}, {what}"] = "nothing"
            for step in range(6):
                loss_of(model, step, rank).backward()
                if rank == 1 and step == 3:
                    _spoil(what, wire)
                try:
                    optimizer.step()
                except ThinwireError as error:
                    said[f"{name}, {what}"] = str(error)
                    break
                optimizer.zero_grad()
            wire.close()
    return said


def _spoil(what: str | None, wire: thinwire.Wire) -> None:
    name = "blocks.1.up.weight"
    if what == "weight":
        wire.engine.model.module.get_parameter(name).data.view(-1)[5] += 1e-3
    elif what == "mask":
        wire.method.finish()
        wire.method.state.get("mask", name).view(-1)[0] ^= 1
    elif what == "replica":
        wire.engine.replicas[1].resident[3] += 1e-3


def test_replicas_that_differ_are_named_and_those_that_do_not_pass():
    found = run(_drift, 2)
    for name, (_, _, spoils, what) in REPLICAS.items():
        assert found[0][f"{name}, None"] == found[1][f"{name}, None"] == "nothing", name
        for said in found:
            assert said[f"{name}, {spoils}"].startswith(what), (name, said)
            assert what == "nothing" or "rank 1 differ from those of rank 0" in said[f"{name}, {spoils}"]


def _drift_of_one_copy(rank: int, world: int) -> str:
    """Of 2 copies on 2 ranks each, with gathers of weights beside them, one copy changes on one rank."""
    model = engines.build("hsdp", world)
    optimizer = engines.adamw(model)
    safety = thinwire.Safety(check_every=2)
    wire = thinwire.compress(model, optimizer, "sdp4bit(weight_group=32, smallest=100)", safety=safety)
    try:
        engines.train(model, optimizer, rank, range(1), wire)
        if rank == 2:
            next(model.parameters()).to_local().data.view(-1)[1] += 1e-3  # no sample of the fingerprint
        engines.train(model, optimizer, rank, range(1, 2), wire)
    except ThinwireError as error:
        return str(error)
    return "nothing"


def test_ranks_of_the_other_shard_hear_of_it_too():
    found = run(_drift_of_one_copy, 4)
    assert all("after step 2, the weights " in said for said in found), found
    assert "rank 2 differ from those of rank 0" in found[0] and found[1].startswith("rank ")

"""What a saved state says about itself, and its form: without ranks."""

from __future__ import annotations

import dataclasses
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.core.method import Parameter, Run
from thinwire.saved.format import Form, Header, check_finite, from_dcp, own_of, split, trim

ABOUT = Header(
    1, 4, "ddp", False, ((1, 4, False),), "topk", {"density": "0.01", "smallest": "None"}, None, 100, 0, 10.0,
    {"w": ((3, 4), 12), "v": ((5,), 5)}, ("w",),
)  # fmt: skip
OTHERS: dict[str, tuple[Any, str]] = {
    "engine": ("fsdp2", "it was saved on ddp, this run is on fsdp2"),
    "levels": (True, "it was saved on ddp, this run is on ddp on two levels"),
    "hops": (((0, 2, True), (1, 2, False)), "saved by rank 1 of 4, this is rank 0 of 2 and rank 1 of 2"),
    "inside": ("fp32", "it was saved with intra=None, this run has intra=fp32"),
    "method": ("sign", "it was saved with method topk, this run has sign"),
    "knobs": ({"density": "0.01"}, "saved with smallest=None of topk, this run has smallest=no such knob"),
    "seed": (1, "it was saved with seed=0, this run has seed=1"),
    "bound": (None, "it was saved with outlier_clip=10.0, this run has outlier_clip=None"),
    "parameters": ({"w": ((3, 4), 12)}, "it holds v, which this run does not train"),
}
PARAMETERS = [
    ({"w": ((3, 4), 16), "v": ((5,), 5)}, "w had 12 elements on this rank, and has 16 in this run"),
    ({"w": ((3, 5), 16), "v": ((5,), 5)}, "w was (3, 4), and is (3, 5) in this run"),
    ({"w": ((4, 3), 12), "v": ((5,), 5)}, "w was (3, 4), and is (4, 3) in this run"),
    ({**ABOUT.parameters, "u": ((2,), 2)}, "it does not hold u, which this run trains"),
]


def test_whatever_differs_is_named_and_of_the_same_run_nothing():
    assert ABOUT.unlike(ABOUT) is None and ABOUT.unlike_place(ABOUT) is None and ABOUT.unlike_run(ABOUT) is None
    for field, (value, words) in OTHERS.items():
        other = dataclasses.replace(ABOUT, **{field: value})
        said = other.unlike(ABOUT)
        assert said is not None and words in said, field
        assert ABOUT.unlike(other) not in (None, said)
        place = field in ("engine", "levels", "hops", "inside")
        assert (other.unlike_place(ABOUT) is not None, other.unlike_run(ABOUT) is not None) == (place, not place), field
    for parameters, words in PARAMETERS:
        assert dataclasses.replace(ABOUT, parameters=parameters).unlike(ABOUT) == words
    assert dataclasses.replace(ABOUT, rank=2, across=(), steps=200).unlike(ABOUT) is None


def test_it_is_read_as_it_was_written_and_nothing_else_is():
    """In whole pages of 4096 bytes. What is damaged anywhere is refused by its key, and so is another format."""
    for about in (ABOUT, *(dataclasses.replace(ABOUT, **{field: value}) for field, (value, _) in OTHERS.items())):
        dumped = about.dump()
        assert dumped.dtype == torch.uint8 and dumped.shape == (4096,) and Header.load("key", dumped) == about
        assert Header.load("key", dumped.view(2, -1)) == about
    many = dataclasses.replace(ABOUT, parameters={f"w{i}": ((i,), i) for i in range(300)}).dump()
    assert len(many) % 4096 == 0 and len(many) > 4096
    fields = json.loads(bytes(ABOUT.dump().tolist()))
    for name, value in [*((name, ...) for name in fields), ("hops", [[1, 2]]), ("parameters", 3), ("across", 1)]:
        others = {key: of for key, of in fields.items() if key != name}
        text = json.dumps(others if value is ... else {**others, name: value})
        with pytest.raises(ThinwireError, match="'key' is damaged: take an older checkpoint"):
            Header.load("key", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
    for bad in (ABOUT.dump().float(), torch.zeros(4096, dtype=torch.uint8), ABOUT.dump()[:99], ABOUT.dump().int()):
        with pytest.raises(ThinwireError, match="'key' is damaged"):
            Header.load("key", bad)
    with pytest.raises(ThinwireError, match="the state is in format 9, and this version of Thinwire reads format 2"):
        Header.load("key", dataclasses.replace(ABOUT, format=9).dump())


def test_what_it_says_of_a_run():
    """All that was given, and no more; the parameters by name, with those that are sharded across another dimension."""
    hop: Any = SimpleNamespace(rank=1, ranks=4, owner=True)
    weights: dict[str, Any] = {
        name: SimpleNamespace(placements=[SimpleNamespace(is_shard=lambda shard=dim is not None: shard, dim=dim)])
        for name, dim in (("b", 1), ("a", 0), ("c", None))
    }
    parameters = {name: Parameter(name, (3, 4), 12, "matrix", torch.float32, 8) for name in "ba"}
    inside = methods.resolve("int8")
    engine: Any = SimpleNamespace(kind="hsdp", levels=None, hops=[hop, hop])
    run = Run(parameters, hop, 100, weights=weights, began=200)
    about = Header.of_run(2, 8, engine, run, methods.resolve("topk"), inside)
    assert (about.rank, about.ranks, about.engine, about.levels, about.steps) == (2, 8, "hsdp", False, 200)
    assert about.hops == ((1, 4, True),) * 2 and about.inside == str(inside) and about.across == ("b",)
    assert about.parameters == {"a": ((3, 4), 8), "b": ((3, 4), 8)} and (about.seed, about.bound) == (0, None)
    assert about.method == "topk" and about.knobs["density"] == str(methods.resolve("topk").density)
    engine = SimpleNamespace(kind="ddp", levels=object(), hops=[hop])
    plain = Header.of_run(0, 1, engine, Run({}, hop, seed=3), methods.resolve("fp32"), bound=2.0)
    assert (plain.levels, plain.inside, plain.seed, plain.bound, plain.across) == (True, None, 3, 2.0, ())
    assert plain.prefix == "rank-0000-of-0001" and Header.load("key", about.dump()) == about


@pytest.mark.parametrize(
    ("hops", "shard"),
    [(((1, 4, False),), (0, 1)), (((1, 4, True),), (0, 1)), (((1, 4, True), (2, 3, True)), (0, 1)),
     (((1, 4, True), (2, 3, False)), (1, 4))],
)  # fmt: skip
def test_which_shard_waits_here(hops, shard):
    """Of those that a hop inside the node leaves; where each rank owns a row, or there is one hop, all of it."""
    assert dataclasses.replace(ABOUT, hops=hops).shard == shard


LIKE = {
    "residual/w": (2, 6), "=mask/w": (3, 8), "=chosen/w": (5,), "=count/w": (), "=mask/v": (3, 8),
}  # fmt: skip


def form() -> Form:
    return Form(ABOUT, {key: torch.empty(shape, device="meta") for key, shape in LIKE.items()})


def drawn(draw: random.Random) -> dict[str, torch.Tensor]:
    """Some of the small values, their last dimension of any length up to that of the form; the others whole."""
    values = {}
    for key, shape in LIKE.items():
        if key.startswith("=") and draw.random() < 0.3:
            continue
        length = (draw.randrange(shape[-1] + 1),) if key.startswith("=") and shape else shape[-1:]
        values[key] = torch.randn(*shape[:-1], *length) if shape else torch.randn(())
    return values


@pytest.mark.parametrize("seed", range(6))
def test_what_was_packed_is_unpacked_whatever_was_there(seed):
    """Keys, shapes and dtypes are the same each time; and trim() gives the same without the form."""
    torch.manual_seed(seed)
    draw, of = random.Random(seed), form()
    for _ in range(10):
        values = drawn(draw)
        packed = of.pack(values)
        shapes = {key.removeprefix(f"{ABOUT.prefix}/"): tuple(value.shape) for key, value in packed.items()}
        assert shapes == {**LIKE, "about": (4096,), "lengths": (4,)}
        assert packed[f"{ABOUT.prefix}/lengths"].dtype == torch.int64
        assert all(value.isfinite().all() for value in packed.values())
        plain = {key.removeprefix(f"{ABOUT.prefix}/"): of for key, of in packed.items() if not key.endswith("/about")}
        for found in (of.unpack(packed), trim(plain)):
            expected = {"residual/w": torch.zeros(2, 6), **values}
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_state_that_is_not_of_this_form_is_refused_by_its_key():
    """Packed as it is, so that it is seen: a value with another first dimension, a key that nobody knows."""
    of, draw = form(), random.Random(1)
    good = {key: torch.zeros(shape) for key, shape in LIKE.items()}
    assert of.unpack(of.pack(good)).keys() == LIKE.keys()
    for key, value, words in (
        ("residual/w", torch.zeros(3, 6), "residual/w' is torch.float32 (3, 6), this run needs torch.float32 (2, 6)"),
        ("=mask/w", torch.zeros(4, 7), "=mask/w' is torch.float32 (4, 7), this run needs torch.float32 (3, 8)"),
        ("residual/w", torch.zeros(2, 6).double(), "is torch.float64 (2, 6), this run needs torch.float32 (2, 6)"),
        ("residual/u", torch.zeros(1), "the state has 'rank-0001-of-0004/residual/u', unknown to"),
        ("residual/w", torch.full((2, 6), torch.inf), "residual/w' holds values that are not finite"),
    ):
        with pytest.raises(ThinwireError) as error:
            of.unpack(of.pack({**good, key: value}))
        assert words in str(error.value), str(error.value)
    packed = of.pack(drawn(draw))
    for lost, words in (
        (["residual/w"], "lacks 'rank-0001-of-0004/residual/w', which"),
        (["residual/w", "lengths", "=mask/v"], "lacks 'rank-0001-of-0004/=mask/v' and 2 other entries, which"),
        (["about"], "the state has no 'rank-0001-of-0004/about'"),
    ):
        left = {key: value for key, value in packed.items() if key.partition("/")[2] not in lost}
        with pytest.raises(ThinwireError) as error:
            of.unpack(left)
        assert words in str(error.value), str(error.value)
    plain = Form(ABOUT, {"residual/w": torch.empty(2, 6, device="meta")})
    assert "rank-0001-of-0004/lengths" not in plain.pack({}) and not plain.unpack(plain.pack({}))["residual/w"].any()


def test_whose_a_state_is():
    packed = form().pack({})
    other = {key.replace("rank-0001", "rank-0002"): value for key, value in packed.items()}
    assert {owner: len(keys) for owner, keys in split({**packed, **other}).items()} == {(1, 4): 7, (2, 4): 7}
    assert own_of({**packed, **other}, ABOUT).keys() == packed.keys()
    assert own_of(other, ABOUT) is None and own_of({}, ABOUT) is None
    assert own_of(packed, dataclasses.replace(ABOUT, engine="fsdp2")) is None
    assert own_of({key: of for key, of in packed.items() if "about" not in key}, ABOUT) is None
    assert own_of(packed, dataclasses.replace(ABOUT, method="sign")).keys() == packed.keys()
    for state, words in (
        ({}, "the state is empty, and this is rank 1 of 4"), (other, "is that of rank 2 of 4, and this is rank 1 of 4"),
        ({**packed, **other}, "is that of rank 2 of 4, and"), ({"w": torch.ones(1)}, "'w' is not an entry of a state"),
        ({key.replace("of-0004", "of-0002"): of for key, of in packed.items()}, "hand in the states of all 2 ranks"),
    ):  # fmt: skip
        with pytest.raises(ThinwireError, match=words):
            form().unpack(state)


def test_only_values_with_a_point_can_be_not_finite():
    check_finite("key", torch.ones(3, dtype=torch.int64))
    check_finite("key", torch.empty(0))
    for bad in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(ThinwireError, match="the state 'key' holds values that are not finite"):
            check_finite("key", torch.tensor([0.0, bad]).bfloat16())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_states_of_all_ranks_are_read_from_a_folder_of_dcps(tmp_path):
    """Under the name that they have there, and nothing else of it; where there are none, it says so."""
    packed = form().pack({key: torch.rand(shape) for key, shape in LIKE.items()})
    other = {key.replace("rank-0001", "rank-0002"): value + 1 for key, value in packed.items()}
    both = {**packed, **other}
    saved = {"wire": both, "model": {"w": torch.ones(2)}, "wirelike": torch.ones(3)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    found = from_dcp(tmp_path)
    assert found.keys() == both.keys() and all(torch.equal(found[key], both[key]) for key in both)
    assert all(found[key].dtype == both[key].dtype for key in both)
    with pytest.raises(ThinwireError, match="holds no state of a wire under the name 'other'"):
        from_dcp(tmp_path, "other")

"""Every knob does something and takes no value that it cannot; the plan says how much is compressed, and what helps."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import ClassVar, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import thinwire
from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import knobs_of
from thinwire.cli import program as cli
from thinwire.cli.compare import compare_main
from thinwire.cli.lab import lab_main
from thinwire.core.method import Method, Parameter
from thinwire.core.names import describe
from thinwire.core.selection import keep_dense
from thinwire.lab import report as comparison
from thinwire.methods import TABLE
from thinwire.methods.parts.feedback import Lossy
from thinwire.network.ledger import Ledger
from thinwire.plan import plan as plans
from thinwire.plan.plan import Plan
from thinwire.proof.ranks import Threads
from thinwire.train import cli as train_cli
from thinwire.train.config import Config, from_arguments, from_yaml
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS
from threaded import exchange_on

KNOBS = [(cls, knob.name) for cls in TABLE for knob in knobs_of(cls)]
NAMED = [f"{cls.name}-{knob}" for cls, knob in KNOBS]
KINDS = {
    "separate": ({}, {"beta": None}, {"beta": None, "reset": 3}, {"estimator": "paper", "beta": 0.95}),
    "topk": ({}, {"feedback": None}), "tagc": ({}, {"leftovers": "median"}, {"theta": 0}),
    "loco": ({}, {"reset": 0}), "dgc": ({}, {"momentum": 0}), "trickle": ({}, {"mask": "merged"}),
}  # fmt: skip
"""Settings of a method that promise different things."""


def refused(make, *words: str) -> None:
    with pytest.raises(ThinwireError) as caught:
        make()
    line = str(caught.value)
    assert "\n" not in line and len(line) < 300
    assert all(word in line for word in words), line


# knobs that do nothing


@pytest.mark.parametrize(
    ("text", "knob"),
    [
        ("dense(send='*')", "send"), ("dense(dense='*')", "dense"), ("fp32(send='*')", "send"),
        ("fp32(dense='*')", "dense"), ("none(dense='*')", "dense"), ("none(send='*')", "send"),
        ("bf16(smallest=3)", "smallest"), ("bf16(send='*')", "send"),
        ("lhc(theta=0.5)", "theta"), ("zeropp(weight_bits=4)", "weight_bits"), ("qsdp(group=64)", "group"),
        ("local-steps(send='*')", "send"),
    ],
)  # fmt: skip
def test_a_knob_that_does_nothing_does_not_exist(text, knob, capsys):
    cls = type(methods.resolve(text.partition("(")[0]))
    values = {"smallest": 3, "theta": 0.5, "weight_bits": 4, "group": 64}
    value = values.get(knob, "*" if knob in ("send", "dense") else False)
    refused(lambda: methods.resolve(text), f"{cls.name} has no knob '{knob}'", "it has: ")
    refused(lambda: cls(**{knob: value}), f"{cls.name} has no knob '{knob}'", "it has: ")
    methods.main([cls.name])
    assert f"\n  {knob}=" not in capsys.readouterr().out


@pytest.mark.parametrize(("cls", "knob"), [(c, k) for c, k in KNOBS if k in ("dense", "send", "smallest")])
def test_a_knob_that_chooses_parameters_chooses_parameters(cls, knob):
    parameters = [Parameter("a", (n, 8), 8 * n, role, torch.float32, 8 * n)
                  for n in (16, 64, 2**16) for role in ("matrix", "norm")]  # fmt: skip
    value = 0 if knob == "smallest" else "*"
    changed, default = cls(**{knob: value}), cls()
    assert [keep_dense(changed, p) for p in parameters] != [keep_dense(default, p) for p in parameters]


def test_a_knob_that_does_nothing_beside_another_is_refused():
    text = "tagc(theta=0, feedback='updates(delivered_share=0.5)')"
    refused(lambda: methods.resolve(text), "delivered_share does nothing with theta=0")


@pytest.mark.parametrize("cls", [cls for cls in TABLE if "feedback" in {knob.name for knob in knobs_of(cls)}])
def test_every_method_takes_or_refuses_each_feedback_in_one_line(cls):
    """With each kind of promise that its knobs give it: what a card says is known before a method has begun."""
    kinds = [values for values in (*KINDS.get(cls.name, ({},)), *cls.PRESETS.values()) if "feedback" not in values]
    for values in kinds:
        for feedback in (methods.Gradients(), methods.Updates(), methods.Updates(delivered_share=0.5)):
            try:
                made = cls(**values, feedback=feedback)
            except ThinwireError as error:
                assert "\n" not in str(error) and "delivered_share" in str(error)
                continue
            assert methods.resolve(str(made)) == made and made == cls(**values, feedback=str(feedback))
            waits_for_steps = isinstance(feedback, methods.Updates)
            assert made.card.promise.of == ("updates" if waits_for_steps else "gradients") or (
                made.card.promise.kind == "lossy"
            )


def test_local_steps_need_the_same_arithmetic_as_their_outer_method():
    for outer in ("separate", "int8", "scape"):
        method = methods.resolve(outer)
        if method.card.promise.of == "gradients":
            inside = methods.resolve(f"local-steps(outer={outer!r})").card
            assert inside.same_arithmetic == method.card.same_arithmetic == (outer == "separate")


def test_defaults_presets_and_what_they_print_are_accepted():
    for cls in TABLE:
        for name in (cls.name, *(f"{cls.name}:{preset}" for preset in cls.PRESETS)):
            made = methods.resolve(name)
            assert methods.resolve(str(made)) == made
            assert not {knob.name for knob in knobs_of(cls)} & set(cls.ABSENT)


@pytest.mark.parametrize("cls", [cls for cls in TABLE if "paper" in cls.PRESETS], ids=lambda cls: cls.name)
def test_a_bare_name_is_the_recommended_form_and_the_papers_is_beside_it(cls):
    """In Python as on the command line; a knob that is set leaves the others as recommended."""
    paper = methods.resolve(f"{cls.name}:paper")
    assert paper != cls() and getattr(paper, "feedback", methods.Gradients()) == methods.Gradients()
    sends = {"topk": methods.Updates, "tagc": methods.Updates, "powersgd": methods.Updates, "radius": methods.Gradients,
             "separate": methods.Gradients}  # fmt: skip
    if cls.name in sends:
        assert isinstance(methods.resolve(f"{cls.name}(start=7)").feedback, sends[cls.name])


@pytest.mark.parametrize("name", ["topk", "tagc", "powersgd", "trickle"])
def test_what_sends_adamws_steps_is_no_outer_method_and_what_to_write_is_said(name):
    for_gradients = methods.resolve(name).for_gradients
    refused(lambda: methods.resolve(f"local-steps(outer={name!r})"), "outer optimizer is SGD", f"write {for_gradients}")
    outer = for_gradients.partition(", or ")[0]
    assert methods.resolve(f"local-steps(outer={outer!r})").card.carrier.feedback == methods.Gradients()


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("scape:density:0.1", "scape(density=0.1)"),
        ("int8:group:64:feedback:gradients", "int8(group=64, feedback='gradients')"),
        ("topk:feedback:updates:dense:*bias", "topk(feedback='updates', dense='*bias')"),
        ("radius:paper:density:0.4", "radius:paper(density=0.4)"),
        (" int8 : group : 64 (smallest=3)", "int8(group=64, smallest=3)"),
    ],
)  # fmt: skip
def test_a_name_without_equals_signs_and_brackets_means_the_same(text, same):
    assert methods.resolve(text) == methods.resolve(same)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int8:group", "a knob needs a value, int8:group:VALUE"), ("int8:", "int8 has no preset ''"),
        ("int8:group:64:group:32", "cannot read"), ("int8:group:64(group=64)", "cannot read"),
        ("int8:group:many", "int8: group is a whole number, got 'many'"), ("int8:a:b", "int8 has no knob 'a'"),
    ],
)  # fmt: skip
def test_a_name_without_equals_signs_that_cannot_be_read_says_why(text, words):
    refused(lambda: methods.resolve(text), words)


# values that a knob cannot take

JUNK = {
    int: ("3", 1.5, True, None, math.nan, (3,)),
    float: ("0.5", True, None, math.nan, math.inf, -math.inf, (0.5,)),
    bool: (3, 1, "True", None, 0.0),
    str: (3, True, None, ("a",)),
    methods.Gradients: (3, True, None, "both", "updates(3)"),
    tuple: (5, ("a", 3), (None,), {"a"}, True, None, b"a"),
}


def kind_of(cls: type, knob: str) -> set[type]:
    """The types of the values that ``knob`` takes."""
    hint = get_type_hints(cls)[knob]
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) or "Literal" in str(hint) else (hint,)
    kinds = {part if isinstance(part, type) else type(part) for part in parts}
    return {tuple} if knob in ("dense", "send") else kinds


@pytest.mark.parametrize(("cls", "knob"), KNOBS, ids=NAMED)
def test_values_of_another_type_are_refused_by_name(cls, knob):
    kinds = kind_of(cls, knob)
    allowed = tuple(kinds | ({int} if float in kinds else set()))
    for kind in kinds - {NoneType, Method, methods.Updates}:
        for value in JUNK[kind]:
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if (value is None and NoneType in kinds) or (number and isinstance(value, allowed)):
                continue
            refused(lambda value=value: cls(**{knob: value}), cls.name, knob)
            if "nan" not in repr(value) and "inf" not in repr(value):
                refused(lambda value=value: methods.resolve(f"{cls.name}({knob}={value!r})"), cls.name, knob)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 70), st.just(10**400), st.floats(), st.text(max_size=3),
    st.binary(max_size=2), st.lists(st.text(max_size=2), max_size=2),
    st.tuples(st.one_of(st.text(max_size=2), st.integers())), st.dictionaries(st.text(max_size=1), st.integers()),
)  # fmt: skip


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.sampled_from(KNOBS), ANYTHING)
def test_any_value_is_taken_or_refused_in_one_line(knob, value):
    try:
        made = knob[0](**{knob[1]: value})
    except ThinwireError as error:
        assert "\n" not in str(error)
    else:
        held = getattr(made, knob[1])
        assert not isinstance(held, float) or math.isfinite(held)


@pytest.mark.parametrize("cls", TABLE)
def test_ranges_hold_for_all_that_share_a_knob(cls):
    for knob, values in (("smallest", (-1,)), ("group", (0, -8, 10)), ("start", (-1, 1.5)), ("warmup", (-0.1, 2.5)),
                         ("density", (0, -1, 1.1))):  # fmt: skip
        for value in values if knob in {known.name for known in knobs_of(cls)} else ():
            refused(lambda knob=knob, value=value: cls(**{knob: value}), knob)
    if "intra_bits" in {knob.name for knob in knobs_of(cls)}:
        refused(lambda: cls(bits=32, intra_bits=32, group=0), "group")


@dataclass
class Fresh(Lossy):
    """A method of today."""

    name: ClassVar[str] = "fresh"
    share: float = 0.5
    tries: int | None = None


def test_a_new_method_is_checked_on_the_day_it_is_written():
    refused(lambda: Fresh(share=math.nan), "fresh: share is a finite number, got nan")
    refused(lambda: Fresh(share="0.5"), "fresh: share is a finite number, got '0.5'")
    refused(lambda: Fresh(tries=1.5), "fresh: tries is a whole number or None, got 1.5")
    refused(lambda: Fresh(dense=("a", 3)), "fresh: dense is a string or several, got ('a', 3)")
    assert Fresh(share=1, tries=3, dense=["a", "b"], send="c") == Fresh(("a", "b"), ("c",), tries=3, share=1.0)


# configuration and command lines

BAD_SETTINGS = [
    ("lr: .nan", "--lr"), ("lr: -.inf", "--lr"), ("lr: 1e400", "--lr"), ("lr: -0.1", "--lr"),
    ("lr: 1e38", "--lr is up to 1e+15"), ("weight_decay: 1e38", "--weight-decay"),
    ("betas: [2,3]", "--betas"), ("betas: [.nan, 0.9]", "--betas"), ("betas: [0.9, -1]", "--betas"),
    ("betas: [0.9, 1]", "--betas"), ("timeout: 0", "--timeout"), ("timeout: -3", "--timeout"),
    ("timeout: 1e15", "--timeout"), ("timeout: .inf", "--timeout"), ("clip: .inf", "--clip"), ("clip: .nan", "--clip"),
    ("clip: -1", "--clip"), ("weight_decay: .nan", "--weight-decay"), ("warmup: .nan", "--warmup"),
    ("lr_end: .nan", "--lr-end"), ("bucket_mb: .nan", "--bucket-mb"), ("bucket_mb: 0", "--bucket-mb"),
    ("bucket_mb: 1e300", "--bucket-mb"), ("ranks_per_node: 0", "--ranks-per-node"), ("batch_size: 0", "--batch-size"),
    ("ranks_per_node: -2", "--ranks-per-node"), ("seed: 99999999999999999999", "--seed"), ("hidden: 0", "--hidden"),
    ("corpus: []", "--corpus"), ("corpus: ''", "--corpus"), ("intra: int9", "int9"), ("layers: 1.5", "layers"),
    ("method: scape(warmup='x')", "scape: warmup"), ("method: bf16(smallest=3)", "smallest"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), BAD_SETTINGS, ids=[text for text, _ in BAD_SETTINGS])
def test_settings_that_mean_nothing_are_refused_in_one_line(tmp_path, text, words, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    status = cli.main(["train", "--config", str(path), "--out", f"{tmp_path}/run"])
    error = capsys.readouterr().err
    assert status == 2 and words in error
    assert error.startswith("thinwire: ") and error.count("\n") == 1 and "Traceback" not in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b"seed: 2020-13-45"])
def test_a_file_that_is_no_yaml_is_refused(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_bytes(text)
    refused(lambda: from_yaml(path), "is not YAML")


@pytest.mark.parametrize(
    "words",
    [["--lr", "nan"], ["--betas", "2", "3"], ["--timeout", "0"], ["--clip", "inf"], ["--ranks-per-node", "-2"],
     ["--corpus"], ["--seed", "9" * 20]],
)  # fmt: skip
def test_the_command_line_is_checked_like_the_file(words):
    refused(lambda: from_arguments(words).check(), words[0])


@pytest.mark.parametrize("name", [field.name for field in fields(Config)])
def test_a_config_made_in_python_is_checked_too(name):
    refused(lambda: Config(**{name: object()}).check(), "--" + name.replace("_", "-"))
    assert Config().check() == Config()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limit-minutes", "nan"], "limit"), (["--limit-minutes", "0"], "limit"),
        (["--nodes", "0"], "nodes"), (["--ranks-per-node", "0"], "--ranks-per-node"), (["--preset", "huge"], "preset"),
        (["--methods", "bf16(smallest=3)"], "smallest"), (["--", "--lr", "nan"], "--lr"),
        (["--", "--frobnicate"], "frobnicate"), (["--", "--steps", "3"], "--steps"), (["--", "--out=a"], "--out"),
        (["--", "--ranks", "4"], "--nodes"), (["--", "--method", "int8"], "--methods"), (["--mtu", "0"], "MTU"),
    ],
)  # fmt: skip
def test_a_comparison_is_refused_before_anything_is_made(tmp_path, words, said):
    refused(lambda: compare_main(["--out", str(tmp_path / "out"), *words]), said)
    assert not (tmp_path / "out").exists()


def test_a_lab_is_refused_before_anything_is_made():
    for words in (["--nodes", "0"], ["--ranks-per-node", "0"], ["--nodes", "251"], ["--link", "nan"], ["--mtu", "1"]):
        refused(lambda words=words: lab_main(["run", *words, "--", "true"]))


# is it on?


def plan_of(model: nn.Module, method: Method | str, *, size: int = 2, intra: str | None = None) -> Plan:
    exchange = exchange_on("all_reduce", Threads(size), 0, Ledger())
    parameters = list(describe(model).values())
    if intra is None:
        return plans.plan_of(methods.resolve(method), parameters, exchange)
    return plans.plan_of(methods.resolve(method), parameters, exchange, exchange, intra=methods.resolve(intra))


def unfolded(plan: Plan) -> str:
    return " ".join(str(plan).split())


def adapters() -> nn.Module:
    """Four frozen layers with adapters of rank 8, as LoRA has them."""
    model = nn.ModuleDict()
    for layer in range(4):
        model[f"frozen{layer}"] = nn.Linear(512, 512).requires_grad_(False)
        model[f"down{layer}"], model[f"up{layer}"] = nn.Linear(512, 8, bias=False), nn.Linear(8, 512, bias=False)
    return model


def test_a_method_that_compresses_nothing_says_why_and_what_helps():
    plan = plan_of(adapters(), "int8")
    assert plan.compressed == 0
    assert (
        plan.warning
        == plan.note
        == (
            "int8 compresses 0 of 8 tensors (0.0% of the values): small (< 65536) keeps 8 tensors, "
            "100.0% of the values and 100.0% of the bytes, dense: lower smallest, or name them in send="
        )
    )
    assert plan.note in unfolded(plan)
    for helped in ("int8(smallest=0)", "int8(send='*')"):
        plan = plan_of(adapters(), helped)
        assert (plan.compressed, plan.warning, plan.note) == (1, None, None)
        assert "100.0% of the values compressed" in unfolded(plan)
    assert "100.0% of the values, dense: " in plan_of(adapters(), "int8", size=1).warning, "one rank sends no bytes"


@pytest.mark.parametrize(
    ("method", "why", "helps"),
    [
        ("int8(dense='*', smallest=0)", "named in dense=", "take them out of dense="),
        ("powersgd(rank=8, smallest=0)", "rank 8 saves nothing", "lower rank"),
        ("tagc(select='x', smallest=0)", "not selected", "select"),
        ("topk(feedback='gradients')", "small (< 65536)", "lower smallest"),
    ],
)  # fmt: skip
def test_the_knob_that_helps_is_that_of_the_reason_that_keeps_most(method, why, helps):
    warning = plan_of(adapters(), method).warning
    assert f"{why} keeps 8 tensors" in warning and helps in warning.rpartition("dense: ")[2]


@pytest.mark.parametrize("method", ["dense", "fp32", "none", "scape(density=1)"])
def test_methods_that_are_not_made_to_compress_warn_of_nothing(method):
    plan = plan_of(adapters(), method)
    assert (plan.compressed, plan.warning, plan.note) == (None, None, None)
    assert "compress" not in str(plan)


def test_the_hop_inside_a_node_speaks_where_the_method_across_is_dense():
    plan = plan_of(adapters(), "dense", intra="int8")
    assert plan.compressed == 0 and plan.warning.startswith("int8 compresses 0 of 8 tensors")
    assert plan_of(adapters(), "bf16", intra="int8").compressed == 1


def test_int8_sends_more_than_bf16_at_preset_tiny_and_the_note_says_why():
    """The comparison in README: 60% of the values are compressed, no cause for alarm; the rest is most of the bytes."""
    with torch.device("meta"):
        model = Decoder(PRESETS["tiny"])
    int8, bf16 = plan_of(model, "int8"), plan_of(model, "bf16")
    assert int8.wire_bytes > bf16.wire_bytes
    assert int8.warning is None and bf16.note is None
    assert "small (< 65536) keeps 10 tensors, 39.3% of the values and 70.7% of the bytes" in int8.note
    assert plan_of(model, "int8(smallest=0)").wire_bytes < bf16.wire_bytes
    assert plan_of(model, "int8(smallest=0)").note is None


def test_a_pattern_that_matches_nothing_is_told():
    model = adapters()
    for knob in ("dense", "send"):
        plan = plan_of(model, f"int8(smallest=0, {knob}=('down0*', '*head'))")
        line = f"int8: {knob}='*head' matches no trained parameter of this rank's model"
        assert plan.warning == plan.note == line and line in unfolded(plan)
    assert plan_of(model, "int8(smallest=0, dense='frozen0*')").warning, "it is not trained"
    for preset in ("radius:paper", "sdp4bit:paper"):
        assert plan_of(model, preset).note is None, "biases, of which there are none, are dense in a preset"
    assert "matches no" in plan_of(model, "dense", intra="int8(smallest=0, send='*head')").warning


def test_the_warning_has_a_name_of_its_own():
    assert issubclass(thinwire.ThinwireWarning, UserWarning) and "ThinwireWarning" in thinwire.__all__
    assert train_cli._one_line("why", thinwire.ThinwireWarning, "wire.py", 3) == "thinwire: why\n"
    assert "wire.py:3: UserWarning: why" in train_cli._one_line("why", UserWarning, "wire.py", 3)


def test_a_comparison_shows_what_is_compressed_and_why_so_little():
    counted = {"ledger": 1, "kernel": None, "kernel_to_framed": None, "kernel_source": "-"}
    common = {"step_ms": 1, "exposed_ms": 1, "encode_ms": 1, "decode_ms": 1, "train_loss": 1, "valid_loss": 1}

    def run(method: str, **more) -> dict:
        unknown = dict.fromkeys(("failed", "faster", "final", "loss_gap", "to_dense", "link_use"))
        return {"method": method, "summary": {**common, **more}, "step_to_none": 1, "step_to_dense": 1,
                "bytes_per_step": counted, "flags": [], "parts": [], **unknown}  # fmt: skip

    note = plan_of(adapters(), "int8").note
    report = {"model": "tiny", "steps": 5, "nodes": 2, "ranks_per_node": 1, "emulated_network": False, "mtu": 1500,
              "seeds": [], "verdict": "", "command": "", "machine": "",
              "runs": [run("none"), run("int8", compressed_values=0.0, note=note),
                       run("int8(group=64)", compressed_values=0.0, note=note)]}  # fmt: skip
    written = comparison.markdown(report, [Path("a.svg")])
    rows = [line for line in written.partition("## All columns")[2].splitlines() if line.startswith("| ")]
    column = rows[0].split(" | ").index("compressed values")
    assert [row.split(" | ")[column] for row in rows[1:]] == ["-", "0.0%", "0.0%"]
    assert f"\n* {note}\n" in written and f"\n* int8(group=64): {note}\n" in written
    assert "compressed values" in [column.header for column in comparison.table(report).columns]

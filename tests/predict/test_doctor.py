"""The doctor: fits recover what was planted, the verdict names what bounds, and the program ends cleanly anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from patience import PATIENCE
from thinwire.base.errors import ThinwireError
from thinwire.cli import program
from thinwire.methods import TABLE
from thinwire.predict import measure
from thinwire.predict.cluster import Constant, Kernel, read_cluster
from thinwire.predict.doctor import Steps, calibrated, parts_of, verdict
from thinwire.predict.kernels import kernels_of, time_kernels
from thinwire.predict.layouts import timeline_of
from thinwire.predict.links import Sample, curves, fall_with_nodes, fit
from thinwire.predict.profile import profile_of
from thinwire.predict.simulate import Job, Simulation, simulate
from thinwire.predict.timeline import Group, Message, Pass
from thinwire.train.config import Config
from thinwire.train.job import examination, stepper, trial
from thinwire.train.job.trial import StepTimes
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS

CPU = torch.device("cpu")
LATENCY, RATE = 3e-4, 5e7


def planted(kind: str, group: Group, rate: float, noise: Sequence[float] = (1.0,)) -> list[Sample]:
    """Collectives of 64 kB to 64 MB that take the planted latency and rate, times ``noise`` in turn."""
    samples = []
    for verb, rounds, share in (("all_reduce", 2, 2), ("all_to_all", 0, 1)):
        for size in (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26):
            sent = share * size * (group.size - 1) / group.size
            message = Message(verb, sent, group, rounds * (group.size - 1) or 1)
            nbytes = message.nic_bytes if group.crosses else sent
            seconds = (message.rounds * LATENCY + nbytes / rate) * noise[len(samples) % len(noise)]
            samples.append(Sample(kind, message, size, seconds))
    return samples


@pytest.mark.parametrize("group", [Group(2, 1), Group(8, 8), Group(4, 1, beside=8)])
def test_a_fit_recovers_latency_and_rate(group: Group) -> None:
    line = fit(planted("any", group, RATE))
    assert line.latency.value == pytest.approx(LATENCY, rel=1e-6)
    assert line.rate.value == pytest.approx(RATE, rel=1e-6)
    assert line.rate.source == "measured" and line.rate.low < 1 < line.rate.high


def test_a_fit_of_noisy_times_is_near_and_its_range_holds_the_noise() -> None:
    noise = np.exp(np.random.default_rng(0).normal(0, 0.1, 12))
    line = fit(planted("any", Group(2, 1), RATE, noise.tolist()))
    assert line.rate.value == pytest.approx(RATE, rel=0.1)
    assert line.rate.low * line.rate.value < RATE < line.rate.high * line.rate.value


def test_a_message_within_a_shapers_burst_does_not_spoil_the_rate() -> None:
    samples = planted("any", Group(2, 1), RATE)
    burst = [replace(s, seconds=s.seconds / 4) if s.size == 1 << 16 else s for s in samples]
    assert fit(burst).rate.value == pytest.approx(RATE, rel=0.02)


def test_a_latency_that_does_not_show_is_0_not_negative() -> None:
    samples = [replace(s, seconds=s.message.nic_bytes / RATE) for s in planted("any", Group(2, 1), RATE)]
    short = [replace(s, seconds=s.seconds / 2) if s.size == 1 << 16 else s for s in samples]
    assert fit(short).latency.value == 0.0


def test_it_says_that_the_rate_falls_with_nodes() -> None:
    pair, four = planted("pair", Group(2, 1), 2 * RATE), planted("across", Group(4, 1), RATE)
    assert "falls with nodes" in (fall_with_nodes(pair + four) or "")
    assert fall_with_nodes(planted("pair", Group(2, 1), RATE) + four) is None
    assert curves(four)[0].startswith("across all_reduce") and "64 MiB" in curves(four)[0]


@pytest.fixture
def job() -> Job:
    with torch.device("meta"):
        model, tokens = Decoder(PRESETS["laptop"].check()), torch.zeros(1, 256, dtype=torch.int64)
    cluster = replace(read_cluster("wan-1g"), per_node=1, codec_on_core=True)
    return Job("laptop", model, profile_of(model, (tokens, tokens)), cluster, "ddp", 2, 8)


def silent_step(job: Job) -> float:
    return job.play(job.record("none")).seconds


def simulated(job: Job) -> Simulation:
    return simulate(job, ["dense", "int8"])


def on(job: Job, **changes: float) -> Job:
    constants = {name: Constant(value, "measured", 0.97, 1.03) for name, value in changes.items()}
    return replace(job, cluster=replace(job.cluster, **constants))  # type: ignore[arg-type]


def test_the_two_fitted_constants_are_those_that_were_planted(job: Job) -> None:
    true = on(job, flops=1e11, compute_share=0.3, inter_rate=2e7, inter_share=0.8)
    none, dense = silent_step(true), true.play(true.record("dense")).seconds
    start = on(job, flops=1e11, compute_share=1.0, inter_rate=2e7, inter_share=1.0)
    found = calibrated(start, Steps([none]), Steps([dense])).cluster
    assert found.compute_share.value == pytest.approx(0.3, rel=0.01)
    assert found.inter_share.value == pytest.approx(0.8, rel=0.01)
    assert sorted(found.sourced("fitted:")) == ["compute_share", "inter_share"]


def test_an_exchange_that_does_not_show_fits_nothing(job: Job) -> None:
    start = on(job, flops=1e11, inter_rate=1e12, inter_share=1.0)
    found = calibrated(start, Steps([5.0]), Steps([5.01])).cluster
    assert found.sourced("fitted:") == ("compute_share",)


def lines_of(job: Job, parts: dict[str, float]) -> list[str]:
    return verdict(parts, 0.25, simulated(job), "thinwire train --method")


def test_verdict_where_the_network_bounds(job: Job) -> None:
    slow = on(job, flops=1e12, compute_share=0.5, inter_rate=5e6)
    simulation = simulated(slow)
    parts = parts_of(Steps([silent_step(slow)], loading=0.01), simulation.dense.prediction.seconds, on_gpu=False)
    bound, helps, command = lines_of(slow, parts)
    assert bound.startswith("bound by: the network, ") and "then computing" in bound and "25% of the exchange" in bound
    assert helps.startswith("helps:    int8: ") and " as fast" in helps and "in place of" in helps
    assert command == "type:     thinwire train --method int8"


def test_verdict_where_computing_bounds_is_not_to_compress(job: Job) -> None:
    fast = on(job, flops=1e9, compute_share=0.5, inter_rate=1e10)
    parts = parts_of(Steps([silent_step(fast)]), simulated(fast).dense.prediction.seconds, on_gpu=False)
    bound, helps, command = lines_of(fast, parts)
    assert bound.startswith("bound by: computing, ")
    assert helps.startswith("helps:    do not compress; int8 would be ") and "a faster device" in helps
    assert command == "type:     thinwire train --method dense"


def test_verdict_where_kernels_cost_more_than_they_save(job: Job) -> None:
    """The network bounds, and still nothing is faster than dense."""
    near = on(job, flops=1e13, inter_rate=1e9)
    near = replace(near, cluster=replace(near.cluster, kernels={"thinwire.ops.quant.quantize": Kernel(1.0, 1e9)}))
    assert simulated(near).best.method == "dense"
    _, helps, command = lines_of(near, {"network": 0.1, "computing": 0.05, "host": 0.0, "input": 0.0})
    assert "do not compress" in helps and "fewer exchanges" in helps and command.endswith(" dense")


@pytest.mark.parametrize(
    ("none", "on_gpu", "first"),
    [
        (Steps([1.0], loading=0.8), True, "input"),
        (Steps([1.0], loading=0.0, issuing=0.95), True, "host"),
        (Steps([1.0], loading=0.0, issuing=0.95), False, "computing"),  # a CPU is the device itself
    ],
)
def test_parts_of_a_step(none: Steps, on_gpu: bool, first: str) -> None:
    parts = parts_of(none, 1.2, on_gpu=on_gpu)
    assert max(parts, key=lambda name: parts[name]) == first and sum(parts.values()) == pytest.approx(1.2)


@pytest.mark.parametrize("method", ["dense", "int8", "sdp4bit", "topk", "tagc", "scape"])
def test_every_kernel_of_a_recording_is_timed_under_its_name(method: str) -> None:
    with torch.device("meta"):
        model = Decoder(PRESETS["tiny"].check())
    kernels = kernels_of([time_kernels(model, method, "ddp", CPU)], 1e9)
    timeline = timeline_of(model, method, engine="ddp", nodes=2, per_node=1, gloo=True)
    nbytes: dict[str, float] = {}
    for event in (event for step in timeline.steps for stretch in step.stretches for event in stretch.events):
        if isinstance(event, Pass):
            nbytes[event.kernel] = nbytes.get(event.kernel, 0.0) + event.nbytes
    unmeasured = sum(size for name, size in nbytes.items() if name not in kernels)
    assert unmeasured < 0.05 * sum(nbytes.values()), [name for name in nbytes if name not in kernels]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("method", [method.name for method in TABLE])
def test_the_kernels_of_every_method_are_timed_but_of_those_that_refuse_the_engine(method: str, engine: str) -> None:
    model = Decoder(replace(PRESETS["tiny"], layers=1).check())
    numbers = torch.get_rng_state()
    if engine == "fsdp2" and method in ("local-steps", "none"):
        with pytest.raises(ThinwireError, match=r"FSDP2|fsdp2|DDP"):
            time_kernels(model, method, engine, CPU)
    else:
        assert time_kernels(model, method, engine, CPU)
    assert torch.equal(numbers, torch.get_rng_state()), "they draw from the run's random numbers"


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_of_many_buffers_are_timed(engine: str) -> None:
    with torch.device("meta"):
        model = Decoder(replace(PRESETS["tiny"], layers=4, width=640).check())
    assert time_kernels(model, "int8", engine, CPU)


def test_a_kernel_of_two_sizes_has_seconds_and_a_rate() -> None:
    times = {"k": [(n, 1e-4 + n / 2e9) for n in (1e5, 1e7)], "short": [(100.0, 2e-5)]}
    kernels = kernels_of([times], 4e9)
    assert kernels["k"].seconds == pytest.approx(1e-4) and kernels["k"].rate == pytest.approx(2e9)
    assert kernels["short"] == Kernel(2e-5, 4e9)


def run_doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinwire", "doctor", "--preset", "tiny", "--seconds", "10", "--methods", "int8",
               "--out", str(folder / "cluster.toml"), "--", "--device", "cpu", *words]  # fmt: skip
    (folder / "temporary").mkdir()
    (folder / "text").write_text("a line of text\n" * 3000)
    # torch's own folder, made as torch._dynamo is imported, is not the doctor's
    environment = os.environ | {"TMPDIR": str(folder / "temporary"), "TORCHINDUCTOR_CACHE_DIR": str(folder.parent)}
    command += ["--corpus", str(folder / "text")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240 * PATIENCE)


def left_behind(folder: Path) -> set[str]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    zombies = {pid for pid in children if "doctor" in Path(f"/proc/{pid}/cmdline").read_text()}
    return zombies | {path.name for path in folder.iterdir()} | {p.name for p in (folder / "temporary").iterdir()}


def test_two_ranks_on_loopback_write_a_cluster(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, "--ranks", "2", "--ranks-per-node", "1")
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert [line[:8] for line in lines[:3]] == ["bound by", "helps:  ", "type:   "]
    assert any(line.startswith("across all_to_all") for line in lines) and "int8" in done.stdout
    cluster = read_cluster(tmp_path / "cluster.toml")
    assert cluster.per_node == 1 and cluster.inter_rate.source == "measured" and cluster.codec_on_core
    untimed = {"thinwire.ops.quant.quantize"} if "no time was left for the kernels of int8" in done.stdout else set()
    assert {"thinwire.ops.quant.quantize", "optimizer"} - untimed <= set(cluster.kernels)
    assert len(cluster.sourced("fitted:")) <= 2
    assert left_behind(tmp_path) == {"cluster.toml", "temporary", "text"}


def test_one_rank_says_what_it_cannot_know(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, "--ranks", "1")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "one rank cannot know: links" in done.stdout
    cluster = read_cluster(tmp_path / "cluster.toml")
    assert {"inter_rate", "inter_latency", "intra_rate"} <= set(cluster.sourced("assumed"))
    assert left_behind(tmp_path) == {"cluster.toml", "temporary", "text"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--methods", "itn8"], "itn8"),
        (["--seconds", "5"], "--seconds is from 10 to 600, got 5"),
        (["--out", "/nowhere/cluster.toml"], "--out /nowhere/cluster.toml"),
        (["--preset", "huge"], "unknown preset 'huge'"),
        (["--", "--method", "int8"], "write --methods, --out and --preset before --"),
        (["--frobnicate"], "frobnicate"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    monkeypatch.setattr("thinwire.train.cli.start_ranks", None)
    status = program.main(["doctor", "--preset", "tiny", *words])
    error = capsys.readouterr().err
    assert status == 2 and line in error and error.count("\n") == 1, error


def test_no_constant_but_the_assumed_links_is_invented() -> None:
    assert measure.RATE.low <= 0.1 and measure.RATE.high >= 10


def test_a_cost_of_the_host_that_dense_steps_do_not_show_is_fitted_down(job: Job) -> None:
    true = on(job, flops=1e11, compute_share=0.3, inter_rate=2e7, inter_share=1.0, host_seconds_per_byte=1e-8)
    none, dense = silent_step(true), true.play(true.record("dense")).seconds
    start = on(job, flops=1e11, compute_share=1.0, inter_rate=2e7, inter_share=1.0, host_seconds_per_byte=9e-8)
    found = calibrated(start, Steps([none]), Steps([dense]))
    assert found.play(found.record("dense")).seconds == pytest.approx(dense, rel=0.01)
    assert found.cluster.inter_share.value == 1.0 and found.cluster.host_seconds_per_byte.value < 5e-8


@pytest.mark.parametrize("reshard", [True, False])
def test_the_job_that_is_predicted_gathers_weights_as_often_as_the_run(job: Job, reshard: bool, monkeypatch) -> None:
    monkeypatch.setattr(examination.doctor, "calibrated", lambda job, *steps: job)
    monkeypatch.setattr(examination, "simulate", lambda job, methods: None)
    doctor_of_one, jobs = object.__new__(examination.Examination), []
    doctor_of_one.config, doctor_of_one.methods = Config(engine="fsdp2", reshard=reshard), ["dense"]
    doctor_of_one.out, doctor_of_one.samples, doctor_of_one._job = Path("here.toml"), [], SimpleNamespace(size=2)
    doctor_of_one._profile, doctor_of_one.dtype = job.profile, torch.float32
    doctor_of_one._tell_and_write = lambda simulation, job, *steps: jobs.append(job)
    doctor_of_one._conclude(job.model, job.cluster, {}, Steps([1.0]), None)
    assert bool(jobs[0].record("dense").steps[0].again) == reshard


def test_a_first_step_that_compiles_is_not_taken_for_a_step(monkeypatch):
    """On a GPU it takes tens of times as long: once it filled the time for all of them, and stood for them."""
    monkeypatch.setattr(examination, "slowest", lambda ranks, steps: list(steps))
    stats = {"wire_ms": 0.0, "exposed_ms": 0.0}
    trial_of_one = SimpleNamespace(
        begin=lambda method: None, time_step=lambda apart=False: next(taken),
        wire=SimpleNamespace(stats=lambda: stats, hand_over=lambda: None, close=lambda: None),
    )  # fmt: skip
    doctor_of_one = object.__new__(examination.Examination)
    doctor_of_one._ranks = None
    for seconds, told in ((0.65, 0), (0.1, 1)):  # also where it took longer than there was time
        doctor_of_one.notes = []
        taken = iter(StepTimes(step, 0.0, step, 0.0) for step in (0.6, *[0.02] * 100))
        found = doctor_of_one._steps(trial_of_one, "none", seconds)
        assert found.issuing == 0.02 and set(found.steps) == {0.02} and len(doctor_of_one.notes) == told


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "hsdp"])
def test_the_engine_s_own_work_is_said_to_be_in_the_network_s_part(job: Job, engine: str) -> None:
    doctor_of_two = of_two(Path())
    for dense, told in ((Steps([0.08]), engine != "ddp"), (None, False)):  # a predicted one has no such work
        simulation = simulated(replace(job, engine=engine))
        lines = [*doctor_of_two._report(simulation, simulation.job, Steps([0.01]), dense)]
        assert any(line.startswith(f"steps without any exchange are DDP's: what {engine}") for line in lines) == told


def test_a_job_that_compiles_its_model_is_measured_compiled(monkeypatch):
    monkeypatch.setattr(stepper, "compress", lambda *given, **named: None)
    monkeypatch.setattr(torch, "compile", lambda model: f"compiled {model}")
    for compiles, runner in ((False, "model"), (True, "compiled model")):
        job = object.__new__(trial.Trial)
        job.config, job.model, job.optimizers = Config(compile=compiles), "model", ()
        job.begin("dense")
        assert job.runner == runner


def of_two(folder: Path) -> examination.Examination:
    doctor_of_two = object.__new__(examination.Examination)
    doctor_of_two._job, doctor_of_two.out, doctor_of_two.command = SimpleNamespace(size=2), folder / "c.toml", "train"
    doctor_of_two.samples, doctor_of_two.notes = [], []
    return doctor_of_two


@pytest.mark.parametrize("full", ["the file", "standard output"])
def test_a_full_disk_takes_the_file_or_the_report_and_not_both(job: Job, full: str, tmp_path, monkeypatch, capsys):
    """A minute was measured."""
    simulation = simulated(job)

    def no_space(*given: object) -> None:
        raise OSError(28, "No space left on device")

    if full == "the file":
        monkeypatch.setattr(os, "fsync", no_space)
    else:
        monkeypatch.setattr(examination, "say", no_space)
    with pytest.raises(OSError, match="No space left"):
        of_two(tmp_path)._tell_and_write(simulation, simulation.job, Steps([0.01]), None)
    said = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"] * (full != "the file")
    assert ("bound by" in said) == (full == "the file") and "for thinwire simulate" not in said

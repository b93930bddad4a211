"""The examination of a job on its own ranks: links, device, steps without and with exchange, kernels; a verdict."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from thinwire.base.terminal import note, say
from thinwire.predict import doctor
from thinwire.predict.cluster import Cluster, Kernel, write_cluster
from thinwire.predict.doctor import Steps
from thinwire.predict.forecast import on_meta
from thinwire.predict.kernels import Times, kernels_of, time_each
from thinwire.predict.links import Sample, agree, curves, fall_with_nodes, host_cost, sweep
from thinwire.predict.measure import measure_device
from thinwire.predict.profile import profile_of
from thinwire.predict.simulate import Job, Simulation, simulate
from thinwire.train.config import Config
from thinwire.train.job.collective import Collective
from thinwire.train.job.setup import Ranks, read_inputs
from thinwire.train.job.trial import Trial, slowest

STEPS = 12
"""Most steps of a trial; fewer, where the time is short."""
PREDICTING = 0.15
"""Share of the time that is left for the predictions."""
NOT_ALONE = (
    "one rank cannot know: links, what an exchange takes from computing, what compression would do. Start it on the "
    "job's ranks: torchrun --nnodes N --nproc-per-node L -m thinwire doctor"
)
DDP_ALONE = "steps without any exchange are DDP's: what {} itself adds to a step counts as the network's"
NOT_ACROSS = "one node cannot know what its NICs carry: the rate and latency between nodes are assumed"


class Examination:
    """Examines a run of ``config`` on ``ranks``, for ``seconds`` in all from ``began`` on.

    ``methods``: the candidates, dense first. ``out``: file for the cluster. ``command``: of a run, up to its method.
    """

    def __init__(
        self, config: Config, ranks: Ranks, methods: Sequence[str], out: Path, *, seconds: float, began: float,
        command: str,
    ) -> None:  # fmt: skip
        self.config, self.methods, self.out, self.command = config, methods, out, command
        self._ranks, self._job, self._seconds, self._began = ranks, ranks.comm, seconds, began
        self.per_node = min(ranks.per_node, ranks.comm.size)
        self.samples: list[Sample] = []
        self.notes: list[str] = []

    def run(self) -> None:
        """Measure; rank 0 prints the verdict and writes the cluster. Collective."""
        config, job = self.config, self._job
        collective = Collective(job.patient(config.file_timeout))
        inputs = read_inputs(config, collective, None)
        if job.size > 1:
            self._tell("measuring the links")
            self.samples = sweep(job, self.per_node, self._left(0.2))
        self._tell("measuring the computing, and steps without any exchange")
        trial = Trial(replace(config, engine="ddp"), self._ranks, inputs)  # "none" is DDP's alone
        self.dtype = torch.bfloat16 if self._ranks.computes_in_bf16(config) else torch.float32
        model, dense = on_meta(trial.net, set(), {}), None
        tokens = torch.zeros(1, config.sequence_length, dtype=torch.int64, device="meta")
        # One that cannot be profiled is refused before steps take their time.
        self._profile = collective.do(lambda: profile_of(model, (tokens, tokens), self.dtype))
        cluster = measure_device(job, self.dtype, self.per_node)
        none = self._steps(trial, "none", self._left(0.25))
        if job.size > 1:
            if config.engine != "ddp":
                del trial
                trial = Trial(config, self._ranks, inputs)
            self._tell("measuring steps with dense")
            dense = self._dense(trial, model)
            if cluster.codec_on_core:
                cluster = replace(cluster, host_seconds_per_byte=host_cost(job, self._rank_rate))
        del trial
        self._tell("measuring the methods' kernels, then predicting")
        kernels = kernels_of(self._kernels(model), cluster.memory_rate.value)
        collective.do(lambda: self._conclude(model, cluster, kernels, none, dense) if job.rank == 0 else None)

    def _tell(self, text: str) -> None:
        """Tell the person at rank 0's terminal what is being done."""
        if self._job.rank == 0:
            note(text)

    def _left(self, share: float) -> float:
        """Return ``share`` of the seconds that are left. Collective."""
        spent = agree(self._job, time.monotonic() - self._began)
        return max(share * ((1 - PREDICTING) * self._seconds - spent), 0.1)

    @property
    def _rank_rate(self) -> float:
        """Bytes/s that a rank sent at best."""
        crosses = [sample for sample in self.samples if sample.message.group.crosses]
        return max(sample.message.nbytes / sample.seconds for sample in crosses or self.samples)

    def _steps(self, trial: Trial, method: str, seconds: float) -> Steps:
        """Time steps with ``method`` for about so many seconds, one after the first at least. Collective."""
        trial.begin(method)
        # The first also compiles and fills caches: it may take many times as long as the others, and never counts.
        first, second = (slowest(self._ranks, [trial.time_step()]) for _ in range(2))
        count = min(STEPS, int((seconds - first[0].step) / second[0].step) - 1)
        if count < 1:
            self.notes.append(f"one step alone was timed with {method}, after its first: allow more --seconds")
        times = slowest(self._ranks, [trial.time_step() for _ in range(count)]) or second
        apart = slowest(self._ranks, [trial.time_step(apart=True) for _ in range(count // 4)]) or times
        stats = trial.wire.stats()
        trial.wire.hand_over()  # ranks that stepped alone meet: the next method begins alike on all
        trial.wire.close()
        return Steps(
            [step.step for step in times], loading=statistics.median(step.loading for step in times),
            issuing=statistics.median(step.issuing for step in times),
            optimizer=statistics.median(step.optimizer for step in apart),
            wire=stats["wire_ms"] / 1e3, exposed=stats["exposed_ms"] / 1e3,
        )  # fmt: skip

    def _dense(self, trial: Trial, model: nn.Module) -> Steps | None:
        """Time dense steps; None if a single one would take too long. Collective."""
        seconds = self._left(0.6)
        weights = sum(weight.numel() * weight.itemsize for weight in model.parameters())
        expected = self._job.ring_bytes("all_reduce", weights) / self._rank_rate
        if expected > seconds:
            self.notes.append(f"a dense step takes about {expected:.3g} s, too long to be measured in time: predicted")
            return None
        return self._steps(trial, "dense", seconds)

    def _kernels(self, model: nn.Module) -> list[Times]:
        """Time the kernels of the candidates, as many as there is time for. Collective."""
        times, untimed = time_each(self._job, model, self.methods, self.config.engine, self._left(0.5))
        if untimed:
            self.notes.append(f"no time was left for the kernels of {', '.join(untimed)}: allow more --seconds")
        return times

    def _conclude(
        self, model: nn.Module, cluster: Cluster, kernels: Mapping[str, Kernel], none: Steps, dense: Steps | None
    ) -> None:
        """Fit the constants, predict, print and write."""
        config, size = self.config, self._job.size
        cluster = doctor.with_measured(replace(cluster, name=self.out.stem), kernels, self.samples)
        job = Job(
            config.model, model, self._profile, cluster, config.engine, size,
            config.batch_size, config.accumulate, self.dtype, config.two_level, config.intra, config.reshard,
        )  # fmt: skip
        job = doctor.calibrated(job, none, dense)
        self._tell_and_write(simulate(job, self.methods) if size > 1 else None, job, none, dense)

    def _tell_and_write(self, simulation: Simulation | None, job: Job, none: Steps, dense: Steps | None) -> None:
        """Write the cluster and print the report, each also if the other meets a full disk."""
        try:
            write_cluster(job.cluster, self.out)
        finally:
            for line in self._report(simulation, job, none, dense):
                say(line)
        say(f"{self.out}: the cluster's constants, for thinwire simulate --cluster {self.out}")

    def _report(self, simulation: Simulation | None, job: Job, none: Steps, dense: Steps | None) -> Iterator[str]:
        total = none.seconds
        if simulation is not None:
            total = simulation.dense.prediction.seconds if dense is None else dense.seconds
        step_parts = doctor.parts_of(none, total, on_gpu=not job.cluster.codec_on_core)
        yield from doctor.verdict(step_parts, None if dense is None else dense.hidden, simulation, self.command)
        yield ""
        if simulation is not None:
            yield simulation.details()
        if self._job.size == 1:
            yield NOT_ALONE
        elif job.ranks == job.per_node:
            yield NOT_ACROSS
        if dense is not None and job.engine != "ddp":
            yield DDP_ALONE.format(job.engine)
        yield from self.notes
        yield from curves(self.samples)
        if fall := fall_with_nodes(self.samples):
            yield fall

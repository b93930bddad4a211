"""Predictions for ``method="auto"``: of the user's own model and engine, from a short measurement of these ranks."""

from __future__ import annotations

import itertools
import os
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.core.names import clean_name
from thinwire.engines.fsdp2 import param_groups, policy_of
from thinwire.network.comm import GroupComm
from thinwire.predict.choice import Auto, Training, Trials, candidates
from thinwire.predict.cluster import Cluster, Constant, read_cluster
from thinwire.predict.doctor import with_measured
from thinwire.predict.kernels import kernels_of, time_each
from thinwire.predict.layouts import timeline_of
from thinwire.predict.links import host_cost, solve, sweep
from thinwire.predict.measure import measure_device
from thinwire.predict.play import Prediction, play
from thinwire.predict.profile import ModelProfile, ModuleProfile, profile_of
from thinwire.predict.simulate import DENSE, SILENT
from thinwire.predict.timeline import Timeline

LINKS_S, KERNELS_S = 4.0, 60.0
"""Seconds in which the links and the candidates' kernels are measured, about."""


def predictor(auto: Auto, training: Training, trials: Trials, dense: float) -> Callable[[str], Prediction]:
    """Return a function that predicts a step with the method of a name, on rank 0. Collective.

    What the trials show of the model and no cluster's file knows is fitted: the rate of computing, from a step that
    sends nothing (DDP) or from the dense one, and what the links carry beside computing, from the dense one.

    Args:
        dense: seconds of a measured step.
    """
    silent = None
    with suppress(ThinwireError):  # it takes neither sharded weights nor two levels
        silent = trials.run(SILENT) if training.engine == "ddp" else None
    forecast = Forecast(training, trials)
    cluster = None if auto.cluster else measure(auto, forecast, trials.network)
    trials.from_rank_0(lambda: forecast.fit(cluster or read_cluster(str(auto.cluster)), silent, dense))
    return forecast


class Forecast:
    """Predictions of one training, once its constants are fitted.

    Attributes:
        double: the model on the meta device, without wrappers. cluster: with what was fitted.
    """

    cluster: Cluster

    def __init__(self, training: Training, trials: Trials) -> None:
        self.training, self._trials = training, trials
        self._sharded: set[int] = set()
        self.double = on_meta(training.model, self._sharded, {})
        self.per_node = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), trials.comm.size)
        groups = [group for _, group in param_groups(training.model)] if training.engine != "ddp" else []
        self._gathers = policy_of(groups[0]).param_dtype if groups else None
        frees = [group.post_forward_mesh_info is not None for group in groups]
        self._reshards, self._keeps_root = any(frees), bool(frees) and not frees[0]  # by default the root's own stay
        self._sequences, profile = 1.0, by_size(self.double)
        try:
            profile = profile_of(self.double, trials.inputs, self._gathers)
        except ThinwireError as error:
            if trials.comm.rank == 0:
                text = f"'auto' predicts the time of computing by the numbers of parameters alone: {error}"
                warnings.warn(text, ThinwireWarning, stacklevel=2)
        else:
            tensors = (leaf for leaf in tree_leaves(trials.inputs) if isinstance(leaf, torch.Tensor))
            self._sequences = next((float(tensor.shape[0]) for tensor in tensors if tensor.ndim), 1.0)
        modules = (replace(module, parameters=tuple(map(clean_name, module.parameters))) for module in profile.modules)
        self._profile = replace(profile, modules=tuple(modules))

    def __call__(self, method: str) -> Prediction:
        return self._play(self.record(method), self.cluster)

    def record(self, method: str) -> Timeline:
        training = self.training
        return timeline_of(
            self.double, method, engine=training.engine, nodes=self._trials.comm.size // self.per_node,
            per_node=self.per_node, two_level=training.two_level, intra=training.intra,
            bucket_cap_mb=training.bucket_cap_mb, steps=training.steps or 10_000,
            wrap=lambda name, module: id(module) in self._sharded, gather_dtype=self._gathers, reshard=self._reshards,
            keep_root=self._keeps_root, broadcast_buffers=training.broadcast_buffers,
            gloo=self._trials.network.reduce_scatter_is_all_reduce,
        )  # fmt: skip

    def fit(self, cluster: Cluster, silent: float | None, dense: float) -> None:
        """Fit the constants that only training shows. ``silent``, ``dense``: seconds of steps."""
        baseline = self.record(DENSE)
        timeline, seconds = (baseline, dense) if silent is None else (self.record(SILENT), silent)
        self.cluster = self._solve(cluster, "compute_share", timeline, seconds, 1e-5, 10.0)
        if silent is not None and self._trials.comm.size > self.per_node:
            self.cluster = self._solve(self.cluster, "inter_share", baseline, dense, 0.5, 1.5)

    def _solve(
        self, cluster: Cluster, name: str, timeline: Timeline, seconds: float, low: float, high: float
    ) -> Cluster:
        """Choose the constant ``name`` from ``low`` to ``high`` with which ``timeline`` takes so long."""

        def fitted(value: float) -> Cluster:
            changes: Any = {name: Constant(value, f"fitted:{timeline.method} in this run", 0.97, 1.03)}
            return replace(cluster, **changes)

        return fitted(solve(lambda share: self._play(timeline, fitted(share)).seconds <= seconds, low, high))

    def _play(self, timeline: Timeline, cluster: Cluster) -> Prediction:
        count = self._trials.micro_batches
        return play(timeline, self._profile, cluster, sequences=self._sequences, micro_batches=count)


def measure(auto: Auto, forecast: Forecast, comm: GroupComm) -> Cluster:
    """Measure these ranks: links with the collectives themselves, the device, the candidates' kernels. Collective."""
    training, per_node = forecast.training, forecast.per_node
    samples = sweep(comm, per_node, LINKS_S) if comm.size > 1 else []
    cluster = measure_device(comm, torch.float32, per_node)
    if cluster.codec_on_core and samples:
        best = max(sample.message.nbytes / sample.seconds for sample in samples)
        cluster = replace(cluster, host_seconds_per_byte=host_cost(comm, best))
    by_name: dict[str, list[str]] = defaultdict(list)  # variants of a method have most kernels in common
    for option in candidates(auto, training, comm.size):
        if not option.reason:
            by_name[option.method.partition("(")[0]].append(option.method)
    in_turn = list(filter(None, itertools.chain(*itertools.zip_longest(*by_name.values()))))
    times, _ = time_each(comm, forecast.double, in_turn, training.engine, KERNELS_S)
    return with_measured(cluster, kernels_of(times, cluster.memory_rate.value), samples)


def on_meta(module: nn.Module, sharded: set[int], doubles: dict[int, Any]) -> Any:
    """Make a double of ``module`` without storage, hooks, engine and compiled code.

    Args:
        sharded: gets the ids of the doubles of FSDP's modules. doubles: of tensors and modules, by id: some are shared.
    """
    module = getattr(module, "_orig_mod", module)  # torch.compile's wrapper
    if id(module) in doubles:
        return doubles[id(module)]
    kind: Any = type(module).__bases__[1] if isinstance(module, FSDPModule) else type(module)
    double = doubles[id(module)] = kind.__new__(kind)
    if isinstance(module, FSDPModule):
        sharded.add(id(double))
    for name, value in vars(module).items():
        double.__dict__[name] = OrderedDict() if isinstance(value, OrderedDict) and "hooks" in name else value

    double.__dict__.pop("_compiled_call_impl", None)  # of ``module.compile()``, which would call ``module`` itself

    def empty(tensor: torch.Tensor | None) -> Any:
        if tensor is not None and id(tensor) not in doubles:
            like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_weight = isinstance(tensor, nn.Parameter)
            doubles[id(tensor)] = nn.Parameter(like, requires_grad=tensor.requires_grad) if is_weight else like
        return None if tensor is None else doubles[id(tensor)]

    double.__dict__["_parameters"] = {name: empty(tensor) for name, tensor in module._parameters.items()}
    double.__dict__["_buffers"] = {name: empty(tensor) for name, tensor in module._buffers.items()}
    children: Mapping[str, Any] = module._modules
    double.__dict__["_modules"] = {
        name: None if child is None else on_meta(child, sharded, doubles) for name, child in children.items()
    }
    return double


def by_size(model: nn.Module) -> ModelProfile:
    """Profile a model that cannot be run on the meta device: FLOPs in proportion to parameters."""
    modules = []
    for name, module in model.named_modules():
        owned = {f"{name}.{key}" if name else key: p for key, p in module._parameters.items() if p is not None}
        if owned:
            numel = float(sum(parameter.numel() for parameter in owned.values()))
            trained = float(sum(parameter.numel() for parameter in owned.values() if parameter.requires_grad))
            modules.append(ModuleProfile(name, tuple(owned), 2 * numel, 2 * numel + 2 * trained, 0.0, 0.0))
    return ModelProfile(tuple(modules), sum(p.numel() for p in model.parameters()))

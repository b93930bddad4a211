"""Notices, by a few samples of each weight, that something other than an optimizer has changed weights.

torch counts changes in place (``_version``), but not those through ``.data``, and its count does not show that a change
was taken back (averaged weights, put in for an evaluation).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireWarning
from thinwire.network.comm import local

SAMPLES = 64
"""The number of values of a weight that are compared."""
ROUNDINGS = 2e-6
"""A change of a sample by less than this share of its weight's largest is rounding: some units in fp32's last place."""


class Fingerprint:
    """``SAMPLES`` values of each weight as they were when ``take`` was called."""

    def __init__(self, weights: Callable[[], Sequence[Tensor]]) -> None:
        """``weights``: returns always the same tensors in the same order (of DTensors this rank's part counts)."""
        self._weights = weights
        self._reference: Tensor | None = None
        self._places: list[object] | None = None  # where the weights lay when ``_strides`` were looked up
        self._strides: list[tuple[torch.Size, tuple[int, ...], int]] = []  # of samples; views would hold old weights

    def take(self) -> None:
        """Sample the weights, as the values to compare with."""
        self._reference = self._samples()

    def forget(self) -> None:
        """Forget the samples, until the next ``take``."""
        self._reference = None

    def differs(self) -> bool:
        """Has any sample changed since ``take``? Waits for the device."""
        return bool(self._differing(self._samples()).any())

    def replaced(self, *, some: bool) -> Literal["", "some", "most"]:
        """Say whether samples of "most" weights have changed, or of "some" by half of their norm. Waits for the device.

        A weight decay of the user's own (in fp32) counts as no change, a projection changes a weight by less, and a way
        to other weights and back (ScheduleFree's eval and train, in fp32) by some roundings. ``some``: is that asked?
        """
        actual, expected = self._samples(), self._reference
        differing = self._differing(actual)
        if expected is None or not bool(differing.any()):
            return ""
        changes = torch.where(differing, actual - expected, 0).cpu().float()
        sizes = [min(SAMPLES, local(weight).numel()) for weight in self._weights()]
        both = zip(expected.cpu().float().nan_to_num().split(sizes), changes.split(sizes), strict=True)
        pairs = [(old, by) for old, by in both if len(old)]
        moved = [(old, by) for old, by in pairs if not _is_decay(old, by)]
        if len(moved) > 0.5 * len(pairs):
            return "most"
        return "some" if some and any(2 * by.norm() > old.norm() for old, by in moved) else ""

    def _differing(self, actual: Tensor) -> Tensor:
        """Compare with ``take``: (samples,) bool, empty if nothing was taken or the weights have moved."""
        expected = self._reference
        if expected is None:
            return torch.zeros(0, dtype=torch.bool, device="cpu")
        if actual.shape != expected.shape or actual.device != expected.device:  # moved: no new value
            return torch.zeros(0, dtype=torch.bool, device="cpu")
        return (actual != expected) & ~(actual.isnan() & expected.isnan())

    def _samples(self) -> Tensor:
        weights = [local(weight) for weight in self._weights()]
        if not weights:
            return torch.zeros(0, dtype=torch.float32, device="cpu")
        places: list[object] = [
            (weight.data_ptr(), weight.shape, weight.stride(), weight.storage_offset()) for weight in weights
        ]
        if places == self._places:
            with torch.no_grad():
                views = zip(weights, self._strides, strict=True)
                return torch.cat([weight.as_strided(*strides) for weight, strides in views])
        samples = [_samples_of(weight.detach()) for weight in weights]
        are_views = all(map(_share_storage, weights, samples))
        self._places = places if are_views else None
        self._strides = [(of.size(), of.stride(), int(of.storage_offset())) for of in samples]
        return torch.cat(samples)


def _is_decay(old: Tensor, by: Tensor) -> bool:
    """Do all values shrink by one factor, a tenth at most, or not at all, up to fp32's roundings? NaN: no."""
    factor = (old @ by / (old @ old)).clamp(-0.1, 0).nan_to_num()
    return bool((by - factor * old).abs().max() <= ROUNDINGS * old.abs().max())


class WeightWatch:
    """Notices that weights changed between two steps while something waits for them.

    An lr finder, or a return to better weights, restores model and optimizer, but not what waits, which belongs to the
    replaced weights and would move the restored ones. If both were restored, what waits is dropped. If weights alone
    changed, they may be averaged ones to go on with, or a layer that begins anew: one warning says what to call.
    """

    def __init__(self, method: str, weights: Sequence[Tensor], drop_waiting: Callable[[], None]) -> None:
        """``method``: its name. ``weights``: those for which something may wait."""
        self._method, self._weights, self._drop_waiting = method, weights, drop_waiting
        self._fingerprint = Fingerprint(lambda: weights)
        self._version = -1
        self._optimizer_loaded = False
        self._warned = False

    def trust(self) -> None:
        """Trust the weights of the next step, whatever they are: the user has said that they changed."""
        self._optimizer_loaded = False
        self._fingerprint.forget()

    def optimizer_was_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that ``optimizer.load_state_dict()`` has been called."""
        self._optimizer_loaded = True

    def step_is_over(self) -> None:
        """Sample the weights as the step has left them."""
        self._optimizer_loaded = False
        self._fingerprint.take()
        self._version = count_writes(self._weights)

    def look(self, *, alone: bool) -> None:
        """Check whether weights changed since the last step. ``alone``: drop nothing, since ranks could differ."""
        if not self._weights:
            return
        loaded, self._optimizer_loaded = self._optimizer_loaded, False
        # The comparison waits for a GPU, so there it happens only if torch has counted a change.
        on_gpu = any(devices.streams(weight.device) is not None for weight in self._weights[:1])
        if on_gpu and count_writes(self._weights) == self._version:
            return
        if not (share := self._fingerprint.replaced(some=not self._warned)):
            return
        self._fingerprint.forget()
        text = (
            f"{self._method}: {share} weights were replaced since the last step"
            f"{', and the optimizer got another state' * loaded}; the method's unsent values belong to the former ones"
        )
        if loaded and share == "most" and not alone:
            self._drop_waiting()
            text += (
                ": they were dropped. To keep them, call wire.load_state_dict() with the state that belongs to the "
                "new weights"
            )
        elif self._warned:
            return
        else:
            self._warned = True
            text += ": if you restored or drew weights, call wire.reset() or wire.load_state_dict() after that"
        warnings.warn(text, ThinwireWarning, stacklevel=2)


def count_writes(weights: Iterable[Tensor]) -> int:
    """Count the writes in place to ``weights`` since they were made, as torch does."""
    return sum(weight._version + local(weight)._version for weight in weights)


def _share_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _samples_of(weight: Tensor) -> Tensor:
    """Take up to ``SAMPLES`` values at equal distances in memory; a view if the weight has no gaps."""
    order = sorted(range(weight.dim()), key=weight.stride, reverse=True)
    flat = weight.permute(order).reshape(-1)
    return flat[:: max(flat.numel() // SAMPLES, 1)][:SAMPLES]

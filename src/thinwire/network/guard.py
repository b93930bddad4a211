"""The guard against non-finite values: one flag that all ranks agree on before any state changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thinwire.network.comm import Comm, local


class Guard:
    """Collects, over one step, whether any gradient on any rank was not finite.

    ``observe`` reads each buffer once (a norm: no allocation of its size, no host sync) *before* a method sees it,
    since a mask or a quantizer can hide a NaN; and the mean's norm, or the means themselves, *after*, since a sum can
    overflow. ``agree`` makes one flag of all ranks' flags; it is the step's only host sync of ours.
    """

    def __init__(self, comms: Sequence[Comm], enabled: bool = True) -> None:
        self.comms, self.enabled = comms, enabled
        self._residues: list[Tensor] = []

    def observe(self, values: Tensor) -> None:
        """Note whether ``values`` (any shape) are finite, by their norm.

        A norm of finite values that overflows counts as not finite: no optimizer survives such a gradient, nor does
        what a method keeps of it.
        """
        if not self.enabled or values.numel() == 0:
            return
        total = torch.linalg.vector_norm(values, dtype=_wide([values])).float()
        # inf - inf is NaN and NaN stays NaN: the sum of all (x - x) is 0 while everything is finite, NaN else. They are
        # added up in the end, because what observes may be on different streams, of which none waits for another.
        self._residues.append(total - total)

    def forget(self) -> None:
        """Drop what was observed: the step that it belongs to was never taken."""
        self._residues.clear()

    def observe_all(self, gradients: Iterable[Tensor | None]) -> None:
        """Observe the averaged ``gradients``, which may have overflowed on the way, or never came by (one rank alone).

        By their norms, as clipping does: a gradient whose square is infinite stops Adam's second moment for good.
        """
        present = [local(gradient) for gradient in gradients if gradient is not None]
        if self.enabled and present:
            norms = torch._foreach_norm(present, dtype=_wide(present))
            self.observe(torch.stack([norm.float() for norm in norms]))

    def agree(
        self, device: torch.device, trouble: bool = False, comms: Sequence[Comm] | None = None
    ) -> tuple[bool, bool]:
        """Was every value observed on every rank finite; is any rank in ``trouble``?

        Collective over ``comms`` (None: all of its own); forgets what was observed. One host sync. Switched off, it
        knows of this rank alone.
        """
        if not self.enabled:
            return True, trouble
        residues = self._residues or [torch.zeros((), dtype=torch.float32, device=device)]
        flag = torch.stack(residues).sum().isnan().float().reshape(1)
        if trouble:  # in which case nobody asks for the rest
            flag.fill_(2.0)
        for comm in self.comms if comms is None else comms:
            comm.all_reduce(flag, "max")
        verdict = flag.item()
        self.forget()  # once the device has read them
        return verdict == 0, verdict == 2


def _wide(values: Sequence[Tensor]) -> torch.dtype | None:
    """Choose the dtype of a norm: float16 has no room for one."""
    return torch.float32 if any(tensor.dtype == torch.float16 for tensor in values) else None

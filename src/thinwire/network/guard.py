"""The guard against non-finite values: one flag that all ranks agree on before any state changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.network.comm import Comm, local


class Guard:
    """Collects, over one step, whether any gradient on any rank was not finite.

    ``observe`` reads a norm: no allocation of the values' size, no host sync. Once over the mean, or its norm, as a sum
    can overflow, and codecs let through what is not finite. And where a mask could hide that, or a state keep it, over
    each buffer *before* the method sees it. ``agree`` combines all ranks' flags; it is Thinwire's only host sync
    in a step.
    """

    def __init__(self, comms: Sequence[Comm], enabled: bool = True) -> None:
        self.comms, self.enabled = comms, enabled
        self._residues: list[Tensor] = []

    def observe(self, values: Tensor) -> None:
        """Note whether ``values`` (any shape) are finite, by their norm.

        A norm of finite values that overflows counts as not finite: neither an optimizer nor a method's state survives
        such a gradient.
        """
        if not self.enabled or values.numel() == 0:
            return
        total = torch.linalg.vector_norm(values, dtype=_wide([values])).float()
        # inf - inf is NaN and NaN stays NaN: the sum of all (x - x) is 0 while everything is finite, NaN else. It
        # is left to ``agree``, because observations may be on different streams, of which none waits for another.
        self._residues.append(total - total)

    def note(self, residues: Tensor) -> None:
        """Note the ``residues`` of values that were observed elsewhere: 0, or NaN where they are not finite."""
        if self.enabled:
            self._residues.append(residues)

    def forget(self) -> None:
        """Drop all observations."""
        self._residues.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keep what was observed so far out of agreements inside, for those after it."""
        residues, self._residues = self._residues, []
        try:
            yield
        finally:
            self._residues = residues

    def observe_all(self, gradients: Iterable[Tensor | None]) -> None:
        """Observe the averaged ``gradients``, which may have overflowed, or were never exchanged (one rank alone).

        It takes their norms, as clipping does: a gradient whose square is infinite stops Adam's second moment for good.
        """
        present = [local(gradient) for gradient in gradients if gradient is not None]
        if self.enabled and present:
            norms = torch._foreach_norm(present, dtype=_wide(present))
            joined = torch.stack([norm if norm.dtype == torch.float32 else norm.float() for norm in norms])
            self.note(joined - joined)

    def agree(
        self, device: torch.device, trouble: bool = False, comms: Sequence[Comm] | None = None
    ) -> tuple[bool, bool]:
        """Return whether all values observed on all ranks were finite, and whether any rank is in ``trouble``.

        Collective over ``comms`` (None: ``self.comms``), with one host sync. Forgets all observations. If not
        ``enabled``, it returns True and this rank's own ``trouble``.
        """
        if not self.enabled:
            return True, trouble
        residues = self._residues or [torch.zeros((), dtype=torch.float32, device=device)]
        total = torch.cat([residue.reshape(-1) for residue in residues]).sum().reshape(1)
        flag = total.ne_(total)  # NaN alone differs from itself
        if trouble:  # finite or not no longer matters
            flag.fill_(2.0)
        for comm in self.comms if comms is None else comms:
            comm.all_reduce(flag, "max")
        verdict = flag.item()
        self.forget()  # once the device has read them
        return verdict == 0, verdict == 2


def _wide(values: Sequence[Tensor]) -> torch.dtype | None:
    """Choose the dtype of a norm, which would overflow in float16."""
    return torch.float32 if any(tensor.dtype == torch.float16 for tensor in values) else None

"""DeMo: the fast components of a momentum that every rank keeps for itself (Peng et al., arXiv 2411.19870).

Alg. 1 on rank n, for each tensor, with m_n = 0 at first:

    m_n = beta m_n + g_n                    the rank's own gradient
    q_n = the k largest coefficients of the DCT of each chunk of m_n
    m_n = m_n - IDCT(q_n)
    Q   = IDCT(mean over n of q_n)          all-gathered; with weights sharded, at the owner of each row
    w   = w - lr sign(Q), or w - lr Q

Ours subtracts q_n as its peers decode it, so that what the wire rounds off stays in m_n. It differs from the paper in
its chunks, which there are s x s tiles of a matrix: here a chunk is 4096 = 64 x 64 consecutive values of the flattened
tensor (with FSDP2, of a rank's shard of it), whatever the tensor's shape, and a last chunk that is not full is filled
up with zeros. The mean is over all N ranks (the authors' code: over those that sent the position), and m_n takes up
g_n (their code: lr g_n, which differs where lr changes).

A tensor that stays dense is DeMo too, with k = chunk: all of m_n is sent, none of it stays, Q = mean of g_n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from thinwire.bucket import Bucket
from thinwire.codecs.base import Codec, Residual
from thinwire.codecs.dct import DctTopK
from thinwire.collectives import Exchange
from thinwire.comm import local
from thinwire.methods.base import Delay, ErrorFeedback, Promise, Run, Step, refuse_scaled_apart

PAYLOADS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class DeMo(ErrorFeedback):
    """Each rank's momentum: per chunk its k largest DCT coefficients, all-gathered, for SGD (arXiv 2411.19870, Alg. 1).

    What the optimizer receives is a momentum already: take ``torch.optim.SGD`` without one. An optimizer with moments
    of its own (AdamW) counts it twice.

    Args:
        beta: decay of the momentum, 0 to below 1; higher => what was not sent waits longer.
        k: coefficients sent per chunk, 1 to ``chunk``; higher => more bytes, less waits.
        chunk: values per chunk, a multiple of 64 up to 32768; larger => fewer bytes. A tensor (or a shard of it) is
            padded to a multiple.
        sign: the optimizer receives sign(Q), of tensors that stay dense too: every weight moves by lr, so take the
            learning rate of a sign method. Clipping comes before, and does nothing. False: Q itself.
        payload: dtype of the coefficients: "fp32", or "bf16" (two thirds of the bytes; the rounding waits).
    """

    name: ClassVar[str] = "demo"
    gathers: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False
    delay: ClassVar[Delay | None] = Delay(steps=144)
    OPTIMIZER: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.SGD
    ABSENT: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("feedback", "beta1", "factored", "direction", "portion"), "a momentum waits: topk has it"
    )
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"smallest": 0, "send": ("*",)}}

    beta: float = 0.999
    k: int = 32
    chunk: int = 4096
    sign: bool = True
    payload: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.must(0 <= self.beta < 1, "beta", "is the decay of the momentum, from 0 to below 1")

    @property
    def promise(self) -> Promise:
        what = f"a share of {1 - self.beta:.3g} of what waits is dropped every step"
        what += ", and the optimizer sees signs only" if self.sign else ""
        return Promise("lossy", what, {"momentum": self.beta})

    def begin(self, run: Run) -> None:
        super().begin(run)
        if self.sign:
            refuse_scaled_apart(self.name, run)

    def make_codec(self) -> Codec:
        return DctTopK(self.chunk, self.k, PAYLOADS[self.payload])

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        bucket.rows.add_(self.state.read("momentum", bucket), alpha=self.beta)  # m_n = beta m_n + g_n
        rest = self.state.write("momentum", bucket)
        exchange.mean(bucket, self.codec, residual=Residual(None, rest))  # q_n, Q; rest = m_n - IDCT(q_n)
        bucket.clear_padding(rest)  # nobody reads it: no coefficients for its errors, and saved states do not hold it

    def before_step(self, step: Step) -> None:
        """The sign is taken here, as late as can be: a vector of signs would be clipped to almost nothing."""
        if self.sign:
            for weight in step.weights.values():
                if weight.grad is not None:
                    local(weight.grad).sign_()

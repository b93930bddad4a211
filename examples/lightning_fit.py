"""Lightning with a strategy.  OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/lightning_fit.py [METHOD]

The text is Python's own argparse.py, byte by byte. Needs the extra ``lightning``.
"""

import argparse
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from thinwire.adapters.lightning import ThinwireStrategy

CONTEXT, STEPS = 16, 40
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
WINDOWS = TEXT.unfold(0, CONTEXT + 1, 3)


class NextByte(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(256, 64), nn.Flatten(), nn.Linear(64 * CONTEXT, 512), nn.GELU(), nn.Linear(512, 256)
        )

    def training_step(self, window: torch.Tensor, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(window[:, :-1]), window[:, -1])
        if (index + 1) % 10 == 0:
            self.print(f"step {index + 1}: loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(method: str = "int8") -> None:
    pl.seed_everything(0, verbose=False)
    strategy = ThinwireStrategy(method)
    trainer = pl.Trainer(
        accelerator="auto" if torch.cuda.device_count() > 1 else "cpu", devices=2, strategy=strategy, max_steps=STEPS,
        gradient_clip_val=1.0, default_root_dir="runs/lightning", logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(NextByte(), DataLoader(WINDOWS, batch_size=128, shuffle=True))
    if trainer.is_global_zero and strategy.wire is not None:
        print(strategy.wire.report())


if __name__ == "__main__":
    main(*sys.argv[1:])

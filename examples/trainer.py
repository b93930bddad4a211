"""The Hugging Face Trainer.  OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/trainer.py [METHOD]

One line is Thinwire's. It trains a small GPT-2 on the bytes of Python's own argparse.py. If there is a checkpoint in
runs/trainer, it resumes from the last one. Needs the extra ``hf``.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from thinwire.adapters.transformers import attach

BLOCK, OUT = 64, "runs/trainer"
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
BLOCKS = TEXT[: len(TEXT) // BLOCK * BLOCK].view(-1, BLOCK)


def main(method: str = "int8") -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=256, n_positions=BLOCK, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ))  # fmt: skip
    trainer = Trainer(
        model,
        TrainingArguments(
            OUT, max_steps=40, per_device_train_batch_size=8, learning_rate=2e-3, lr_scheduler_type="cosine",
            bf16=True, logging_steps=10, save_steps=20, save_total_limit=1, report_to=[], disable_tqdm=True,
            use_cpu=torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]),
        ),
        train_dataset=[{"input_ids": block, "labels": block} for block in BLOCKS],
    )  # fmt: skip
    thin = attach(trainer, method)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(OUT) if Path(OUT).exists() else None)
    if trainer.is_world_process_zero() and thin.wire is not None:
        print(thin.wire.report())


if __name__ == "__main__":
    main(*sys.argv[1:])

"""TRL's trainers, which are the Trainer of transformers with steps of their own."""

from __future__ import annotations

import math
from typing import Any

import torch

import ranks
from frameworks import (
    SAVED,
    STEPS,
    Sequences,
    Trained,
    check,
    fixed_gpt2,
    gpt2,
    launched,
    needs,
    resumed,
    untrained_gpt2,
    whole,
)  # fmt: skip

SETTINGS = dict(
    learning_rate=3e-3, max_grad_norm=0.5, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=5, seed=3,
    bf16=False,
)  # fmt: skip


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w63", unk_token="w0")


def _sft(rank: int, world: int, folder: str, second: bool) -> dict[str, Any]:
    launched(rank, world)
    import transformers
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    from thinwire.adapters.transformers import attach

    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    rows = [Sequences()[index]["input_ids"].tolist() for index in range(len(Sequences()))]

    def train(method: str | None, folder: str, save: bool, resume: bool) -> Trained:
        arguments = SFTConfig(
            folder, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            save_strategy="steps" if save else "no", save_steps=SAVED, dataset_kwargs={"skip_prepare_dataset": True},
            gradient_checkpointing=False, **SETTINGS,
        )  # fmt: skip
        trainer = SFTTrainer(gpt2(), arguments, train_dataset=Dataset.from_dict({"input_ids": rows}),
                             processing_class=tokenizer())  # fmt: skip
        if method is None:
            trainer.accelerator.ddp_handler.find_unused_parameters = False
        thin = method and attach(trainer, method)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
        if thin:
            thin.wire.close()
        return trainer.model, thin and thin.wire

    return resumed("trl", train, folder) if second else whole("trl", train, folder, fixed_gpt2)


@needs("trl", "datasets")
def test_sft(tmp_path):
    check(_sft, tmp_path, *ranks.run(untrained_gpt2, 1, warm="warm_frameworks"))


def odd(model: Any) -> torch.Tensor:
    """The probability of an odd word after a prompt, which GRPO lowers."""
    prompts = torch.tensor([[i % 60, i % 7] for i in range(32)])
    with torch.no_grad():
        return model.eval()(input_ids=prompts).logits[:, -1].softmax(-1)[:, 1::2].sum(-1).mean()


def _grpo(rank: int, world: int, folder: str, second: bool) -> dict[str, Any]:
    launched(rank, world)
    import transformers
    from datasets import Dataset, disable_progress_bars
    from trl import GRPOConfig, GRPOTrainer

    from thinwire.adapters.transformers import ThinwireCallback

    transformers.logging.set_verbosity_error()
    disable_progress_bars()

    def evens(completions: list[str], **kwargs: Any) -> list[float]:
        """Reward words with an even number."""
        return [float(sum(int(word[1:]) % 2 == 0 for word in text.split())) for text in completions]

    def train(method: str | None, folder: str, save: bool, resume: bool) -> Trained:
        arguments = GRPOConfig(
            folder, max_steps=STEPS, per_device_train_batch_size=8, num_generations=8, max_completion_length=6,
            save_strategy="steps" if save else "no", save_steps=SAVED, gradient_checkpointing=False, **SETTINGS,
        )  # fmt: skip
        prompts = Dataset.from_dict({"prompt": [f"w{i % 60} w{i % 7}" for i in range(64)]})
        trainer = GRPOTrainer(
            gpt2(), evens, arguments, train_dataset=prompts, processing_class=tokenizer(),
            callbacks=[ThinwireCallback(method)] if method else [],
        )  # fmt: skip
        if method is None:
            trainer.accelerator.ddp_handler.find_unused_parameters = False
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
        wire = trainer.callback_handler.callbacks[0].wire if method else None
        if wire is not None:
            wire.close()
        return trainer.model, wire

    if second:
        return resumed("trl-grpo", train, folder)
    return {**whole("trl-grpo", train, folder, odd), "start": odd(gpt2()).item()}


@needs("trl", "datasets")
def test_grpo(tmp_path):
    check(_grpo, tmp_path, math.nan)

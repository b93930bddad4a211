"""What a training run is made of: the ranks that meet, the wrapped model, its optimizer, and the text's windows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from thinwire.base.elastic import init_process_group
from thinwire.base.errors import LostRank, ThinwireError
from thinwire.core.exchange import AllReduce
from thinwire.core.names import describe
from thinwire.methods import resolve
from thinwire.network.comm import CountingComm, GroupComm
from thinwire.network.ledger import Ledger
from thinwire.optim import AdamS
from thinwire.plan.plan import plan_of
from thinwire.train import instructions, pretrained, tokens
from thinwire.train.config import Config
from thinwire.train.data import Tokenizer, Windows, read_corpus, spans, split, tokenizer_file
from thinwire.train.folder import Folder


@dataclass(frozen=True)
class Ranks:
    """This rank's place: ``comm`` reaches all of them (its bytes are not the method's and are not counted as such)."""

    comm: GroupComm
    local: int
    per_node: int
    device: torch.device

    @property
    def nodes(self) -> int:
        return -(-self.comm.size // self.per_node)


@contextlib.contextmanager
def joined(config: Config) -> Iterator[Ranks]:
    """Join the other ranks, as torchrun's environment says; part from them at the end."""
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ThinwireError("--device cuda: torch sees no CUDA device here; use --device cpu")
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=config.timeout))
        assert dist.group.WORLD is not None
        comm = GroupComm(dist.group.WORLD, Ledger(), device=device)
        # A rank with nothing to do would leave before the others have reached it.
        comm.all_reduce(torch.zeros(1, device=device))
    except (RuntimeError, ValueError) as error:
        raise ThinwireError(
            f"rank {rank} could not reach the other {int(os.environ['WORLD_SIZE']) - 1} ranks at {where} within "
            f"{config.timeout:g} s ({type(error).__name__}): are all of them started, and is the address right?"
        ) from None
    lost = False
    try:
        yield Ranks(comm, local, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), device)
    except (LostRank, RuntimeError):
        lost = True  # without one of its ranks, taking a group down may wait as long as its collectives did
        raise
    finally:
        if not lost:
            dist.destroy_process_group()


def wrap(model: nn.Module, config: Config, ranks: Ranks, bf16: bool) -> Any:
    """The model under torch's engine for data parallelism."""
    if config.engine == "ddp":
        return DistributedDataParallel(
            model, device_ids=[ranks.device] if ranks.device.type == "cuda" else None, gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb(model, config, ranks),
        )  # fmt: skip
    size = ranks.comm.size
    if config.engine == "fsdp2":
        mesh = init_device_mesh(ranks.device.type, (size,))
    else:
        shard = config.shard_size or ranks.per_node
        if size % shard:
            raise ThinwireError(f"--shard-size {shard} does not divide {size} ranks")
        mesh = init_device_mesh(ranks.device.type, (size // shard, shard), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
    )
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=config.reshard, mp_policy=policy)
    return fully_shard(model, mesh=mesh, reshard_after_forward=config.reshard, mp_policy=policy)


def bucket_mb(model: nn.Module, config: Config, ranks: Ranks) -> float | None:
    """Of DDP's buckets: as the config says, else as suits the method; None: as torch has it."""
    method = resolve(config.method)
    if config.bucket_mb is not None or method.card.native:
        return config.bucket_mb
    exchange = AllReduce(CountingComm.like(ranks.comm, Ledger()))
    return plan_of(method, describe(model).values(), exchange).bucket_cap_mb


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """As the config names it; weight decay on tensors of two or more dimensions only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if config.stepper == "sgd":
        return torch.optim.SGD(groups, lr=config.top_lr)
    kind = AdamS if config.stepper == "adams" else torch.optim.AdamW
    return kind(groups, lr=config.top_lr, betas=config.betas)


def text_windows(
    config: Config, folder: Folder, vocabulary: int | None = None
) -> tuple[Tokenizer, Windows, Windows]:  # fmt: skip
    """The tokenizer, and the windows to train on and to evaluate on. ``vocabulary``: of a model with a tokenizer."""
    together = folder.together
    if vocabulary is not None:
        folder.by_first(lambda: pretrained.keep(config, folder.path))
        return together.do(lambda: _windows_of_a_pretrained(config, folder, vocabulary))
    files = together.do(lambda: tokens.find(config.corpus, config.valid, config.tokenizer))
    if files is not None:
        folder.by_first(lambda: tokens.keep_tokenizer(files, folder.path))
        train_windows = Windows(files.train, config.sequence, config.seed)
        loaded = together.do(lambda: Tokenizer(files.tokenizer, (), folder.path, trains=False))
        return loaded, train_windows, Windows(files.valid, config.sequence)

    def tokenizer(trains: bool) -> Tokenizer:
        return Tokenizer(config.tokenizer, spans([train_text]), folder.path, trains=trains, anew=config.overwrite)

    train_text, valid_text = together.do(lambda: _texts(config))
    together.do(lambda: tokenizer(True) if together.rank == 0 else None)
    if kept := tokenizer_file(config.tokenizer, folder.path):
        together.copy(0, kept, kept if folder.first and together.rank else None)

    return together.do(lambda: _windows(config, tokenizer(False), train_text, valid_text))


def _texts(config: Config) -> tuple[str, str]:
    """To train on, and to evaluate on."""
    text = read_corpus(config.corpus)
    return (text, read_corpus(config.valid)) if config.valid else split(text)


def _windows(config: Config, tokenizer: Tokenizer, train: str, valid: str) -> tuple[Tokenizer, Windows, Windows]:
    windows = Windows(tokenizer.encode(train), config.sequence, config.seed)
    return tokenizer, windows, Windows(tokenizer.encode(valid), config.sequence)


def _windows_of_a_pretrained(config: Config, folder: Folder, vocabulary: int) -> tuple[Tokenizer, Windows, Windows]:
    """With the tokenizer of --init."""
    kept = folder.path / pretrained.KEPT
    tokenizer = Tokenizer(f"folder:{config.init}", (), kept, trains=False)
    if tokenizer.vocabulary > vocabulary:
        theirs = tokenizer.vocabulary
        raise ThinwireError(f"--init {config.init}: its tokenizer has {theirs} tokens, its model {vocabulary}")
    if config.data:
        found = instructions.read(
            config.data, config.valid, pretrained.tokenizer_of(kept), config.sequence, config.seed,
            tell=folder.together.rank == 0,
        )  # fmt: skip
        return tokenizer, *found
    files = tokens.find(config.corpus, config.valid, config.tokenizer, model=(tokenizer, vocabulary))
    if files is not None:
        return tokenizer, Windows(files.train, config.sequence, config.seed), Windows(files.valid, config.sequence)
    return _windows(config, tokenizer, *_texts(config))

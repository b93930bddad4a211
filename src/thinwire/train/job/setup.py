"""Setup of a training run: its ranks, the text's windows, the wrapped model and its optimizer."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer as HubTokenizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from thinwire.base.elastic import find_store
from thinwire.base.errors import LostRank, ThinwireError, ThinwireWarning
from thinwire.base.terminal import counted
from thinwire.core.exchange import AllReduce
from thinwire.core.names import describe
from thinwire.methods import resolve
from thinwire.network.comm import CountingComm, GroupComm, is_of_the_network, network_words
from thinwire.network.ledger import Ledger
from thinwire.optim import AdamS
from thinwire.plan.plan import plan_of
from thinwire.train.config import Config
from thinwire.train.data.corpus import check_apart, read_corpus, spans, split
from thinwire.train.data.instruction_rows import read_rows
from thinwire.train.data.token_files import find_token_files
from thinwire.train.data.tokenizer import Tokenizer, is_kept
from thinwire.train.data.windows import Windows
from thinwire.train.job.collective import Collective
from thinwire.train.model import pretrained
from thinwire.train.model.pretrained import Pretrained


@dataclass(frozen=True)
class Ranks:
    """This rank's place among all. ``comm`` reaches all ranks; its bytes are not counted as the method's."""

    comm: GroupComm
    per_node: int
    device: torch.device

    @property
    def nodes(self) -> int:
        return -(-self.comm.size // self.per_node)

    def computes_in_bf16(self, config: Config) -> bool:
        return config.dtype == "bf16" or (config.dtype == "auto" and self.device.type == "cuda")


@contextlib.contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the other ranks, as torchrun's environment variables say, and leave them at the end of the block.

    Raises:
        ThinwireError: another rank cannot be reached, or torch's own collectives say that one is lost.
    """
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ThinwireError("--device cuda: torch sees no CUDA device here; use --device cpu")
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads)
    try:
        timeout = timedelta(seconds=config.timeout)
        store, rank, size = find_store(timeout)
        backend = f"cpu:gloo,cuda:{_gpu_backend(device, store, rank, size)}" if cuda else "gloo"
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
        assert dist.group.WORLD is not None
        comm = GroupComm(dist.group.WORLD, Ledger(), device=device)
        # Without this, a rank with nothing to do would leave before the others have reached it.
        comm.all_reduce(torch.zeros(1, dtype=torch.float32, device=device))
    except (RuntimeError, ValueError) as error:
        others = "rank" if os.environ["WORLD_SIZE"] == "2" else f"{int(os.environ['WORLD_SIZE']) - 1} ranks"
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ThinwireError(
            f"rank {os.environ['RANK']} could not reach the other {others} at {address} within {config.timeout:g} s "
            f"({type(error).__name__}): are all ranks started, and is the address right?"
        ) from None
    lost = False
    try:
        yield Ranks(comm, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), device)
    except (LostRank, RuntimeError) as error:
        lost = True  # destroying a group that lacks a rank may wait as long as its collectives did
        if isinstance(error, LostRank) or config.elastic or not is_of_the_network(error):
            raise
        raise ThinwireError(f"rank {os.environ['RANK']} lost another rank: {network_words(error)}") from None
    finally:
        if not lost:
            dist.destroy_process_group()


def _gpu_backend(device: torch.device, store: dist.Store, rank: int, size: int) -> str:
    """Name the backend of a GPU's tensors: ranks that share one, which NCCL refuses, talk by gloo. Collective."""
    store.set(f"gpu/{rank}", str(torch.cuda.get_device_properties(device).uuid))
    if rank == 0:
        gpus = {store.get(f"gpu/{peer}") for peer in range(size)}
        store.set("gpu", "nccl" if len(gpus) == size else "gloo")
        if len(gpus) < size:
            line = f"{size} ranks share {counted(len(gpus), 'GPU')}: they talk by gloo, through the host"
            warnings.warn(line, ThinwireWarning, stacklevel=2)
    return store.get("gpu").decode()


def wrap(model: nn.Module, config: Config, ranks: Ranks, *, alike: bool = False) -> Any:
    """Wrap the model in torch's engine for data parallelism. ``alike``: ranks have the same weights, none are sent."""
    if config.engine == "ddp":
        method, bucket_mb = resolve(config.method), config.bucket_mb
        if bucket_mb is None and not method.card.native:  # as suits the method; a native one takes torch's default
            exchange = AllReduce(CountingComm.like(ranks.comm, Ledger()))
            bucket_mb = plan_of(method, describe(model).values(), exchange).bucket_cap_mb
        return DistributedDataParallel(
            model, device_ids=[ranks.device] if ranks.device.type == "cuda" else None, gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb, init_sync=not alike,
        )  # fmt: skip
    size = ranks.comm.size
    if config.engine == "fsdp2":
        mesh = init_device_mesh(ranks.device.type, (size,))
    else:
        shard = config.check_shards(size, ranks.per_node)
        mesh = init_device_mesh(ranks.device.type, (size // shard, shard), mesh_dim_names=("replicate", "shard"))
    computed = torch.bfloat16 if ranks.computes_in_bf16(config) else None
    policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=config.reshard, mp_policy=policy)
    return fully_shard(model, mesh=mesh, reshard_after_forward=config.reshard, mp_policy=policy)


def rebuild_buckets(model: nn.Module, windows: Windows, config: Config, ranks: Ranks, cast: Callable) -> None:
    """Run a throw-away backward pass, so that DDP rebuilds its buckets before the first step.

    The order of a ring's sum depends on the buckets: otherwise a resumed dense run on more than two ranks would differ
    from an uninterrupted one in the last bits of its first step.
    """
    inputs, targets = windows.batch(0, config.batch_size)
    with cast():
        loss = model(inputs.to(ranks.device), targets.to(ranks.device))
    loss.backward()
    model.zero_grad(set_to_none=True)


def make_optimizers(model: nn.Module, config: Config) -> tuple[torch.optim.Optimizer, ...]:
    """Make the optimizer of ``config``: for "muon" two, Muon of the hidden matrices and AdamW of the rest.

    Raises:
        ThinwireError: the model has no hidden matrices.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.optimizer_name != "muon":
        return (_one_optimizer(parameters, config),)
    roles = describe(model)
    hidden = [weight for weight in parameters if weight.dim() == 2 and roles[id(weight)].role == "matrix"]
    if not hidden:
        raise ThinwireError("--optimizer muon: the model has no hidden matrices to train: use adamw")
    matrices = {id(weight) for weight in hidden}
    muon = torch.optim.Muon(hidden, lr=config.top_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
    for group in muon.param_groups:
        group["lr_share"] = 1.0 if config.muon_lr is None else config.muon_lr / config.top_lr
    return muon, _one_optimizer([weight for weight in parameters if id(weight) not in matrices], config)


def set_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of all groups to ``rate``, or to the group's ``lr_share`` of it."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_share", 1.0)


def _one_optimizer(parameters: Sequence[nn.Parameter], config: Config) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if config.optimizer_name == "sgd":
        return torch.optim.SGD(groups, lr=config.top_lr)
    kind = AdamS if config.optimizer_name == "adams" else torch.optim.AdamW
    return kind(groups, lr=config.top_lr, betas=config.betas)


@dataclass(frozen=True)
class Inputs:
    """A run's text, and the model of --init (None: one is made from scratch)."""

    pretrained: Pretrained | None
    tokenizer: Tokenizer
    train: Windows
    valid: Windows

    def hashes(self, collective: Collective) -> tuple[str | None, list[str]]:
        """Return a hash of the model of --init, if there is one, and hashes of the tokens of both texts. Collective.

        Raises:
            ThinwireError: a rank has other hashes than rank 0.
        """
        own_init = self.pretrained.digest if self.pretrained else None
        hashes = collective.gather(lambda: (own_init, [self.train.digest(), self.valid.digest()]))
        for rank, (init, texts) in enumerate(hashes):
            if init != hashes[0][0]:
                raise ThinwireError(f"rank {rank} has another model than rank 0: --init must be the same")
            if texts != hashes[0][1]:
                raise ThinwireError(f"rank {rank} reads another text than rank 0: --corpus, --valid must be the same")
        return hashes[0]

    def save(self, config: Config, path: Path) -> None:
        """Write to the run's folder what its checkpoints need beside the weights."""
        if config.init:
            pretrained.save_hub_files(config.init, path)
        else:
            self.tokenizer.save(path)


def read_inputs(config: Config, collective: Collective, earlier: Path | None) -> Inputs:
    """Read the model of --init, the tokenizer and the text; nothing is written, as the run may yet be refused.
    Collective.

    ``earlier``: the folder of a run with the same tokenizer, which need not be made again if it is there.
    """
    collective.do(lambda: check_apart(config.data or config.corpus, config.valid))
    if init := config.init:
        model = collective.do(lambda: pretrained.load(init, config.adapters, config.seed))
        if (length := config.seq_len) and length > model.context and not config.data:  # of which rows are cut
            raise ThinwireError(f"--seq-len {length} is longer than the {model.context} tokens that {init} is made for")
        text = collective.do(lambda: _read_pretrained_text(config, init, model, collective.rank == 0))
        return Inputs(model, *text)
    return Inputs(None, *_read_text(config, collective, earlier))


def _read_text(config: Config, collective: Collective, earlier: Path | None) -> tuple[Tokenizer, Windows, Windows]:
    """Read token files, or read text and let rank 0 make its tokenizer. Collective."""
    corpus = collective.do(lambda: find_token_files(config.corpus, config.valid, config.tokenizer))
    if corpus is not None:
        tokenizer = collective.do(lambda: Tokenizer(corpus.tokenizer, corpus.folder or ()))
        return tokenizer, *_windows(config, corpus.train, corpus.valid)

    train, valid = collective.do(lambda: _texts(config))
    tokenizer = _share_tokenizer(config.tokenizer, train, collective, earlier)
    return tokenizer, *collective.do(lambda: _windows(config, tokenizer.encode(train), tokenizer.encode(valid)))


def _share_tokenizer(name: str, train: str, collective: Collective, earlier: Path | None) -> Tokenizer:
    """Let rank 0 load or make the tokenizer, which may take minutes, and give it to the others. Collective."""
    source = earlier if earlier and is_kept(name, earlier) else spans([train])
    tokenizer = collective.do(lambda: Tokenizer(name, source) if collective.rank == 0 else None)
    text = collective.broadcast(tokenizer.text if tokenizer else "")
    return tokenizer or Tokenizer(name, HubTokenizer.from_str(text) if text else ())


def _read_pretrained_text(
    config: Config, init: str, model: Pretrained, warns: bool
) -> tuple[Tokenizer, Windows, Windows]:
    """Read instructions, token files or text, with the tokenizer of --init."""
    vocabulary = model.vocabulary
    hub = pretrained.load_tokenizer(Path(init))
    tokenizer = Tokenizer(f"folder:{init}", pretrained.fast_tokenizer(hub, init))
    if (size := tokenizer.vocabulary) > vocabulary:
        raise ThinwireError(f"--init {init}: its tokenizer has {size} tokens, its model {vocabulary}")
    length = min(config.sequence_length, model.context)
    if config.data:
        return tokenizer, *read_rows(config.data, config.valid, hub, length, config.seed, warns=warns)
    corpus = find_token_files(config.corpus, config.valid, config.tokenizer, model=(tokenizer, vocabulary))
    if corpus is not None:
        return tokenizer, *_windows(config, corpus.train, corpus.valid, length)
    train, valid = map(tokenizer.encode, _texts(config))
    return tokenizer, *_windows(config, train, valid, length)


def _texts(config: Config) -> tuple[str, str]:
    text = read_corpus(config.corpus)
    return (text, read_corpus(config.valid, held_out=True)) if config.valid else split(text)


def _windows(config: Config, train: Any, valid: Any, length: int = 0) -> tuple[Windows, Windows]:
    corpus, length = f"--corpus {config.text_name}", length or config.sequence_length
    held_out = " ".join(("--valid", *config.valid)) if config.valid else f"what is held out of {corpus} (name --valid)"
    return Windows(train, length, config.seed, corpus), Windows(valid, length, text=held_out)

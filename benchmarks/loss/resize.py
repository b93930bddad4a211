"""A run that goes on with other numbers of ranks, under each policy, beside one that stays on four.

    python benchmarks/loss/resize.py [--method METHOD] [--picture FILE]

A small network learns the next token of a chain, with DDP on gloo: 4 ranks, then 2, then 3, as long on each. The batch
of a step is the same on any number of ranks. Printed is the loss on tokens that are not trained on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import thinwire

POLICIES = ("redistribute", "flush", "reset")
STAGES = (4, 2, 3)
TOKENS, BATCH, EVERY = 64, 96, 2


def batch(step: int) -> tuple[Tensor, Tensor]:
    """(BATCH, 2) tokens and the ones that follow, of a chain in which one of four is likely."""
    table = torch.randint(TOKENS, (TOKENS * TOKENS, 4), generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1000 + step)
    given = torch.randint(TOKENS, (BATCH, 2), generator=draw)
    number = torch.multinomial(torch.tensor([0.7, 0.1, 0.1, 0.1]), BATCH, True, generator=draw)
    return given, table[given[:, 0] * 8 % TOKENS * TOKENS + given[:, 1], number]


def rank_of(
    rank: int, world: int, folder: str, source: str, target: str, method: str, policy: str | None, steps: range
) -> None:
    """One rank: from the files ``source`` (none: the beginning) to the files ``target``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{target}-{world}", rank=rank, world_size=world)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(TOKENS, 64), nn.Flatten(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, TOKENS))
    optimizer_state = None
    if source:
        saved = torch.load(f"{folder}/{source}.pt", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer_state = saved["optimizer"]
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    wire = thinwire.compress(model, optimizer, method)
    if source:
        optimizer.load_state_dict(optimizer_state)
        states: dict[str, Tensor] = {}
        for path in sorted(Path(folder).glob(f"{source}-rank-*.safetensors")):
            states |= load_file(path)
        wire.load_state_dict(states, resize=policy)
    losses, held_out = [], [batch(-1 - number) for number in range(4)]
    for step in steps:
        if step % EVERY == 0:
            with torch.no_grad():
                losses.append(sum(F.cross_entropy(net(x), y).item() for x, y in held_out) / len(held_out))
        given, following = (part[rank::world] for part in batch(step))
        with wire.accumulate():
            F.cross_entropy(model(given), following).backward()
        wire.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    save_file(wire.state_dict(), f"{folder}/{target}-rank-{rank}.safetensors")
    if rank == 0:
        saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
        torch.save(saved, f"{folder}/{target}.pt")
    dist.barrier()
    dist.destroy_process_group()


def stage(world: int, *args: object) -> list[float]:
    """All ranks of one stage; the losses."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=rank_of, args=(rank, world, *args)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed")
    return torch.load(f"{args[0]}/{args[2]}.pt", weights_only=True)["losses"]


def curves(method: str, length: int) -> dict[str, list[float]]:
    """By policy, and of the run that stays on four ranks: the loss every EVERY steps."""
    first, second, third = (range(i * length, (i + 1) * length) for i in range(3))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        begun = stage(STAGES[0], folder, "", "begun", method, None, first)
        rest = stage(STAGES[0], folder, "begun", "whole", method, "flush", range(length, 3 * length))
        found["4 ranks"] = begun + rest
        for policy in POLICIES:
            two = stage(STAGES[1], folder, "begun", f"{policy}-2", method, policy, second)
            three = stage(STAGES[2], folder, f"{policy}-2", f"{policy}-3", method, policy, third)
            found[policy] = begun + two + three
    return found


def draw(found: dict[str, list[float]], length: int, path: Path) -> None:
    """The curves, each with its name at its end, and where the number of ranks changes."""
    from matplotlib import pyplot

    from thinwire.lab import plots

    tints = {"4 ranks": plots.INK, "redistribute": "#0072B2", "flush": "#117733", "reset": "#D55E00"}
    lowest, highest = min(map(min, found.values())), max(map(max, found.values()))
    with pyplot.rc_context(plots.STYLE):
        figure, axes = pyplot.subplots(figsize=(8.5, 4.6))
        axes.set_ylim(lowest - 0.1, highest + 0.02)
        ends: list[float] = []
        for name, losses in sorted(found.items(), key=lambda item: item[1][-1]):
            steps = [EVERY * number for number in range(len(losses))]
            axes.plot(steps, losses, color=tints[name], linewidth=2)
            ends.append(max(losses[-1], ends[-1] + 0.045 if ends else 0))
            label = "stays on 4 ranks" if name == "4 ranks" else name
            axes.text(steps[-1] + 1.5, ends[-1], label, color=tints[name], va="center", fontweight="bold")
        for number, ranks in enumerate(STAGES):
            axes.axvline(number * length, color=plots.GRID, zorder=0)
            axes.text(number * length + 1, lowest - 0.08, f"{ranks} ranks", va="bottom", color=plots.GREY)
        axes.set_xlim(0, len(STAGES) * length - EVERY)
        axes.set(xlabel="optimizer step", ylabel="loss on held-out tokens (down is better)")
        plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="topk(feedback='gradients', density=0.01, smallest=1000)")
    parser.add_argument("--steps", type=int, default=40, help="on each number of ranks, even")
    parser.add_argument("--picture", type=Path, help="draw the curves to this file, an SVG")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = curves(options.method, options.steps)
    print(f"{options.method}, {options.steps} steps on {', '.join(map(str, STAGES))} ranks each; held-out loss")
    print(f"{'step':>6}" + "".join(f"{name:>14}" for name in found))
    near = {at + more for at in (0, options.steps, 2 * options.steps) for more in (-8, -2, 0, 2, 4, 8, 16, 40)}
    for i in range(len(found["4 ranks"])):
        if EVERY * i in near or i == len(found["4 ranks"]) - 1:
            print(f"{EVERY * i:>6}" + "".join(f"{losses[i]:>14.4f}" for losses in found.values()))
    if options.picture:
        draw(found, options.steps, options.picture)


if __name__ == "__main__":
    main()

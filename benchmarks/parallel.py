"""The time of one optimizer step with a layer split over CPU ranks: Shoal, and torch's DTensor.

    python benchmarks/parallel.py [--ranks 2] [--rounds 5] [--steps 5] [--only NAME,...]

All ranks take the same batch. The same model, AdamW and clipping for all (`contestants.py`), in interleaved
rounds (`rounds.py`); medians over rounds with their range. The parallel efficiency of n ranks is the time of
one rank alone, over n times that of the n. Exits with 1 if a contestant's losses are not those of one rank.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from contestants import ADAMW, CLIP, Task
from rounds import Ranks, Spread, Step, interleave
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm

import shoal
from shoal.collectives.bench import describe
from shoal.models import Transformer, next_token_loss, preset

_WARM_UP = 3  # steps
_TOLERANCE = 1e-3  # relative: the order of sums differs, and steps multiply what that makes
_ALONE = "one rank"


class UntiedTask(Task):
    """A Task whose model suits `parallelize_module`: an untied head, and no query heads that share a key."""

    def model(self) -> Transformer:
        """See `Task.model`."""
        shape = preset(self.preset)
        model = Transformer(shape.model_copy(update={"tie_embeddings": False, "kv_heads": shape.heads}))
        model.initialize(0)
        return model


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to make the step.

    Attributes:
        name: As the table has it.
        build: From the Task and the rank to the step.
        peer: The name of the contestant that it is compared with.
        alone: Whether it is one rank by itself.
    """

    name: str
    build: Callable[[Task, int], Step]
    peer: str | None = None
    alone: bool = False


def _loop(task: Task, forward: Callable[[Tensor, Tensor], Tensor], update: Callable[[], None]) -> Step:
    batches = task.batches(0)  # the same on all ranks

    def step() -> float:
        loss = forward(*next(batches))
        update()
        return loss.item()

    return step


def _plain(task: Task, rank: int) -> Step:
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        return loss

    return _loop(task, forward, partial(_update, model, optimizer))


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # `clip_grad_norm_` does not take plain tensors and DTensors at once.
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    kinds = [[each for each in gradients if isinstance(each, DTensor) == split] for split in (True, False)]
    norms: list[Any] = [get_total_norm(kind, foreach=False) for kind in kinds if kind]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
    scale = CLIP / torch.stack(whole).norm().item()
    if scale < 1.0:
        for gradient in gradients:
            gradient.mul_(scale)
    optimizer.step()
    optimizer.zero_grad()


def _shoal(plan: str, backend: str, task: Task, rank: int) -> Step:
    dist.init_process_group(backend)
    model = shoal.parallelize(task.model(), plan.format(ranks=dist.get_world_size()))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        inputs, targets = model.local_sequence(inputs), model.local_sequence(targets)
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        return loss.detach()

    def update() -> None:
        model.clip_gradients(CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return _loop(task, forward, update)


def _dtensor(sequence: bool, backend: str, task: Task, rank: int) -> Step:
    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = task.model()
    if sequence:
        outer: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
        entry = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        inner: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "feed_forward_norm": SequenceParallel(),
            "attention": entry,
            "feed_forward": entry,
            "attention.output": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    else:
        outer = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        inner = {"attention.output": RowwiseParallel(), "feed_forward.down": RowwiseParallel()}
    for layer in (
        "attention.query",
        "attention.key",
        "attention.value",
        "feed_forward.gate",
        "feed_forward.up",
    ):
        inner[layer] = ColwiseParallel()
    parallelize_module(model, mesh, outer)
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, "fused": False, "foreach": False})

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        return loss

    return _loop(task, forward, partial(_update, model, optimizer))


def _tp(tensor: str) -> Callable[[Task, int], Step]:
    return partial(_shoal, f"tp={{ranks}},tensor={tensor}", "shoal")


def _cp(context: str) -> Callable[[Task, int], Step]:
    return partial(_shoal, f"cp={{ranks}},context={context}", "shoal")


CONTESTANTS = (
    Contestant(_ALONE, _plain, alone=True),
    Contestant("DTensor, tp", partial(_dtensor, False, "gloo"), _ALONE),
    Contestant("shoal tensor=plain", _tp("plain"), "DTensor, tp"),
    Contestant("DTensor, tp and sequence", partial(_dtensor, True, "gloo"), _ALONE),
    Contestant("shoal tensor=sequence", _tp("sequence"), "DTensor, tp and sequence"),
    Contestant("shoal tensor=async", _tp("async"), "shoal tensor=sequence"),
    Contestant("DTensor, tp, over shoal", partial(_dtensor, False, "shoal"), "DTensor, tp"),
    Contestant("shoal context=ring", _cp("ring"), _ALONE),
    Contestant("shoal context=ulysses", _cp("ulysses"), "shoal context=ring"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    machine = describe()
    wanted = options.only.split(",") if options.only else [each.name for each in CONTESTANTS]
    chosen = [each for each in CONTESTANTS if each.name in wanted]
    running: dict[str, Ranks] = {}
    left_out: dict[str, str] = {}
    warm_ups = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        # One part of the batch: all of it is every rank's.
        task = UntiedTask(options.preset, options.sequence, options.batch, 1, Path(folder))
        for each in chosen:
            ranks = Ranks(partial(_build, each, task), 1 if each.alone else options.ranks)
            stack.callback(ranks.close)
            try:
                warm_ups[each.name] = ranks.run(_WARM_UP)
                running[each.name] = ranks
            except Exception as error:  # a peer that does not run here is named below the table
                left_out[each.name] = str(error).splitlines()[-1]
        bursts = interleave(running, options.rounds, options.steps, lambda text: print(text, file=sys.stderr))
    times = {name: [median(burst.seconds) for burst in turns] for name, turns in bursts.items()}
    header = ["", "step, ms", "range", "efficiency", "ratio", "range", "to", "peak RSS, MiB", "last loss"]
    lines = []
    fails = False
    for each in chosen:
        if each.name not in bursts:
            continue
        spread = Spread.of(times[each.name])
        loss = bursts[each.name][-1].losses[-1]
        alone = bursts.get(_ALONE)
        differs = alone is not None and abs(loss - alone[-1].losses[-1]) > _TOLERANCE * abs(loss)
        fails |= differs
        efficiency = ratio = spread_of = ""
        if _ALONE in times and not each.alone:
            efficiency = f"{median(times[_ALONE]) / median(times[each.name]) / options.ranks:.2f}"
        if each.peer in times:
            ratios = Spread.of([a / b for a, b in zip(times[each.name], times[each.peer], strict=True)])
            ratio, spread_of = f"{ratios.median:.3f}", f"{ratios.low:.3f} to {ratios.high:.3f}"
        lines.append(
            [
                each.name,
                f"{spread.median * 1e3:.1f}",
                f"{spread.low * 1e3:.1f} to {spread.high * 1e3:.1f}",
                efficiency,
                ratio,
                spread_of,
                each.peer or "" if ratio else "",
                f"{bursts[each.name][-1].peak_bytes / 2**20:.0f}",
                "DIFFERS" if differs else f"{loss:.4f}",
            ]
        )
    rule = ["---"] + ["---:"] * (len(header) - 1)
    print("\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *lines)))
    print(
        f"\n{options.ranks} ranks of one thread, model {options.preset}, {options.batch} x "
        f"{options.sequence} tokens a step; medians and ranges of {options.rounds} rounds of "
        f"{options.steps} steps\n{machine}"
    )
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    return 1 if fails else 0


def _build(contestant: Contestant, task: Task, rank: int) -> Step:
    torch.set_num_threads(1)
    return contestant.build(task, rank)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--steps", type=int, default=5, help="of each in a round (default 5)")
    parser.add_argument("--preset", default="12m", help="of shoal.models (default 12m)")
    parser.add_argument("--sequence", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step (default 4)")
    parser.add_argument("--only", default="", metavar="NAME,...", help="some of the contestants")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

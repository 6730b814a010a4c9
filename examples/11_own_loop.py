"""A loop of one's own with what a long run needs; docs/guides/own-loop.md tells it part by part.

torchrun --nproc-per-node 2 examples/11_own_loop.py FOLDER 100, then python examples/11_own_loop.py FOLDER 200
"""

# part: start
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("shoal")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8))
model = shoal.parallelize(layers, f"dp={ranks},shard=zero1")


# part: learning rate
def share(step: int) -> float:
    """Which share of the highest learning rate a step has: ten steps of warm-up, then half a cosine."""
    return min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)


# part: average
@torch.no_grad()
def follow(rate: float) -> None:
    """Moves the average of each weight towards its value; called after the optimizer's step."""
    for each in model.parameters():
        state = optimizer.state[each]
        average = state.setdefault("average", each.detach().clone())
        average.lerp_(each.detach(), rate)


@contextmanager
def averaged() -> Iterator[None]:
    """Within it the model computes with the averages."""
    weights = {each: each.detach().clone() for each in model.parameters()}
    with torch.no_grad():
        for each in weights:
            each.copy_(optimizer.state[each]["average"])
    yield
    with torch.no_grad():
        for each, weight in weights.items():
            each.copy_(weight)


# part: micro-batches
def train(batch: Tensor) -> float:
    """One step on a batch `[64, 8]` that all ranks have; gives the norm of the gradient."""
    micro_batches = model.local(batch).split(16)
    for number, inputs in enumerate(micro_batches, 1):
        is_last = number == len(micro_batches)
        with nullcontext() if is_last else model.accumulate():
            loss = F.mse_loss(model(inputs), inputs.sort().values)
            (loss / len(micro_batches)).backward()
    norm = model.clip_gradients(1.0)
    if math.isfinite(norm):  # it is the same on all ranks, so all of them leave the step out, or none
        optimizer.step()
        follow(0.05)
    optimizer.zero_grad()
    schedule.step()
    return norm


# part: buffers
@torch.no_grad()
def average_buffers() -> None:
    """Gives all ranks the mean of their buffers, such as BatchNorm's statistics."""
    for buffer in model.buffers():
        if ranks > 1 and buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= ranks


# part: evaluation
def evaluate(batches: Tensor) -> float:
    """The mean loss over batches `[count, 64, 8]` that all ranks have, the same on every rank."""
    sums = torch.zeros(2)  # of losses, and of numbers
    model.eval()
    with torch.no_grad(), model.unchanged():
        for inputs in map(model.local, batches):
            losses = F.mse_loss(model(inputs), inputs.sort().values, reduction="sum")
            sums += torch.tensor([losses, inputs.numel()])
    model.train()
    if ranks > 1:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


# part: checkpoints
validation = torch.randn(4, 64, 8)
first = 0
if folder.exists():
    state = shoal.load(folder, model, optimizer)
    schedule.load_state_dict(state["schedule"])
    first = state["step"]
for step in range(first, steps):
    random = torch.Generator().manual_seed(step)  # the step alone says which batch it is
    train(torch.randn(64, 8, generator=random))
    if (step + 1) % 50 == 0:
        average_buffers()
        with averaged():
            loss = evaluate(validation)
        print(f"step {step + 1}  loss {loss:.4f}  learning rate {schedule.get_last_lr()[0]:.5f}")
        shoal.save(folder, model, optimizer, step=step + 1, schedule=schedule.state_dict())

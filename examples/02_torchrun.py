"""ZeRO-3 with accumulation, clipping and a whole model at the end, under plain torchrun.

torchrun --nproc-per-node 2 examples/02_torchrun.py model.safetensors
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from shoal import Plan, parallelize
from shoal.parallel import Parallel

STEPS, BATCH, MICROBATCH = 50, 32, 4


class Residual(nn.Module):
    """Adds to what it is given. `hidden` is `[batch, width]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return hidden + self.layers(hidden)


def main(path: str) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "shoal", device_id=device if cuda else None)
    torch.manual_seed(0)

    model = nn.Sequential(nn.Linear(16, 64), *(Residual(64) for _ in range(4)), nn.Linear(64, 16))
    plan = Plan(dp=dist.get_world_size(), shard="zero3", microbatch=MICROBATCH)
    parallel = parallelize(model, plan, device=device)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)

    for step in range(STEPS):
        batch = torch.randn(BATCH, 16, device=device)  # the same on all ranks, which were seeded alike
        microbatches = parallel.local(batch).split(MICROBATCH)
        for inputs in microbatches[:-1]:
            with parallel.accumulate():
                mean_loss(parallel, inputs, len(microbatches)).backward()
        loss = mean_loss(parallel, microbatches[-1], len(microbatches))
        loss.backward()
        norm = parallel.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss.item() * len(microbatches):.3f}  gradient norm {norm:.3f}")

    with parallel.gathered():  # every rank holds the whole model in here
        if dist.get_rank() == 0:
            save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    dist.barrier()  # rank 0 has saved
    dist.destroy_process_group()


def mean_loss(model: Parallel, inputs: torch.Tensor, microbatches: int) -> torch.Tensor:
    """The loss of one micro-batch, as its part of the mean over a rank's batch."""
    return F.mse_loss(model(inputs), inputs.sort().values) / microbatches


if __name__ == "__main__":
    main(sys.argv[1])

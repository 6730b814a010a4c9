"""Steps whose memory is measured, on ranks."""

import torch
import torch.distributed as dist

import shoal
from shoal.models import Transformer, next_token_loss
from shoal.train.step_memory import StepMemory


def measured_in_second_step(plan, shape, microbatch):
    """The memory of this rank in its second step on one batch."""
    tokens = torch.randint(
        shape.vocab_size, (microbatch, shape.seq + 1), generator=torch.Generator().manual_seed(0)
    )
    model = Transformer(shape)
    model.initialize(0)
    parallel = shoal.parallelize(model, plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
    inputs, targets = (parallel.local_sequence(part).clone() for part in (tokens[:, :-1], tokens[:, 1:]))

    def step():
        next_token_loss(parallel(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with StepMemory(parallel, optimizer) as memory:
        step()
    return memory.measured(dist.get_rank() if dist.is_initialized() else 0, 2)

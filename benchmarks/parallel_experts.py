"""Expert parallelism by hand: a plain all-to-all loop, the peer of Shoal's.

Each rank keeps a part of every block's experts. Counts are exchanged, then rows; a loop over the local
experts multiplies, and a second all-to-all brings the results back. All else of the model is replicated, and
its gradients are averaged by one all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants import ADAMW, CLIP, Task
from parallel_step import dealt, loop
from rounds import Step
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.utils import get_total_norm

from shoal.models import Mixture, next_token_loss
from shoal.models.grouped_matmul import Runs

__all__ = ["exchange_in_a_loop", "keep_experts", "over_all_to_all"]


def over_all_to_all(backend: str, task: Task, rank: int) -> Step:
    """A model whose experts are spread over the ranks.

    Args:
        backend: Of the process group.
        task: What is trained; each rank gets its part of the batch.
        rank: This one.
    """
    dist.init_process_group(backend)
    ranks = dist.get_world_size()
    model = task.model()
    experts = keep_experts(model, rank, ranks)
    kept = set(experts)
    others = [parameter for parameter in model.parameters() if parameter not in kept]
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        return loss.detach()

    def update() -> None:
        shared = [parameter.grad for parameter in others]
        flat = torch.cat([gradient.flatten() for gradient in shared]).div_(ranks)
        dist.all_reduce(flat)
        for gradient, part in zip(shared, flat.split([each.numel() for each in shared]), strict=True):
            gradient.copy_(part.view_as(gradient))
        own = [parameter.grad.div_(ranks) for parameter in experts]  # sums over all ranks' tokens already
        square = get_total_norm(own).square()
        dist.all_reduce(square)
        norm = (square + get_total_norm(shared).square()).sqrt().item()
        if norm > CLIP:
            torch._foreach_mul_([*own, *shared], CLIP / norm)
        optimizer.step()
        optimizer.zero_grad()

    return loop(dealt(task, rank), gradients, update)


def exchange_in_a_loop(rows: Tensor, choices: Runs, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What `Mixture.compute` does, over the default group.

    Args:
        rows: `[rows, hidden]`, sorted by expert.
        choices: How many of this rank's rows each expert gets.
        gate: This rank's `[experts / ranks, ffn, hidden]`, and `up` as well.
        up: See `gate`.
        down: This rank's `[experts / ranks, hidden, ffn]`.

    Returns:
        `[rows, hidden]`, in the order of `rows`.
    """
    ranks, local, counts = dist.get_world_size(), len(gate), choices.counts
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent, received = (each.view(ranks, local).sum(1).tolist() for each in (counts, arriving))
    arrived = all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)
    # Runs of one expert, rank after rank.
    runs = arrived.split(arriving.tolist())
    results: list[Tensor] = [rows] * len(runs)
    for expert in range(local):
        mine = runs[expert::local]
        inputs = torch.cat(mine)
        gated = F.silu(F.linear(inputs, gate[expert])) * F.linear(inputs, up[expert])
        results[expert::local] = F.linear(gated, down[expert]).split([len(run) for run in mine])
    return all_to_all_single_autograd(torch.cat(results), sent, received, dist.group.WORLD)


def keep_experts(model: nn.Module, rank: int, ranks: int) -> list[nn.Parameter]:
    """Has every mixture keep this rank's experts alone; gives their parameters."""
    kept = []
    for mixture in (module for module in model.modules() if isinstance(module, Mixture)):
        for name in ("gate", "up", "down"):
            part = nn.Parameter(getattr(mixture, name).detach().chunk(ranks)[rank].clone())
            setattr(mixture, name, part)
            kept.append(part)
        mixture.compute = exchange_in_a_loop
    return kept

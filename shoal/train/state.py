"""The state of training as the pieces of a checkpoint, and back.

model/NAME                a trained parameter, fp32
fixed/NAME                a parameter that is not trained, or a buffer
optimizer/KEY/NAME        Adam's averages, each shaped as its parameter
rank/R/random.KIND        the states of random generators, for a resume with the same ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from shoal.checkpoint import Piece, Region
from shoal.parallel import Axis, Owned, Parallel

__all__ = ["fixed_pieces", "make_optimizer_state", "pieces_to_load", "pieces_to_save"]

_AVERAGES = ("exp_avg", "exp_avg_sq")


def make_optimizer_state(optimizer: torch.optim.AdamW) -> None:
    """Gives every parameter the state that its first step would, so that a checkpoint can be read into it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def pieces_to_save(parallel: Parallel, optimizer: torch.optim.AdamW) -> list[Piece]:
    """What this rank writes: together the ranks write each element once.

    Replicas hold the same; each of them writes a part, of about the same size.
    """
    mine = _share(parallel.owned)
    pieces = [piece for owned in mine for piece in _pieces_of(owned, optimizer)]
    if parallel.axes.world.index == 0:
        pieces += fixed_pieces(parallel.module)
    return pieces


def pieces_to_load(parallel: Parallel, optimizer: torch.optim.AdamW) -> list[Piece]:
    """What this rank reads, into the memory where training keeps it."""
    pieces = [piece for owned in parallel.owned for piece in _pieces_of(owned, optimizer, every_step=True)]
    return pieces + fixed_pieces(parallel.module)


def _pieces_of(owned: Owned, optimizer: torch.optim.AdamW, *, every_step: bool = False) -> Iterator[Piece]:
    parameter = owned.parameter
    if owned.start == owned.stop:
        return

    region = None
    if owned.cut is not None:
        region = Region.whole(owned.shape).narrow(owned.cut.dim, owned.cut.offset, owned.cut.length)

    def part(prefix: str, tensor: torch.Tensor) -> Piece:
        return Piece(f"{prefix}/{owned.name}", owned.shape, owned.start, owned.stop, tensor.detach(), region)

    yield part("model", parameter)
    state = optimizer.state[parameter]
    for key in _AVERAGES:
        yield part(f"optimizer/{key}", state[key])
    # One number for the whole parameter: the owner of its first element writes it, all owners read it.
    if owned.is_first or every_step:
        yield Piece(f"optimizer/step/{owned.name}", (), 0, 1, state["step"])


def fixed_pieces(model: nn.Module) -> list[Piece]:
    """What of a model is saved but not trained."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name not in trained]
    tensors: dict[str, torch.Tensor] = model.state_dict()
    return [Piece.whole(f"fixed/{name}", tensors[name]) for name in names if name in tensors]


def _share(owned: Sequence[Owned]) -> list[Owned]:
    """Deals out what several ranks own alike, the largest first, each to the sharer that has least."""
    held: dict[Axis, list[int]] = {}
    mine = []
    for candidate in sorted(owned, key=lambda item: item.start - item.stop):
        sharers = candidate.family.replicate
        sizes = held.setdefault(sharers, [0] * sharers.size)
        least = sizes.index(min(sizes))
        sizes[least] += candidate.stop - candidate.start
        if least == sharers.index:
            mine.append(candidate)
    return mine

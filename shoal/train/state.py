"""The state of training as the pieces of a checkpoint, and back.

model/NAME                a trained parameter, fp32
fixed/NAME                a parameter that is not trained, or a buffer
optimizer/KEY/NAME        Adam's averages, each shaped as its parameter
rank/R/random.KIND        the states of random generators, for a resume with the same ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from shoal.checkpoint import Piece, Region
from shoal.parallel import Axis, Frozen, Owned, Parallel, local_part

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
    pieces += _fixed(parallel.buffers_to_save())
    return pieces + [_frozen_piece(frozen) for frozen in parallel.frozen if frozen.is_first_copy]


def pieces_to_load(parallel: Parallel, optimizer: torch.optim.AdamW) -> list[Piece]:
    """What this rank reads, into the memory where training keeps it."""
    pieces = [piece for owned in parallel.owned for piece in _pieces_of(owned, optimizer, every_step=True)]
    return pieces + _fixed(parallel.saved_buffers()) + [_frozen_piece(frozen) for frozen in parallel.frozen]


def _pieces_of(owned: Owned, optimizer: torch.optim.AdamW, *, every_step: bool = False) -> Iterator[Piece]:
    parameter = owned.parameter
    if owned.start == owned.stop:
        return

    region = _region(owned)

    def part(prefix: str, tensor: torch.Tensor) -> Piece:
        flat = local_part(tensor).detach().view(-1)
        return Piece(f"{prefix}/{owned.name}", owned.shape, owned.start, owned.stop, flat, region)

    yield part("model", parameter)
    state = optimizer.state[parameter]
    for key in _AVERAGES:
        yield part(f"optimizer/{key}", state[key])
    # One number for the whole parameter: the owner of its first element writes it, all owners read it.
    if owned.is_first or every_step:
        yield Piece(f"optimizer/step/{owned.name}", (), 0, 1, state["step"])


def fixed_pieces(model: nn.Module) -> list[Piece]:
    """What of a model on one device is saved but not trained."""
    frozen = [
        Piece.whole(f"fixed/{name}", parameter.detach())
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    ]
    return frozen + _buffer_pieces(model)


def _buffer_pieces(model: nn.Module) -> list[Piece]:
    saved: dict[str, torch.Tensor] = model.state_dict()
    return _fixed({name: saved[name] for name, _ in model.named_buffers() if name in saved})


def _fixed(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    return [Piece.whole(f"fixed/{name}", tensor) for name, tensor in tensors.items()]


def _frozen_piece(frozen: Frozen) -> Piece:
    flat, start = frozen.local.view(-1), frozen.start
    return Piece(f"fixed/{frozen.name}", frozen.shape, start, start + flat.numel(), flat, _region(frozen))


def _region(part: Owned | Frozen) -> Region | None:
    if part.cut is None:
        return None
    return Region.whole(part.shape).narrow(part.cut.dim, part.cut.offset, part.cut.length)


def _share(owned: Sequence[Owned]) -> list[Owned]:
    """Deals out what several ranks own alike, the largest first, each to the sharer that has least."""
    held: dict[Axis, list[int]] = {}
    mine = []
    for candidate in sorted(owned, key=lambda item: item.start - item.stop):
        if candidate.family.twins is not None and candidate.family.twins.index > 0:
            continue
        sharers = candidate.family.replicate
        sizes = held.setdefault(sharers, [0] * sharers.size)
        least = sizes.index(min(sizes))
        sizes[least] += candidate.stop - candidate.start
        if least == sharers.index:
            mine.append(candidate)
    return mine

"""What the pieces of a model cost: computed of its parameters, or measured.

Computed costs are enough to cut a model of equal blocks into stages that take equally long. Measured ones
also know what is no product of matrices, and how far each product is from the device's peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from shoal.cost.memory import state_bytes
from shoal.errors import ConfigError
from shoal.models import Mixture, Transformer
from shoal.parallel.pipeline.stage_layout import StageLayout, named_part, parameters_by_piece, parts_by_piece
from shoal.parallel.pipeline.stages import Stage, take_stages
from shoal.plan import Plan
from shoal.plan.stages import Cost

__all__ = ["computed_costs", "measured_costs"]


def computed_costs(model: nn.Module, layout: StageLayout) -> list[Cost]:
    """FLOP of each piece for one token: embedding, blocks, end.

    Twice the elements of each matrix in forward and four times in backward; of experts, those that a token
    goes to. A look-up costs nothing. Of Shoal's transformers attention counts too, over the whole context;
    the blocks of other models are taken to attend alike, and to so little that it does not matter.

    Args:
        model: The whole model; the meta device will do.
        layout: Names its pieces.
    """
    parameters = dict(model.named_parameters())
    looked_up = {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    shares = _shares_of_experts(model)
    attention = 0.0
    if isinstance(model, Transformer):
        attention = 4.0 * model.config.hidden * model.config.seq
    names = parameters_by_piece(model, layout)
    costs = []
    for piece, held in enumerate(names):
        is_end = piece == len(names) - 1
        matrices = sum(
            parameters[name].numel() * shares.get(name, 1.0)
            for name in held
            if parameters[name].ndim >= 2 and (is_end or name not in looked_up)
        )
        flop = 2.0 * matrices + (attention if 0 < piece < len(names) - 1 else 0.0)
        costs.append(Cost(flop, 2 * flop, _memory(parameters, held)))
    return costs


def measured_costs(
    model: nn.Module,
    layout: StageLayout,
    inputs: Any,
    loss: Callable[[Any], Tensor],
    rounds: int = 3,
) -> list[Cost]:
    """Seconds of each piece for one micro-batch on this device: embedding, blocks, end.

    Each piece runs as a stage of its own, forward and backward, one after another in this process. A piece
    without modules costs nothing, and what it does counts with the block beside it. What the model does
    before a piece besides the others, the piece's stage does too, and it counts with the piece.

    Args:
        model: The whole model with its values, as one rank would have it. Gradients that it has are lost.
        layout: Names its pieces.
        inputs: What the model gets of a micro-batch, such as tokens `[batch, seq]`.
        loss: From the model's output to a scalar. It counts with the end.
        rounds: How often each is measured, after once that does not count; the median is taken.

    Raises:
        ConfigError: There would be no round.
        ModelError: The model is not as the layout says, or two of its pieces share a parameter that are not
            embedding and end.
    """
    if rounds < 1:
        raise ConfigError(
            f"costs of a model were to be measured in {rounds} rounds",
            possible="1 or more",
            change="give rounds=3, say",
        )
    parameters = dict(model.named_parameters())
    names = parameters_by_piece(model, layout)
    owners, ranges = _filled(model, layout)
    stages = take_stages(model, layout, ranges)
    device = next(iter(parameters.values())).device
    seconds = [list(_round(stages, inputs, loss, device)) for _ in range(rounds + 1)][1:]
    model.zero_grad()
    costs = [Cost(0.0, 0.0, _memory(parameters, held)) for held in names]
    for stage, piece in enumerate(owners):
        forward, backward = (median(each[stage][way] for each in seconds) for way in (0, 1))
        costs[piece] = Cost(forward, backward, costs[piece].memory)
    return costs


def _filled(model: nn.Module, layout: StageLayout) -> tuple[list[int], dict[int, range]]:
    """The pieces that have modules, and as stages the pieces of each: others go with the one beside them."""
    parts = parts_by_piece(model, layout)
    owners = [
        piece
        for piece, names in enumerate(parts)
        if any(isinstance(named_part(model, name), nn.Module) for name in names)
    ]
    edges = [0, *owners[1:], len(parts)]
    return owners, {stage: range(edges[stage], edges[stage + 1]) for stage in range(len(owners))}


def _round(
    stages: Sequence[Stage], inputs: Any, loss: Callable[[Any], Tensor], device: torch.device
) -> Iterator[tuple[float, float]]:
    """By stage, the seconds of a forward and of its backward."""
    forwards, backwards = [], []
    kept: list[tuple[Tensor | None, Tensor]] = []
    hidden: Tensor | None = None
    for stage in stages:
        began = _now(device)
        output: Tensor = stage(inputs, hidden)
        if stage.is_last:
            output = loss(output)
        forwards.append(_now(device) - began)
        kept.append((hidden, output))
        hidden = output.detach().requires_grad_()
    gradient: Tensor | None = None
    while kept:
        hidden, output = kept.pop()
        began = _now(device)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        backwards.append(_now(device) - began)
        if hidden is not None:
            gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
    return zip(forwards, reversed(backwards), strict=True)


def _now(device: torch.device) -> float:
    """The time when all that was begun on the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _memory(parameters: Mapping[str, nn.Parameter], held: frozenset[str]) -> float:
    """Bytes of states on a rank that has whole pieces in fp32; `with_memory` knows of Plans."""
    return state_bytes(Plan(), 1) * sum(parameters[name].numel() for name in held)


def _shares_of_experts(model: nn.Module) -> dict[str, float]:
    """Return the share of the experts' parameters that one token goes to, by name."""
    return {
        f"{name}.{kind}": module.per_token / module.experts
        for name, module in model.named_modules()
        if isinstance(module, Mixture)
        for kind in ("gate", "up", "down")
    }

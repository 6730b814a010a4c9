"""Costs of a model's pieces: computed from its parameters, or measured.

Computed costs are enough to cut a model of equal blocks into stages that take equally long. Measured costs
also include work that is no product of matrices, and how far each product is from the device's peak.
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


def computed_costs(model: nn.Module, layout: StageLayout) -> list[Cost]:
    """Return the FLOP of each piece for one token: embedding, blocks, end.

    The FLOP are twice the elements of each matrix in forward and four times in backward; for experts, only
    those that a token goes to. A look-up costs nothing. For Shoal's transformers attention counts too, over
    the whole context; the attention of other models is assumed equal in all blocks and negligible.

    Args:
        model: The whole model; the meta device will do.
        layout: The layout that names its pieces.
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
    """Return the seconds of each piece for one micro-batch on this device: embedding, blocks, end.

    Each piece runs as a stage of its own, forward and backward, one after another in this process. A piece
    without modules costs nothing, and its work counts with the block beside it. Work that the model does
    before a piece and outside all pieces counts with that piece.

    Args:
        model: The whole model with its values, as one rank would have it. Gradients that it has are lost.
        layout: The layout that names its pieces.
        inputs: The model's input for a micro-batch, such as tokens `[batch, seq]`.
        loss: A function from the model's output to a scalar. It counts with the end.
        rounds: Number of measurements of each piece, after one that does not count; the median is taken.

    Raises:
        ConfigError: `rounds` is less than 1.
        ModelError: The model does not match the layout, or two of its pieces other than embedding and end
            share a parameter.
    """
    if rounds < 1:
        raise ConfigError(
            f"costs of a model cannot be measured in {rounds} rounds",
            possible="1 or more",
            change="give, for example, rounds=3",
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
    """Return the pieces that have modules, and the pieces of each as a stage; a piece without goes beside."""
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
    """Yield, by stage, the seconds of a forward and of its backward."""
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
    """Return the time when all work begun on the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _memory(parameters: Mapping[str, nn.Parameter], held: frozenset[str]) -> float:
    """Return the bytes of states on a rank with whole pieces in fp32; `with_memory` considers Plans."""
    return state_bytes(Plan(), 1) * sum(parameters[name].numel() for name in held)


def _shares_of_experts(model: nn.Module) -> dict[str, float]:
    """Return the share of the experts' parameters that one token goes to, by name."""
    return {
        f"{name}.{kind}": module.per_token / module.experts
        for name, module in model.named_modules()
        if isinstance(module, Mixture)
        for kind in ("gate", "up", "down")
    }

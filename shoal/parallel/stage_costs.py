"""What the pieces of a model cost, by its parameters: enough to cut it into stages that take equally long."""

from __future__ import annotations

from torch import nn

from shoal.models import Mixture, Transformer
from shoal.parallel.stage_layout import StageLayout, parameters_by_piece
from shoal.plan.stages import Cost

__all__ = ["computed_costs"]


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
        width = sum(parameters[name].numel() * parameters[name].element_size() for name in held)
        costs.append(Cost(flop, 2 * flop, 4.0 * width))
    return costs


def _shares_of_experts(model: nn.Module) -> dict[str, float]:
    """Of the experts' parameters, by name, the share that one token goes to."""
    return {
        f"{name}.{kind}": module.per_token / module.experts
        for name, module in model.named_modules()
        if isinstance(module, Mixture)
        for kind in ("gate", "up", "down")
    }

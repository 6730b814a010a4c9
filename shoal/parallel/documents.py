"""Which models keep the documents of packed samples apart."""

from __future__ import annotations

import inspect

from torch import nn

from shoal.errors import ModelError
from shoal.parallel.hugging_face.layout import has_tensor_plan
from shoal.parallel.hugging_face.sequence import beside_attention

__all__ = ["require_documents"]

_POSITIONS = "position_ids"


def require_documents(model: nn.Module) -> None:
    """Check that a model keeps the documents of packed samples apart if it gets their `position_ids`.

    Raises:
        ModelError: It takes none; or it is Hugging Face's, and more than attention looks along a sequence.
    """
    problems = {f"its forward takes no {_POSITIONS}": _POSITIONS not in _arguments(model)}
    if has_tensor_plan(model):
        problems |= beside_attention(model)
    for problem, is_there in problems.items():
        if is_there:
            raise ModelError(
                f"{type(model).__name__} cannot keep the documents of packed samples apart: {problem}",
                possible="presets, Hugging Face models with only causal attention, and models of your own "
                f"whose forward takes {_POSITIONS} and lets no token see other documents",
                change="leave out data.boundaries",
            )


def _arguments(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)

"""The arguments of one forward of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.models.nested import children_of


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one forward of a model.

    Attributes:
        by_place: Arguments by their place.
        named: Arguments by their names.
    """

    by_place: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Any, model: Callable[..., Any]) -> Arguments:
        """Return the arguments for a model's inputs.

        A mapping is passed by keywords if the model takes its names, and a tuple or a list as several
        arguments if the model takes so many. Anything else is one argument.

        Args:
            inputs: The inputs, or `Arguments`, which are returned as they are.
            model: The model's forward.
        """
        if isinstance(inputs, Arguments):
            return inputs
        takes = inspect.signature(model)
        if isinstance(inputs, Mapping) and _binds(takes, cls(named=inputs)):
            return cls(named=dict(inputs))
        if type(inputs) in (tuple, list) and _binds(takes, cls(tuple(inputs))):
            return cls(tuple(inputs))
        return cls((inputs,))

    def give(self, model: Callable[..., Any]) -> Any:
        """Return what the model returns for them."""
        return model(*self.by_place, **self.named)


def _binds(takes: inspect.Signature, arguments: Arguments) -> bool:
    try:
        takes.bind(*arguments.by_place, **arguments.named)
    except TypeError:
        return False
    return True


def kind_of(value: Any) -> Hashable:
    """Return the kind of a model's inputs: structure, shapes, types, and numbers and texts, except floats.

    Shapes within the model's forward follow from it.
    """
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if (held := children_of(value)) is not None:
        name = "mapping" if isinstance(value, Mapping) else type(value).__name__
        return name, tuple((key, kind_of(each)) for key, each in held.items())
    return value if value is None or isinstance(value, bool | int | str) else type(value).__name__

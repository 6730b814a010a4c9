"""The parts of `nn.Module` that a model laid over ranks answers as its model would, or refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self

import torch
from torch import nn

from shoal.errors import LayoutError


class ModelFace(nn.Module):
    """A module around a model, with the model's names; it cannot be moved, cast, copied or pickled.

    Args:
        module: The model.
        device: This rank's device.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.device = device

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model, with the name `prefix`, and the modules within it, as the model itself does.

        The names fit those of `named_parameters()`. In a pipeline other stages' parts are placeholders.
        """
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model's own children with their names, as the model itself does."""
        yield from self.module.named_children()

    def train(self, mode: bool = True) -> Self:
        """Set the model to training or evaluation; return this object."""
        self.training = mode
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function with each module of the model, and with the model; return this object."""
        self.module.apply(fn)
        return self

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its name in `named_modules()`."""
        return self.module.get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return this rank's part of a parameter by its name in `named_parameters()`.

        Raises:
            AttributeError: This rank has none with the name.
        """
        for name, parameter in self.named_parameters():
            if name == target:
                return parameter
        raise AttributeError(f"this rank has no part of a parameter with the name {target!r}")

    def get_buffer(self, target: str) -> torch.Tensor:
        """Return a buffer of the model by its name."""
        return self.module.get_buffer(target)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model itself, if it already has the device and type.

        Raises:
            LayoutError: It would move to another device, or get another type.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is None and (device is None or torch.device(device).type == self.device.type):
            return self
        return self._apply(None)

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise LayoutError(
            "a model that is laid over ranks cannot change its device or its types",
            possible="a move before shoal.parallelize; for bf16, precision=bf16 in the Plan",
            change="move or cast the model before shoal.parallelize",
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
            if not hasattr(model, name):
                raise
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}; the model has it as module.{name}. If torch's "
            "get_model_state_dict looked for it, call state_dict(), or shoal.save with an optimizer"
        )

    def __deepcopy__(self, memory: dict[int, Any]) -> NoReturn:
        raise LayoutError(
            "a model that is laid over ranks cannot be copied or pickled: it holds process groups",
            possible="for an average, clones of named_parameters(); for a whole model, full_state_dict()",
            change="use one of these",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__deepcopy__({})

"""What an optimizer on a server is made of: its class, its settings, and the runs of a vector."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from shoal.server.terms import ServerError

_ALLOWED = ("torch.optim.", "shoal.")
"""Where the classes are that a server makes optimizers of; it imports nothing else that it is told."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """An optimizer of a vector whose elements are updated each by itself.

    Attributes:
        kind: Module and name of its class, such as `torch.optim.adamw:AdamW`.
        settings: Arguments of the class.
        groups: Settings of each group of parameters.
        runs: Group and number of elements of consecutive parts of the vector, one for each parameter: one
            that nobody has a gradient of is left out of a step.
    """

    kind: str
    settings: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    runs: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, optimizer: Optimizer, places: Sequence[tuple[torch.nn.Parameter, int]]) -> Blueprint:
        """Return the blueprint of an optimizer.

        Args:
            optimizer: The optimizer.
            places: For each part of the vector, its parameter, and its number of elements.
        """
        kind = type(optimizer)
        number = {id(each): at for at, group in enumerate(optimizer.param_groups) for each in group["params"]}
        runs = [(number[id(parameter)], elements) for parameter, elements in places if elements]
        return cls(
            f"{kind.__module__}:{kind.__qualname__}",
            _plain(optimizer.defaults),
            [_plain(group) for group in optimizer.param_groups],
            runs,
        )

    @property
    def elements(self) -> int:
        """Length of the vector."""
        return sum(elements for _, elements in self.runs)

    def window(self, first: int, stop: int) -> Blueprint:
        """Return the blueprint of some elements of the vector."""
        ends = list(itertools.accumulate(elements for _, elements in self.runs))
        cut = [
            (group, min(end, stop) - max(end - elements, first))
            for (group, elements), end in zip(self.runs, ends, strict=True)
        ]
        return Blueprint(self.kind, self.settings, self.groups, [run for run in cut if run[1] > 0])

    def build(self, values: torch.Tensor) -> Optimizer:
        """Return the optimizer; its parameters are views of the vector, a run each, in their order.

        Args:
            values: `[elements]`, fp32.

        Raises:
            ServerError: There is no such class, or it does not take the settings.
        """
        if not self.kind.startswith(_ALLOWED):
            raise ServerError(
                f"a parameter server was asked for the optimizer {self.kind}; it makes torch's and Shoal's"
            )
        parts = values.split([elements for _, elements in self.runs])
        parameters = [torch.nn.Parameter(part, requires_grad=True) for part in parts]
        groups = [
            {
                **settings,
                "params": [
                    each for each, (group, _) in zip(parameters, self.runs, strict=True) if group == at
                ],
            }
            for at, settings in enumerate(self.groups)
        ]
        try:
            module, _, name = self.kind.partition(":")
            kind = getattr(importlib.import_module(module), name)
            taken = inspect.signature(kind).parameters
            settings = {key: value for key, value in self.settings.items() if key in taken}
            optimizer = kind([group for group in groups if group["params"]], **settings)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ServerError(f"a parameter server cannot make the optimizer {self.kind}: {error}") from error
        assert isinstance(optimizer, Optimizer)
        return optimizer

    def set_groups(self, optimizer: Optimizer, settings: Sequence[Mapping[str, float]], scale: float) -> None:
        """Set what changes in the groups of an optimizer from `build`.

        Args:
            optimizer: The optimizer.
            settings: For each of `groups`, the learning rate `lr`, and what else changes.
            scale: Factor on the learning rates.
        """
        used = [at for at in range(len(self.groups)) if any(group == at for group, _ in self.runs)]
        for group, at in zip(optimizer.param_groups, used, strict=True):
            group.update(settings[at], lr=settings[at]["lr"] * scale)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "kind": self.kind,
            "settings": dict(self.settings),
            "groups": [dict(group) for group in self.groups],
            "runs": [list(run) for run in self.runs],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Blueprint:
        """Return what `as_json` was called on."""
        runs = [(int(group), int(elements)) for group, elements in given["runs"]]
        return cls(
            given["kind"], _tuples(given["settings"]), [_tuples(each) for each in given["groups"]], runs
        )


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that JSON can hold, without parameters and their names."""
    return {
        key: value
        for key, value in settings.items()
        if key not in ("params", "param_names", "initial_lr")
        and (value is None or isinstance(value, (bool, int, float, str, tuple)))
    }


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}

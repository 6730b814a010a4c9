"""What the board and the workers agree on, and what they tell each other."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from shoal.errors import CommunicationError

SERVER = b"parameter server"
"""The purpose of channels to a parameter server."""


class ServerError(CommunicationError):
    """A parameter server cannot be reached, or refuses what it was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a board goes by, equal for all workers of a training.

    Attributes:
        workers: Workers with which the training begins; the first round waits for them, and a bound counts
            from their beginning.
        shares: Shares of the whole training.
        staleness: Clocks that a worker may be ahead of the slowest; infinite for no bound, 0 for rounds.
        quorum: Workers that close a round; 0 for all that are present.
        grace: Seconds that a round with a quorum waits for others.
        every: Shares between two arrivals of a worker.
        patience: Seconds after which a worker that others wait for is taken for lost.
        guard: Whether stale gradients give way to rounds when they do harm; see `coordinator.py`.
    """

    workers: int
    shares: int
    staleness: float = 0
    quorum: int = 0
    grace: float = 0.0
    every: int = 1
    patience: float = 600.0
    guard: bool = False

    @property
    def has_rounds(self) -> bool:
        """Whether contributions are averaged in rounds from the first one on, not applied one by one."""
        return self.staleness == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """How the next contribution of a worker is applied, and what servers do before they are asked again.

    Attributes:
        in_rounds: Whether it waits for its round.
        changes: Number of times that this has changed.
        reason: Why it last did.
        snapshots: Snapshots that each shard has taken of its values, with the present one.
        returns: Number of times that each shard has gone back to the snapshot before its newest one.
    """

    in_rounds: bool = False
    changes: int = 0
    reason: str = ""
    snapshots: int = 0
    returns: int = 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a worker gets when it joins.

    Attributes:
        worker: Its number.
        clock: Its clock.
        shares: The shares to train on; empty if none is left.
        finished: Shares that all workers have finished.
        leads: Whether it is the worker that validates and saves.
        mode: How its next contribution is applied.
    """

    worker: int
    clock: int
    shares: tuple[int, ...]
    finished: int
    leads: bool
    mode: Mode

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Ticket:
        """Return the Ticket of which JSON has these fields."""
        return cls(**{**told, "shares": tuple(told["shares"]), "mode": Mode(**told["mode"])})


@dataclass(frozen=True, slots=True)
class Decision:
    """What a worker gets when it may go on.

    Attributes:
        shares: Its next shares; empty if none is left, and then the worker is a member no more.
        finished: Shares that all workers have finished.
        complete: Shares from the first one on that are all finished: what a saved state contains.
        leads: Whether it is the worker that validates and saves. One alone leads when no share is left.
        round: Number of the round that it was in; 0 without rounds.
        members: Worker and clock of each member of the round, in the order of their shares.
        weights: Weight of each.
        staleness: Rounds that closed since each was in one; empty without rounds.
        lost: Workers that were lost since the round before; empty without rounds.
        loss: Mean loss of what workers sent since this one was answered before; None if that is nothing.
        mode: How its next contribution is applied.
    """

    shares: tuple[int, ...]
    finished: int
    complete: int
    leads: bool
    round: int = 0
    members: tuple[tuple[int, int], ...] = ()
    weights: tuple[float, ...] = ()
    staleness: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    loss: float | None = None
    mode: Mode = field(default_factory=Mode)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Decision:
        """Return the Decision of which JSON has these fields."""
        lists = {name: tuple(told[name]) for name in ("shares", "weights", "staleness", "lost")}
        pairs = tuple((worker, at) for worker, at in told["members"])
        return cls(**{**told, **lists, "members": pairs, "mode": Mode(**told["mode"])})


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

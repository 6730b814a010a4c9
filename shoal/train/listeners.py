"""Receivers of a Trainer's events: its Run, and the functions of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.errors import ConfigError
from shoal.parallel import Parallel
from shoal.parallel.exchange.worker_exchange import WorkerExchange
from shoal.plan import Plan
from shoal.run import Decision
from shoal.train.result import StepResult
from shoal.train.run_writer import RunWriter

__all__ = ["Callbacks", "Listeners"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """The user's functions that a Trainer calls on every rank.

    Attributes:
        on_step: Called with each step's result.
        on_validation: Called with the steps made and the values of each validation.
        on_save: Called with the path of each checkpoint.
        on_decision: Called with each decision about the exchange.
    """

    on_step: Callable[[StepResult], object] = lambda result: None
    on_validation: Callable[[int, Mapping[str, float]], object] = lambda step, values: None
    on_save: Callable[[Path], object] = lambda path: None
    on_decision: Callable[[Decision], object] = lambda decision: None


@dataclass(frozen=True, slots=True)
class Listeners:
    """Report steps, validations and checkpoints.

    Attributes:
        run: Writer of the Run; None without one.
        callbacks: The user's functions.
        closes_run: Whether the Trainer made the writer, and so closes it.
    """

    run: RunWriter | None
    callbacks: Callbacks
    closes_run: bool

    def laid_out(self, plan: Plan, exchange: WorkerExchange) -> None:
        """Report the final Plan, and how workers exchange."""
        if self.run is not None:
            self.run.laid_out(plan, exchange)

    def step(self, made: Callable[[], int]) -> AbstractContextManager[None]:
        """Return a context for a step, whose time the Run notes; `made` returns the number of steps made.

        Raises:
            RunError: The directory of the Run holds a run, and no checkpoint of it was loaded.
        """
        return nullcontext() if self.run is None else self.run.step(made)

    def measured(
        self, parallel: Parallel, optimizer: torch.optim.Optimizer, step: int
    ) -> AbstractContextManager[None]:
        """Return a context for the computation of a step, whose memory the Run may measure."""
        return nullcontext() if self.run is None else self.run.measured(parallel, optimizer, step)

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context for work beside the steps, such as "save", whose time the Run notes."""
        return nullcontext() if self.run is None else self.run.part(name)

    def stepped(self, result: StepResult) -> None:
        """Report that a step was made or skipped."""
        if self.run is not None:
            self.run.log(result.step, result.values())
        self.callbacks.on_step(result)

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        """Report values that were measured on held-out samples, among them the loss."""
        if self.run is not None:
            names = {name: "validation_loss" if name == "loss" else name for name in values}
            self.run.log(step, {names[name]: value for name, value in values.items()})
        self.callbacks.on_validation(step, values)

    def saved(self, path: Path) -> None:
        """Report that a checkpoint was saved."""
        self.callbacks.on_save(path)

    def decided(self, decision: Decision) -> None:
        """Report a decision about the exchange."""
        if self.run is not None:
            self.run.decided(decision)
        self.callbacks.on_decision(decision)

    def loaded(self, step: int) -> None:
        """Report that a checkpoint was loaded, made after this many steps."""
        if self.run is not None:
            self.run.loaded(step)

    def close(self, error: BaseException | None) -> None:
        """Close a Run of the Trainer's own, after an error if there is one."""
        if self.run is None or not self.closes_run:
            return
        if error is not None:
            self.run.failed(error)
        self.run.close("the Trainer was closed")

    @property
    def checkpoints(self) -> Path:
        """Return the Run's directory of checkpoints.

        Raises:
            ConfigError: There is no Run.
        """
        if self.run is None:
            raise ConfigError(
                "save() of a Trainer without a Run was called without a directory",
                possible="a directory of checkpoints, or a Trainer with run=",
                change="give save() a directory",
            )
        return self.run.run.checkpoints

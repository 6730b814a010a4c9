"""Receivers of a Trainer's events: its Run, and the functions of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.errors import ConfigError
from shoal.parallel import Parallel
from shoal.plan import Plan
from shoal.run import Decision
from shoal.train.result import StepResult
from shoal.train.run_record import RunRecord

__all__ = ["Listeners"]


@dataclass(frozen=True, slots=True)
class Listeners:
    """Report steps, validations and checkpoints.

    Attributes:
        record: Record of the Run; None without one.
        on_step: The user's function for steps; None if there is none.
        on_validation: The user's function for validations; None if there is none.
        on_save: The user's function for checkpoints; None if there is none.
        on_decision: The user's function for decisions about the exchange; None if there is none.
    """

    record: RunRecord | None
    on_step: Callable[[StepResult], object] | None
    on_validation: Callable[[int, Mapping[str, float]], object] | None
    on_save: Callable[[Path], object] | None
    on_decision: Callable[[Decision], object] | None

    def laid_out(self, plan: Plan) -> None:
        """Report the final Plan."""
        if self.record is not None:
            self.record.settle(plan)

    def begin_step(self) -> None:
        """Check, before a step, that the Run may be written.

        Raises:
            RunError: The directory of the Run holds a run, and no checkpoint of it was loaded.
        """
        if self.record is not None:
            self.record.require_loaded()

    def measured(
        self, parallel: Parallel, optimizer: torch.optim.Optimizer, step: int
    ) -> AbstractContextManager[None]:
        """Return a context for a step, whose time and memory the Run may measure."""
        return nullcontext() if self.record is None else self.record.step(parallel, optimizer, step)

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context for work beside the steps, such as "save", whose time the Run notes."""
        return nullcontext() if self.record is None else self.record.part(name)

    def stepped(self, result: StepResult) -> None:
        """Report that a step was made or skipped."""
        if self.record is not None:
            self.record.log(result.step, result.values())
        if self.on_step is not None:
            self.on_step(result)

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        """Report values that were measured on held-out samples, among them the loss."""
        if self.record is not None:
            names = {name: "validation_loss" if name == "loss" else name for name in values}
            self.record.log(step, {names[name]: value for name, value in values.items()})
        if self.on_validation is not None:
            self.on_validation(step, values)

    def saved(self, path: Path) -> None:
        """Report that a checkpoint was saved."""
        if self.on_save is not None:
            self.on_save(path)

    def decided(self, decision: Decision) -> None:
        """Report a decision about the exchange."""
        if self.record is not None:
            self.record.decided(decision)
        if self.on_decision is not None:
            self.on_decision(decision)

    def loaded(self, step: int) -> None:
        """Report that a checkpoint was loaded, made after this many steps."""
        if self.record is not None:
            self.record.loaded(step)

    def close(self) -> None:
        """Write what is still buffered."""
        if self.record is not None:
            self.record.close()

    @property
    def checkpoints(self) -> Path:
        """Return the Run's directory of checkpoints.

        Raises:
            ConfigError: There is no Run.
        """
        if self.record is None:
            raise ConfigError(
                "save() of a Trainer without a Run was called without a directory",
                possible="a directory of checkpoints, or a Trainer with run=",
                change="give save() a directory",
            )
        return self.record.run.checkpoints

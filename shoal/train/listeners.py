"""Those who are told what a Trainer does: its Run, and the functions of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError
from shoal.train.result import StepResult
from shoal.train.run_record import RunRecord

__all__ = ["Listeners"]


@dataclass(frozen=True, slots=True)
class Listeners:
    """Tells of steps, validations and checkpoints.

    Attributes:
        record: Of the Run; None without one.
        on_step: What the user gave; None if nothing.
        on_validation: As well.
        on_save: As well.
    """

    record: RunRecord | None
    on_step: Callable[[StepResult], object] | None
    on_validation: Callable[[int, Mapping[str, float]], object] | None
    on_save: Callable[[Path], object] | None

    def begin_step(self) -> None:
        """Before a step.

        Raises:
            RunError: The directory of the Run holds a run, of which no checkpoint was loaded.
        """
        if self.record is not None:
            self.record.require_loaded()

    def stepped(self, result: StepResult) -> None:
        """A step was made or skipped."""
        if self.record is not None:
            self.record.log(result.step, result.values())
        if self.on_step is not None:
            self.on_step(result)

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        """Values were measured on held-out samples, the loss among them."""
        if self.record is not None:
            names = {name: "validation_loss" if name == "loss" else name for name in values}
            self.record.log(step, {names[name]: value for name, value in values.items()})
        if self.on_validation is not None:
            self.on_validation(step, values)

    def saved(self, path: Path) -> None:
        """A checkpoint was saved."""
        if self.on_save is not None:
            self.on_save(path)

    def loaded(self, step: int) -> None:
        """A checkpoint was loaded, made after so many steps."""
        if self.record is not None:
            self.record.loaded(step)

    def close(self) -> None:
        """Writes what is still buffered."""
        if self.record is not None:
            self.record.close()

    @property
    def checkpoints(self) -> Path:
        """The Run's directory of checkpoints.

        Raises:
            ConfigError: There is no Run.
        """
        if self.record is None:
            raise ConfigError(
                "save() was called without a directory, of a Trainer without a Run",
                possible="a directory of checkpoints, or a Trainer with run=",
                change="give save() a directory",
            )
        return self.record.run.checkpoints

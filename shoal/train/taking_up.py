"""The checkpoint from which a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.checkpoint import Coordinator, attempt_together, checkpoints, newest_sound, read_together, step_of
from shoal.errors import CheckpointError, CorruptCheckpointError, DataError, ModelError
from shoal.train.first_weights import begin_from_first_values
from shoal.train.host_memory import HostMemory
from shoal.train.job import Resume
from shoal.train.trainer import Trainer

__all__ = ["go_on"]


def go_on(
    trainer: Trainer,
    resume: Resume,
    data: Mapping[str, Any],
    coordinator: Coordinator,
    say: Callable[[str], object],
    beside: Sequence[Path] = (),
    hosts: HostMemory | None = None,
) -> Path | None:
    """Load the named checkpoint, or the newest sound one; all ranks call it together.

    Args:
        trainer: What goes on.
        resume: The checkpoint.
        data: What has to be as it was, so that each sample is seen once an epoch.
        coordinator: All ranks.
        say: Told of corrupt checkpoints.
        beside: Directories of checkpoints beside that of the run.
        hosts: The memory of all hosts, whose checkpoints count too; None if there is one host.

    Returns:
        The checkpoint that was loaded; None if none is sound.

    Raises:
        DataError: It was saved in a training on other data.
        ModelError: It does not fit the model.
        CorruptCheckpointError: The named checkpoint is corrupt.
    """

    def take_up(path: Path) -> None:
        _require_same_data(read_together(path, coordinator).state["data"], data)
        try:
            trainer.load(path)
        except CorruptCheckpointError:
            raise
        except CheckpointError as error:
            raise ModelError(
                f"the model does not fit the state that is resumed: {error}",
                possible="the model and model_options of the run that saved it",
                change="give the model of that run, or start a new run",
            ) from error

    if resume.checkpoint is not None:
        take_up(resume.checkpoint)
        return resume.checkpoint
    directories = [resume.run.checkpoints, *beside]

    def find() -> list[Path]:
        found = [path for directory in directories for path in checkpoints(directory)]
        return sorted(found, key=step_of, reverse=True)

    found = attempt_together(coordinator, f"cannot list {resume.run.checkpoints}", find)[0]
    spread = {} if hosts is None else hosts.find()
    found = sorted([*found, *spread], key=step_of, reverse=True)

    def take_up_found(path: Path) -> Path:
        if hosts is not None and path in spread:
            path = hosts.take(spread[path])
        take_up(path)
        return path

    loaded = newest_sound(found, coordinator, say, take_up_found)
    if loaded is None:
        begin_from_first_values(trainer)
        return None
    return loaded[1]


def _require_same_data(saved: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    for name, value in data.items():
        if saved[name] != value:
            raise DataError(
                f"the run to resume has {name}={saved[name]} for its data, and now {name}={value}",
                possible="the same data, sequence and seed, so that no sample is skipped or repeated",
                change="give the data of that run, or start a new run from its weights: init=RUN in place of "
                "--resume",
            )

"""Save the training of a user's own loop, and load it under any Plan.

`shoal.save` and `shoal.load` write and read the checkpoints of the Trainer, without the parts that belong to
the loop itself: its position in the data, and random generators.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, final

import torch

from shoal.checkpoint import (
    Coordinator,
    Piece,
    all_ranks,
    attempt_together,
    checkpoints,
    newest_sound,
    read_together,
    resolve,
    step_of,
)
from shoal.checkpoint import save as write_pieces
from shoal.errors import CheckpointError
from shoal.parallel import Parallel
from shoal.parallel.optimizer.optimizers import require_equal_steps
from shoal.record import NullRecorder
from shoal.train.arguments import require_laid_out
from shoal.train.checkpointer import Checkpointer
from shoal.train.state import pieces_to_save
from shoal.train.training_state import (
    load_training,
    require_same,
    settings_of,
    take_settings,
    training_to_save,
)

_OWN = "own"
"""Key of the caller's state, in the checkpoint's state."""


def save(
    directory: str | PathLike[str],
    parallel: Parallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    **state: Any,
) -> Path:
    """Save the model, its buffers and the optimizer; all ranks call it together.

    The checkpoint is a directory `step-N` in `directory`, which becomes complete by one rename. Each rank
    writes its part, and each element is written once. Random generators are not saved.

    Args:
        directory: Directory of checkpoints, on a file system that all ranks see; made if absent.
        parallel: The model.
        optimizer: Optimizer of its parameters; join several as `shoal.parallel.Together`.
        step: The number N; by default one more than that of the newest checkpoint in `directory`.
        state: Further values to keep, as JSON; rank 0's are kept.

    Returns:
        The directory of the checkpoint, equal on every rank.

    Raises:
        CheckpointError: On all ranks: it could not be written, the optimizer has state that a checkpoint
            cannot hold, or `state` is not JSON.
        TrainingError: Ranks made different numbers of optimizer steps.
    """
    require_laid_out(parallel, optimizer, step)
    folder, coordinator = Path(directory), all_ranks()
    if step is None:
        step = attempt_together(coordinator, f"cannot save in {folder}", lambda: _next_step(folder))[0]
    pieces, kept = _OwnTraining(parallel, optimizer, coordinator).to_save(folder, step, state)
    return write_pieces(folder, step, pieces, kept, coordinator)


def load(
    path: str | PathLike[str], parallel: Parallel, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load a checkpoint of `save`, on any number of ranks under any Plan; all ranks call it together.

    A corrupt checkpoint is skipped with a warning, if there is an older one. After an error model and
    optimizer are as before.

    Args:
        path: A checkpoint, or a directory of checkpoints, of which the newest sound one is loaded.
        parallel: The model. Gradients are forgotten.
        optimizer: An optimizer made like the saved one. Its state is replaced, and the settings of its
            groups, such as learning rates, are restored. None leaves the optimizer's state out.

    Returns:
        The `state` that was saved, and `step`.

    Raises:
        CheckpointError: On all ranks: there is no sound checkpoint, or it does not fit the model or the
            optimizer.
        TrainingError: A sound checkpoint could not be read once more, and the model is loaded in part.
    """
    require_laid_out(parallel, optimizer)
    coordinator = all_ranks()
    found = attempt_together(coordinator, f"cannot load {path}", lambda: resolve(Path(path)))[0]
    layout = {"plan": str(parallel.plan), "ranks": coordinator.size}

    def attempt(checkpoint: Path) -> Mapping[str, Any]:
        saved = read_together(checkpoint, coordinator).state
        _require_fit(checkpoint, saved, optimizer)
        return load_training(checkpoint, parallel, optimizer, layout, coordinator, {})[0]

    loaded = newest_sound(found, coordinator, lambda text: warnings.warn(text, stacklevel=4), attempt)
    if loaded is None:
        raise CheckpointError(f"{path} has no sound checkpoint")
    saved = loaded[1]
    if optimizer is not None:
        for group, settings in zip(optimizer.param_groups, saved["settings"], strict=True):
            take_settings(group, settings)
    return dict(saved.get(_OWN, saved))


@final
class BackgroundSaves:
    """Save the training of a user's own loop like `shoal.save`, while the loop goes on.

        saves = BackgroundSaves(directory, parallel, optimizer, keep=2)
        for step in range(steps):
            ...
            if step % 100 == 0:
                saves.save(step=step)
        saves.finish()

    All ranks call each method together. Nothing else may save into the directory meanwhile.

    Args:
        directory: Directory of checkpoints, on a file system that all ranks see; made if absent.
        parallel: The model.
        optimizer: Optimizer of its parameters; join several as `shoal.parallel.Together`.
        keep: Number of newest checkpoints in the directory that stay; 0 keeps all.

    Attributes:
        newest: The newest checkpoint that was saved by this; None before the first.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        parallel: Parallel,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        keep: int = 0,
    ) -> None:
        self._directory = Path(directory)
        self._keep = keep
        ranks = all_ranks()
        own = _OwnTraining(parallel, optimizer, ranks)
        self._checkpointer = Checkpointer(own, self._note, NullRecorder(), ranks)
        self.newest: Path | None = None

    def save(self, *, step: int, **state: Any) -> None:
        """Begin to save, and return once the state is copied to host memory.

        It first waits for the save before. If that one failed, it warns.

        Args:
            step: The number of the checkpoint.
            state: Further values to keep, as JSON; rank 0's are kept.

        Raises:
            CheckpointError: On all ranks: the optimizer has state that a checkpoint cannot hold.
        """
        self._checkpointer.begin(self._directory, step, state, keep=self._keep)

    def finish(self) -> Path | None:
        """Wait for the last save, warn if it failed, and return the newest checkpoint."""
        self._checkpointer.finish()
        return self.newest

    def _note(self, path: Path) -> None:
        self.newest = path


@final
class _OwnTraining:
    """What `save` saves: the training of a user's own loop.

    Args:
        parallel: The model.
        optimizer: Optimizer of its parameters; None for none.
        coordinator: All ranks.
    """

    def __init__(
        self, parallel: Parallel, optimizer: torch.optim.Optimizer | None, coordinator: Coordinator
    ) -> None:
        self._parallel = parallel
        self._optimizer = optimizer
        self._coordinator = coordinator

    def pieces(self) -> list[Piece]:
        """See `shoal.train.checkpointer.Source`."""
        return pieces_to_save(self._parallel, self._optimizer)

    def to_save(
        self, directory: Path, step: int, state: Mapping[str, Any]
    ) -> tuple[list[Piece], dict[str, Any]]:
        """See `shoal.train.checkpointer.Source`."""
        made = enumerate(self._coordinator.all_gather_object(self._parallel.steps.made))
        members = self._parallel.axes.in_step.members
        require_equal_steps({rank: number for rank, number in made if rank in members})
        described = {
            "plan": str(self._parallel.plan),
            "ranks": self._coordinator.size,
            _OWN: {**state, "step": step},
        }
        if self._optimizer is not None:
            described["settings"] = [settings_of(group) for group in self._optimizer.param_groups]
        purpose = f"cannot save step {step} in {directory}"
        return training_to_save(purpose, self._parallel, self._optimizer, described, self._coordinator)


def _require_fit(checkpoint: Path, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer that differs from the saved one."""
    require_same(checkpoint, state, optimizer)
    if optimizer is not None and len(state["settings"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{checkpoint} has the settings of {len(state['settings'])} groups of parameters, and the "
            f"optimizer has {len(optimizer.param_groups)}: make it with the same number of groups, or load "
            "without it"
        )


def _next_step(directory: Path) -> int:
    found = checkpoints(directory)
    return step_of(found[0]) + 1 if found else 0

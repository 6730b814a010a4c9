"""The state of training as a checkpoint: the model, the optimizer, random generators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from shoal.checkpoint import Coordinator, Piece, Spread, attempt_together
from shoal.parallel import Parallel, Replicas, title_of
from shoal.train.portable import load_training, training_to_save
from shoal.train.randomness import begin_anew, random_state, set_random_state
from shoal.train.state import optimizer_pieces, pieces_of_replica, pieces_to_save

__all__ = ["TrainingState"]


@final
class TrainingState:
    """Give and load the training of a model by an optimizer; all ranks call it together.

    Args:
        parallel: The model.
        optimizer: The optimizer as it was made: later changes of its groups' settings are saved.
        coordinator: All ranks.
        replicas: Compares replicas before they are saved.
        plan: The Plan's text, as checkpoints record it; equal text on equal ranks means an equal layout.
        seed: The run's seed.

    Attributes:
        spread: How the checkpoints of a directory are spread over hosts, if there is such a directory.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        coordinator: Coordinator,
        replicas: Replicas,
        *,
        plan: str,
        seed: int,
    ) -> None:
        self._parallel = parallel
        self._optimizer = optimizer
        self._layout = {"plan": plan, "ranks": coordinator.size}
        self._seed = seed
        self._coordinator = coordinator
        self.spread: Spread | None = None
        self._replicas = replicas
        self._settings = _settings_of(optimizer)

    def to_save(
        self, directory: Path, step: int, state: Mapping[str, Any]
    ) -> tuple[list[Piece], dict[str, Any]]:
        """See `Source.to_save`; replicas that differ are an error as in `Replicas`."""
        self._replicas.compare_to_save(step)
        return training_to_save(
            f"cannot save step {step} in {directory}",
            self._parallel,
            self._optimizer,
            {**state, **self._layout, "settings": self._changed_settings()},
            self._coordinator,
            {f"random.{name}": tensor for name, tensor in random_state().items()},
        )

    def replica_to_save(self, state: Mapping[str, Any]) -> tuple[list[Piece], dict[str, Any]]:
        """Return what a rank saves alone that holds all state: see `pieces_of_replica`.

        A training that goes on from it seeds random generators anew.
        """
        layout = {"plan": "", "ranks": 1}
        told = {"settings": self._changed_settings(), "optimizer": title_of(self._optimizer)}
        return pieces_of_replica(self._parallel, self._optimizer), {**state, **layout, **told}

    def _changed_settings(self) -> list[dict[str, Any]]:
        """Return the settings of the optimizer's groups that have changed since it was made."""
        return [
            {key: value for key, value in now.items() if before.get(key) != value}
            for now, before in zip(_settings_of(self._optimizer), self._settings, strict=True)
        ]

    def pieces(self) -> list[Piece]:
        """See `Source.pieces`."""
        return pieces_to_save(self._parallel, self._optimizer)

    def require_savable(self) -> None:
        """Refuse an optimizer with state that a checkpoint cannot hold; it has made a step.

        Raises:
            CheckpointError: It has such state.
        """
        attempt_together(
            self._coordinator,
            "checkpoints cannot be saved",
            lambda: len(optimizer_pieces(self._parallel, self._optimizer)),
        )

    def load(self, checkpoint: Path) -> Mapping[str, Any]:
        """Load a checkpoint, which any number of ranks under any Plan may have saved.

        Returns:
            The state that was saved with it.

        Raises:
            CheckpointError: It does not fit the model or the optimizer. Both are then as before.
            CorruptCheckpointError: It is not what was saved. Model and optimizer are as before.
        """
        random = random_state()
        state, is_same_layout = load_training(
            checkpoint,
            self._parallel,
            self._optimizer,
            self._layout,
            self._coordinator,
            {f"random.{name}": tensor for name, tensor in random.items()},
            self.spread,
        )
        for group, settings in zip(self._optimizer.param_groups, state["settings"], strict=False):
            group.update(settings)
        if is_same_layout:
            set_random_state(random)
        else:
            begin_anew(self._seed, state["step"], self._parallel.axes.data.index)
        return state


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups' settings without parameters and learning rates, as far as JSON can hold them.

    Some optimizers keep counts and estimates there.
    """
    return [
        {
            key: value
            for key, value in group.items()
            if isinstance(value, (bool, int, float, str)) and key not in ("lr", "initial_lr")
        }
        for group in optimizer.param_groups
    ]

"""Saving what training consists of, and taking it up again: the model, the optimizer, random generators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from shoal.checkpoint import Exchange, Piece, attempt_together, load, read_manifest, save
from shoal.errors import CheckpointError
from shoal.parallel import Parallel
from shoal.train.randomness import begin_anew, random_state, set_random_state
from shoal.train.state import (
    differing_buffers,
    optimizer_to_load,
    pieces_to_load,
    pieces_to_save,
)

__all__ = ["SavedTraining"]


@final
class SavedTraining:
    """Saves and loads the training of a model by an optimizer; all ranks call it together.

    Args:
        parallel: The model.
        optimizer: As it was made: what its groups hold is kept where it changes.
        plan: As checkpoints tell it; the same text on the same ranks is the same layout.
        seed: The run's.
        exchange: All ranks.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        *,
        plan: str,
        seed: int,
        exchange: Exchange,
    ) -> None:
        self._parallel = parallel
        self._optimizer = optimizer
        self._layout = {"plan": plan, "ranks": exchange.size}
        self._seed = seed
        self._exchange = exchange
        self._settings = _settings_of(optimizer)

    def save(self, directory: Path, step: int, state: Mapping[str, Any]) -> Path:
        """Saves a checkpoint.

        Args:
            directory: Of checkpoints.
            step: Optimizer steps made.
            state: A JSON object to keep with it.

        Raises:
            CheckpointError: It could not be written; training can go on.
        """
        pieces: list[Piece] = []
        attempt_together(
            self._exchange,
            f"cannot save step {step} in {directory}",
            lambda: pieces.extend(pieces_to_save(self._parallel, self._optimizer)),
        )
        pieces += self._of_rank(
            differing_buffers(self._parallel.saved_buffers(), self._exchange), random_state()
        )
        settings = [
            {key: value for key, value in now.items() if before.get(key) != value}
            for now, before in zip(_settings_of(self._optimizer), self._settings, strict=True)
        ]
        name = type(self._optimizer).__name__
        described = {**state, **self._layout, "optimizer": name, "settings": settings}
        return save(directory, step, pieces, described, self._exchange)

    def load(self, checkpoint: Path) -> Mapping[str, Any]:
        """Takes up a checkpoint, which any number of ranks under any Plan may have saved.

        Returns:
            The state that was kept with it.

        Raises:
            CheckpointError: It does not fit the model or the optimizer.
        """
        self._parallel.zero_grad()
        wanted = pieces_to_load(self._parallel)
        state = load(checkpoint, wanted.pieces, self._exchange)
        wanted.finish()
        self._parallel.changed()
        name = type(self._optimizer).__name__
        if state["optimizer"] != name:
            raise CheckpointError(
                f"{checkpoint} has the state of the optimizer {state['optimizer']}, and this one is {name}: "
                "go on with the same optimizer, or begin a run from the weights"
            )
        saved = read_manifest(checkpoint).tensors
        wanted = optimizer_to_load(self._parallel, self._optimizer, saved)
        is_same_layout = all(state[key] == value for key, value in self._layout.items())
        random = random_state()
        if is_same_layout:
            of_rank = self._of_rank(self._parallel.saved_buffers(), random)
            # Only buffers that differ are saved, and the state may be from a machine without CUDA.
            wanted.pieces += [piece for piece in of_rank if piece.name in saved]
        load(checkpoint, wanted.pieces, self._exchange)
        wanted.finish()
        for group, settings in zip(self._optimizer.param_groups, state["settings"], strict=False):
            group.update(settings)
        if is_same_layout:
            set_random_state(random)
        else:
            begin_anew(self._seed, state["step"], self._parallel.axes.data.index)
        return state

    def _of_rank(
        self, buffers: Mapping[str, torch.Tensor], random: Mapping[str, torch.Tensor]
    ) -> list[Piece]:
        """What is this rank's own."""
        held = {f"buffer/{name}": tensor for name, tensor in buffers.items()}
        held |= {f"random.{name}": tensor for name, tensor in random.items()}
        rank = self._exchange.rank
        return [Piece.whole(f"rank/{rank}/{name}", tensor.detach()) for name, tensor in held.items()]


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the groups hold beside parameters and learning rates, where JSON can say it.

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

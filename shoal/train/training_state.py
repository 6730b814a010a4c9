"""The state of training as a checkpoint, and back: the model, its buffers, the optimizer, random generators.

`TrainingState` is that of a Trainer. `training_to_save` and `load_training` do the part that it has in common
with a loop of one's own, see `save_load.py`. `state.py` names the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from shoal.checkpoint import Coordinator, Piece, Spread, attempt_together, load_verified, read_together
from shoal.errors import CheckpointError
from shoal.parallel import Parallel, Replicas, title_of
from shoal.parallel.exchange.worker_exchange import STEPS, exchange_of
from shoal.train.deferred_init import are_put_off, note_loaded
from shoal.train.snapshot import begin_anew, random_state, set_random_state
from shoal.train.state import (
    ToLoad,
    differing_buffers,
    digests_of,
    empty_like_saved,
    kept_by_exchanges,
    optimizer_pieces,
    optimizer_to_load,
    pieces_of_replica,
    pieces_to_load,
    pieces_to_save,
    restore_exchanges,
    restore_rotary_state,
    rotary_state,
)


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
        self._settings = [settings_of(group) for group in optimizer.param_groups]

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
        """Return the groups' settings that have changed since the optimizer was made, but learning rates."""
        return [
            {
                key: value
                for key, value in settings_of(group).items()
                if before.get(key) != value and key not in ("lr", "initial_lr")
            }
            for group, before in zip(self._optimizer.param_groups, self._settings, strict=True)
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
            take_settings(group, settings)
        if is_same_layout:
            set_random_state(random)
        else:
            begin_anew(self._seed, state["step"], self._parallel.axes.data.index)
        return state


def training_to_save(
    purpose: str,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    coordinator: Coordinator,
    of_rank: Mapping[str, torch.Tensor] | None = None,
) -> tuple[list[Piece], dict[str, Any]]:
    """Return the pieces of a model, its buffers and its optimizer that this rank saves, and the state beside.

    Args:
        purpose: Beginning of an error's message.
        parallel: The model.
        optimizer: The optimizer; its name is kept with the state.
        state: A JSON object to keep with the checkpoint.
        coordinator: All ranks, which call it together.
        of_rank: Further tensors of this rank only, by name.

    Raises:
        CheckpointError: On all ranks: the optimizer has state that a checkpoint cannot hold.
    """
    exchange = exchange_of(optimizer, parallel)
    exchange.settle()
    pieces: list[Piece] = []
    mine = parallel.saved_buffers()

    def find() -> dict[str, bytes]:
        pieces.extend(pieces_to_save(parallel, optimizer))
        return digests_of(mine)

    digests = attempt_together(coordinator, purpose, find)
    buffers = differing_buffers(mine, coordinator.rank, digests)
    exchanged = kept_by_exchanges(parallel, optimizer)
    own = {**(of_rank or {}), **exchanged, **rotary_state(parallel.module)}
    pieces += _of_rank(coordinator.rank, buffers, own)
    kept = {**state, **exchange.to_save()}
    if optimizer is not None:
        kept["optimizer"] = title_of(optimizer)
    return pieces, kept


def load_training(
    checkpoint: Path,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer | None,
    layout: Mapping[str, Any],
    coordinator: Coordinator,
    of_rank: Mapping[str, torch.Tensor],
    spread: Spread | None = None,
) -> tuple[Mapping[str, Any], bool]:
    """Load a model, its buffers and its optimizer, which any number of ranks may have saved.

    All files are verified meanwhile. After an error everything is as before, other than gradients, which are
    forgotten.

    Args:
        checkpoint: The checkpoint to load.
        parallel: The model.
        optimizer: The optimizer; its present state is dropped.
        layout: Entries of the checkpoint's state that are equal if it was saved on equal ranks under an equal
            Plan.
        coordinator: All ranks.
        of_rank: Tensors to fill with those that this rank saved under these names, if the layout is equal.
        spread: How the checkpoints of a directory are spread over hosts, if there is such a directory.

    Returns:
        The JSON object that was saved with it, and whether the layout is equal, so that each rank got its own
        tensors.

    Raises:
        CheckpointError: It does not fit the model or the optimizer.
        CorruptCheckpointError: It is not what was saved.
    """
    manifest = read_together(checkpoint, coordinator)
    state, saved = manifest.state, manifest.tensors
    require_same(checkpoint, state, optimizer)
    parallel.zero_grad()
    wanted = pieces_to_load(parallel, is_in_use=not are_put_off(parallel))
    kept: dict[str, torch.Tensor] = {}
    own: list[Piece] = []
    is_same_layout = all(state.get(key) == value for key, value in layout.items())
    if is_same_layout:
        found = _of_rank(coordinator.rank, parallel.saved_buffers(), of_rank)
        # Only buffers that differ are saved, and the state may be from a machine without CUDA.
        own += [piece for piece in found if piece.name in saved]
        kept = empty_like_saved(saved, coordinator.rank, parallel)
        own += _of_rank(coordinator.rank, {}, kept)
    rotary = rotary_state(parallel.module)
    own += _of_a_rank(saved, coordinator.rank if is_same_layout else None, rotary)
    of_optimizer = ToLoad() if optimizer is None else optimizer_to_load(parallel, optimizer, saved)
    replaced = {f"fixed/{piece.name.partition('/buffer/')[2]}" for piece in own}
    shared = [piece for piece in wanted.in_use if piece.name not in replaced]
    in_use = [*shared, *of_optimizer.in_use, *own]
    fresh = [*wanted.fresh, *of_optimizer.fresh]
    load_verified(checkpoint, manifest, coordinator, fresh=fresh, in_use=in_use, spread=spread)
    wanted.finish()
    parallel.changed()
    note_loaded(parallel)
    of_optimizer.finish()
    restore_exchanges(parallel, optimizer, kept)
    if optimizer is not None:
        steps = state.get(STEPS, manifest.step)
        parallel.set_step(steps)
        exchange_of(optimizer, parallel).load(steps, state)
    restore_rotary_state(parallel.module, rotary)
    return state, is_same_layout


def require_same(checkpoint: Path, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer of another kind than the saved one.

    Raises:
        CheckpointError: It is of another kind.
    """
    kept = f"the optimizer {state['optimizer']}" if "optimizer" in state else "no optimizer"
    if optimizer is not None and state.get("optimizer") != title_of(optimizer):
        raise CheckpointError(
            f"{checkpoint} has the state of {kept}, and the optimizer is now {title_of(optimizer)}: use the "
            "same optimizer, or load only the weights"
        )


def _of_rank(
    rank: int, buffers: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> list[Piece]:
    """Return the pieces of one rank only."""
    held = {f"buffer/{name}": tensor for name, tensor in buffers.items()} | dict(others)
    return [Piece.whole(f"rank/{rank}/{name}", tensor.detach()) for name, tensor in held.items()]


def _of_a_rank(saved: Mapping[str, Any], rank: int | None, wanted: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Return the pieces to fill tensors with those of a rank; of the first that saved them, if it is None."""
    found = []
    parts = [path.split("/", 2) for path in saved if path.startswith("rank/")]
    for name, tensor in wanted.items():
        ranks = [int(part[1]) for part in parts if part[2] == name]
        if ranks:
            of = rank if rank in ranks else min(ranks)
            found.append(Piece.whole(f"rank/{of}/{name}", tensor))
    return found


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of an optimizer, without parameters, as far as JSON can hold them.

    Some optimizers keep counts and estimates there.
    """
    settings = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            value = value.item()
        if isinstance(value, (bool, int, float, str)) or (key != "params" and _is_list_of_numbers(value)):
            settings[key] = value
    return settings


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, (bool, int, float)) for each in value)


def take_settings(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Give a group of an optimizer the settings that `settings_of` returned."""
    for key, value in settings.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

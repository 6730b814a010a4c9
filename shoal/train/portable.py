"""Save the training of a user's own loop, and load it under any Plan.

`shoal.save` and `shoal.load` write and read the checkpoints of the Trainer, without the parts that belong to
the loop itself: its position in the data, and random generators.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from shoal.checkpoint import (
    Coordinator,
    Piece,
    ProcessGroupCoordinator,
    SingleProcess,
    Spread,
    attempt_together,
    checkpoints,
    load_verified,
    newest_sound,
    read_together,
    resolve,
    step_of,
)
from shoal.checkpoint import save as write_pieces
from shoal.errors import CheckpointError
from shoal.parallel import Parallel, title_of
from shoal.parallel.exchange.worker_exchange import STEPS, exchange_of
from shoal.parallel.optimizer.step_count import require_equal_steps
from shoal.train.arguments import require_laid_out
from shoal.train.exchange_state import empty_like_saved, kept_by_exchanges, restore_exchanges
from shoal.train.put_off import are_put_off, note_loaded
from shoal.train.rotary_state import restore_rotary_state, rotary_state
from shoal.train.state import (
    ToLoad,
    differing_buffers,
    digests_of,
    optimizer_to_load,
    pieces_to_load,
    pieces_to_save,
)

__all__ = ["Loaded", "OwnTraining", "all_ranks", "load", "load_training", "save", "training_to_save"]

_OWN = "own"
"""Key of the caller's state, in the checkpoint's state."""


class Loaded(NamedTuple):
    """A training that was loaded.

    Attributes:
        state: The JSON object that was saved with it.
        is_same_layout: Whether it was saved on equal ranks under an equal Plan, so that each rank got its own
            tensors.
    """

    state: Mapping[str, Any]
    is_same_layout: bool


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
    pieces, kept = OwnTraining(parallel, optimizer, coordinator).to_save(folder, step, state)
    return write_pieces(folder, step, pieces, kept, coordinator)


@final
class OwnTraining:
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
            described["settings"] = [_settings_of(group) for group in self._optimizer.param_groups]
        purpose = f"cannot save step {step} in {directory}"
        return training_to_save(purpose, self._parallel, self._optimizer, described, self._coordinator)


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
        return load_training(checkpoint, parallel, optimizer, layout, coordinator, {}).state

    loaded = newest_sound(found, coordinator, lambda text: warnings.warn(text, stacklevel=4), attempt)
    if loaded is None:
        raise CheckpointError(f"{path} has no sound checkpoint")
    saved = loaded[1]
    if optimizer is not None:
        for group, settings in zip(optimizer.param_groups, saved["settings"], strict=True):
            _take_settings(group, settings)
    return dict(saved.get(_OWN, saved))


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
) -> Loaded:
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

    Raises:
        CheckpointError: It does not fit the model or the optimizer.
        CorruptCheckpointError: It is not what was saved.
    """
    manifest = read_together(checkpoint, coordinator)
    state, saved = manifest.state, manifest.tensors
    _require_same(checkpoint, state, optimizer)
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
    return Loaded(state, is_same_layout)


def _require_fit(checkpoint: Path, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer that differs from the saved one."""
    _require_same(checkpoint, state, optimizer)
    if optimizer is not None and len(state["settings"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{checkpoint} has the settings of {len(state['settings'])} groups of parameters, and the "
            f"optimizer has {len(optimizer.param_groups)}: make it with the same number of groups, or load "
            "without it"
        )


def _require_same(
    checkpoint: Path, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None
) -> None:
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


def all_ranks() -> Coordinator:
    """Return all ranks of the default process group, or this process alone."""
    return ProcessGroupCoordinator() if dist.is_initialized() else SingleProcess()


def _next_step(directory: Path) -> int:
    found = checkpoints(directory)
    return step_of(found[0]) + 1 if found else 0


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group, without parameters, as far as JSON can hold them."""
    settings = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            value = value.item()
        if isinstance(value, (bool, int, float, str)) or (key != "params" and _is_list_of_numbers(value)):
            settings[key] = value
    return settings


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, (bool, int, float)) for each in value)


def _take_settings(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

"""The weights of another run, with which a run begins: fine-tuning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from shoal.checkpoint import (
    Manifest,
    Piece,
    TensorRecord,
    attempt_together,
    load_verified,
    newest_sound,
    read_manifest,
    read_together,
    resolve,
)
from shoal.errors import CheckpointError, ConfigError, CorruptCheckpointError, nearest
from shoal.models import is_adapter, plain_name
from shoal.train.deferred_init import give_put_off_values, note_loaded
from shoal.train.state import pieces_to_load
from shoal.train.trainer import Trainer

_KINDS = "model", "fixed"  # beginnings of the names of a checkpoint's weights


def begin_from(trainer: Trainer, given: str, say: Callable[[str], object]) -> None:
    """Load the weights of a run or a checkpoint, and nothing else; all ranks call it before the first step.

    A weight may have been trained there and be frozen here, or have no adapter there. Adapters that are not
    there keep their first values.

    Args:
        trainer: The trainer.
        given: A run, a checkpoint, or a directory of checkpoints.
        say: Called on rank 0 with a message for each corrupt checkpoint that is skipped.

    Raises:
        CheckpointError: There is no sound checkpoint, or it does not fit the model.
    """
    parallel, coordinator = trainer.parallel, trainer.coordinator
    found = attempt_together(coordinator, f"cannot load {given}", lambda: resolve(Path(given)))[0]
    wanted = pieces_to_load(parallel)

    def attempt(checkpoint: Path) -> None:
        manifest = read_together(checkpoint, coordinator)
        in_use, fresh = (
            list(_as_saved(pieces, manifest.tensors)) for pieces in (wanted.in_use, wanted.fresh)
        )
        load_verified(checkpoint, manifest, coordinator, fresh=fresh, in_use=in_use)

    if newest_sound(found, coordinator, say, attempt) is None:
        raise CheckpointError(f"{given} has no sound checkpoint")
    wanted.finish()
    parallel.changed()
    note_loaded(parallel)
    trainer.exchange.begin()


def begin_from_first_values(trainer: Trainer) -> None:
    """Give the model the first values that were put off, if they were; call it before the first step."""
    give_put_off_values(trainer.parallel)
    trainer.exchange.begin()


def require_weights(given: str, model: nn.Module) -> None:
    """Refuse weights that a model does not fit, before any rank starts. Only manifests are read.

    Args:
        given: A run, a checkpoint, or a directory of checkpoints.
        model: The model, of any device.

    Raises:
        ConfigError: There is no checkpoint, or it is of another model.
    """
    try:
        saved = _newest_manifest(resolve(Path(given))).tensors
    except CheckpointError as error:
        raise ConfigError(
            f"init={given} cannot be begun from: {error}",
            possible="a run, a checkpoint such as runs/NAME/checkpoints/step-00000100, or their directory",
            change="correct the path",
        ) from None
    names = {name for name, _ in model.named_parameters()}
    adapters = [name for kind, name in map(_split, saved) if kind in _KINDS and is_adapter(name)]
    if others := [name for name in adapters if name not in names]:
        raise ConfigError(
            f"init={given} was trained with LoRA, and its adapter {others[0]} is not in the model",
            possible="the table lora of the run that saved it, or its whole model: shoal export --merge",
            change="give these settings of lora, or model=hf:DIR with the exported model",
        )
    for name, parameter in model.named_parameters():
        path = _path_of(name, saved)
        found = None if path is None else saved[path]
        if found is None and is_adapter(name):
            continue
        if found is None or found.shape != tuple(parameter.shape):
            raise ConfigError(
                f"init={given} does not fit the model: {_misfit(name, tuple(parameter.shape), found, saved)}",
                possible="the model and model_options of the run that saved it, which its run.json has",
                change="give that model, or other weights",
            )


def _newest_manifest(found: Sequence[Path]) -> Manifest:
    """Return the first manifest that can be read: `begin_from` passes over corrupt checkpoints, too.

    Raises:
        CheckpointError: There is none; the error is that of the last.
    """
    for path in found[:-1]:
        with contextlib.suppress(CorruptCheckpointError):
            return read_manifest(path)
    return read_manifest(found[-1])


def _as_saved(pieces: Sequence[Piece], saved: Mapping[str, TensorRecord]) -> Iterator[Piece]:
    """Yield the pieces under the names that a checkpoint has for them; leave out adapters that it lacks."""
    for piece in pieces:
        _, name = _split(piece.name)
        path = _path_of(name, saved)
        if path is not None:
            yield replace(piece, name=path)
        elif not is_adapter(name):
            yield piece


def _path_of(name: str, saved: Mapping[str, TensorRecord]) -> str | None:
    paths = (f"{kind}/{each}" for each in (name, plain_name(name)) for kind in _KINDS)
    return next((path for path in paths if path in saved), None)


def _split(path: str) -> tuple[str, str]:
    kind, _, name = path.partition("/")
    return kind, name


def _misfit(
    name: str, shape: tuple[int, ...], found: TensorRecord | None, saved: Mapping[str, TensorRecord]
) -> str:
    if found is not None:
        return f"{name} has shape {list(found.shape)} there, and {list(shape)} here"
    names = [name for kind, name in map(_split, saved) if kind in _KINDS]
    return f"it has no {name}{nearest(name, names)}"

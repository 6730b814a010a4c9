"""Load the model that a run trained, on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torch import nn

from shoal.checkpoint import Piece, SingleProcess, load_verified, newest_sound, read_manifest, resolve
from shoal.errors import CheckpointError
from shoal.run import Run
from shoal.train.config import TrainConfig, load_config
from shoal.train.located import build_model
from shoal.train.state import fixed_pieces

T = TypeVar("T")


def load_model(
    path: Path | str, say: Callable[[str], object] = warnings.warn
) -> tuple[nn.Module, TrainConfig]:
    """Return the model of a run from its newest sound checkpoint, on the CPU in fp32.

    Args:
        path: The run, or one of its checkpoints.
        say: Called with a message for each corrupt checkpoint that is skipped; by default a warning.

    Returns:
        The model and the run's configuration.

    Raises:
        RunError: The path is not a run's.
        CheckpointError: There is no sound checkpoint.
    """
    path = Path(path)
    config = config_of(path)
    model = build_model(config, "cpu")
    trained = [
        Piece.whole(f"model/{name}", parameter.detach())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    pieces = trained + fixed_pieces(model)
    load_newest(path, say, lambda checkpoint: load_pieces(checkpoint, pieces))
    return model, config


def config_of(path: Path) -> TrainConfig:
    """Return the configuration of a run, or of the run of a checkpoint.

    Raises:
        RunError: The path is not a run's.
    """
    is_checkpoint = (path / "manifest.json").is_file()
    run = Run.open(path.resolve().parent.parent if is_checkpoint else path)
    return load_config(base=run.description["config"])


def load_newest(path: Path, say: Callable[[str], object], load: Callable[[Path], T]) -> tuple[Path, T]:
    """Load the newest sound checkpoint of a run; return it, with what `load` returns.

    Args:
        path: The run, or one of its checkpoints.
        say: Called with a message for each corrupt checkpoint that is skipped.
        load: Loads a checkpoint, and raises CorruptCheckpointError if it is corrupt.

    Raises:
        CheckpointError: There is no sound checkpoint.
    """
    found = newest_sound(resolve(path), SingleProcess(), say, load)
    if found is None:
        raise CheckpointError(f"{path} has no sound checkpoint")
    return found


def load_pieces(checkpoint: Path, pieces: Sequence[Piece]) -> None:
    """Fill pieces from a checkpoint, and verify all of it meanwhile; errors as in `load_verified`."""
    load_verified(checkpoint, read_manifest(checkpoint), SingleProcess(), fresh=pieces)

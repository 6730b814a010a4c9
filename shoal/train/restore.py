"""Load the model that a run trained, on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from shoal.checkpoint import Piece, SingleProcess, load, newest_verified, resolve
from shoal.errors import CheckpointError
from shoal.run import Run
from shoal.train.config import TrainConfig, load_config
from shoal.train.located import build_model
from shoal.train.state import fixed_pieces

__all__ = ["load_model", "newest_of"]


def load_model(path: Path, say: Callable[[str], object]) -> tuple[nn.Module, TrainConfig]:
    """Return the model of a run from its newest sound checkpoint, on the CPU in fp32.

    Args:
        path: The run, or one of its checkpoints.
        say: Called with a message for each corrupt checkpoint that is skipped.

    Returns:
        The model and the run's configuration.

    Raises:
        RunError: The path is not a run's.
        CheckpointError: There is no sound checkpoint.
    """
    config, checkpoint = newest_of(path, say)
    model = build_model(config, "cpu")
    trained = [
        Piece.whole(f"model/{name}", parameter.detach())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    load(checkpoint, trained + fixed_pieces(model), SingleProcess())
    return model, config


def newest_of(path: Path, say: Callable[[str], object]) -> tuple[TrainConfig, Path]:
    """Return the configuration of a run, and its newest sound checkpoint; see `load_model`."""
    is_checkpoint = (path / "manifest.json").is_file()
    run = Run.open(path.resolve().parent.parent if is_checkpoint else path)
    config = load_config(base=run.description["config"])
    checkpoint = newest_verified(resolve(path), SingleProcess(), say)
    if checkpoint is None:
        raise CheckpointError(f"{path} has no sound checkpoint")
    return config, checkpoint

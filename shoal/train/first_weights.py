"""The weights of another run, with which a run begins: fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from shoal.checkpoint import TensorRecord, read_manifest, resolve
from shoal.errors import CheckpointError, ConfigError, nearest
from shoal.parallel import LocalUpdates
from shoal.train.portable import load
from shoal.train.trainer import Trainer

__all__ = ["begin_from", "require_weights"]

_KINDS = "model", "fixed"  # beginnings of the names of a checkpoint's weights


def begin_from(trainer: Trainer, given: str) -> None:
    """Load the weights of a run or a checkpoint, and nothing else; all ranks call it before the first step.

    Raises:
        CheckpointError: There is no sound checkpoint, or it does not fit the model.
    """
    load(given, trainer.parallel)
    if isinstance(trainer.optimizer, LocalUpdates):
        trainer.optimizer.set_step(0)  # what workers change is counted from these weights


def require_weights(given: str, model: nn.Module) -> None:
    """Refuse weights that a model does not fit, before any rank starts. Only manifests are read.

    Args:
        given: A run, a checkpoint, or a directory of checkpoints.
        model: The model, of any device.

    Raises:
        ConfigError: There is no checkpoint, or it is of another model.
    """
    try:
        newest = resolve(Path(given))[0]
        saved = read_manifest(newest).tensors
    except CheckpointError as error:
        raise ConfigError(
            f"init={given} cannot be begun from: {error}",
            possible="a run, a checkpoint such as runs/NAME/checkpoints/step-00000100, or their directory",
            change="correct the path",
        ) from None
    for name, parameter in model.named_parameters():
        found = next((saved[path] for kind in _KINDS if (path := f"{kind}/{name}") in saved), None)
        if found is None or found.shape != tuple(parameter.shape):
            raise ConfigError(
                f"init={given} does not fit the model: {_misfit(name, tuple(parameter.shape), found, saved)}",
                possible="the model and model_options of the run that saved it, which its run.json has",
                change="give that model, or other weights",
            )


def _misfit(
    name: str, shape: tuple[int, ...], found: TensorRecord | None, saved: Mapping[str, TensorRecord]
) -> str:
    if found is not None:
        return f"{name} has shape {list(found.shape)} there, and {list(shape)} here"
    names = [path.partition("/")[2] for path in saved if path.partition("/")[0] in _KINDS]
    return f"it has no {name}{nearest(name, names)}"

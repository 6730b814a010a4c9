"""A configuration with paths valid in any folder, so that a run can be resumed and sampled from anywhere."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.data.sources import PREFIX, absolute_reference
from shoal.errors import ModelError
from shoal.models import add_adapters, build, can_read_in_parts
from shoal.train.config import TrainConfig
from shoal.train.deferred_init import put_off_first_values

_HUGGING_FACE = "hf:"


def located(config: TrainConfig, before: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the configuration with absolute paths.

    A path that does not exist stays as given, for the error that will name it.

    Args:
        config: The configuration as given in the current folder.
        before: The configuration of the run that is resumed, whose paths are absolute.
    """
    data = config.data
    sources = tuple(_absolute(source) for source in data.sources)
    return config.model_copy(
        update={
            "model": _HUGGING_FACE + _absolute(config.model.removeprefix(_HUGGING_FACE))
            if config.model.startswith(_HUGGING_FACE)
            else config.model,
            "model_folder": _model_folder(config, before or {}),
            "init": _absolute(config.init),
            "offload_folder": config.offload_folder
            and str(Path(config.offload_folder).expanduser().absolute()),
            "cluster": _absolute_cluster(config.cluster),
            "data": data.model_copy(
                update={
                    "source": _with_paths(data.source, sources),
                    "tokenizer": _absolute(data.tokenizer),
                    "validation": _absolute(data.validation),
                    "cache": None if data.cache is None else data.cache.absolute(),
                }
            ),
        }
    )


def _with_paths(
    source: str | tuple[str, ...] | dict[str, float], paths: tuple[str, ...]
) -> str | tuple[str, ...] | dict[str, float]:
    """Return the sources with these paths in place of their own."""
    if isinstance(source, dict):
        return dict(zip(paths, source.values(), strict=True))
    return paths[0] if isinstance(source, str) else paths


def build_model(config: TrainConfig, device: torch.device | str) -> nn.Module:
    """Build the model of a configuration; from now on modules are searched in `model_folder` first.

    Raises:
        ModelError: As from `shoal.models.build`, or a target of `lora` is not in the model.
        MissingExtraError: As from `shoal.models.build`, or `lora` without the extra `lora`.
    """
    if config.model_folder and config.model_folder not in sys.path[:1]:
        sys.path.insert(0, config.model_folder)
    model = build(config.model, overrides=config.model_options, device=device)
    if (rank := config.lora.rank) is not None:
        lora = config.lora
        add_adapters(
            model, rank=rank, alpha=lora.alpha, targets=lora.targets, dropout=lora.dropout, seed=config.seed
        )
    return model


def first_model(config: TrainConfig, device: torch.device, *, goes_on: bool) -> nn.Module:
    """Build the model to train: without memory if `parallelize` can fill it, otherwise as its maker does.

    Args:
        config: The configuration.
        device: The device of a model with memory.
        goes_on: Whether a checkpoint will be loaded, so that first values can be put off.
    """
    empty = _without_memory(config)
    if empty is not None:
        if goes_on:
            put_off_first_values(empty)
        return empty
    torch.manual_seed(config.seed)
    return build_model(config, device)


def shape_of(config: TrainConfig) -> nn.Module:
    """Build the model for its shape alone, without memory if that is possible."""
    empty = _without_memory(config)
    return build_model(config, "cpu") if empty is None else empty


def _without_memory(config: TrainConfig) -> nn.Module | None:
    """Return the model on the meta device if it can give each parameter its first values; else None."""
    if ":" not in config.model:
        return build_model(config, "meta")
    if can_read_in_parts(Path(config.model.removeprefix(_HUGGING_FACE))):
        with contextlib.suppress(ModelError):  # transformers may know weights with other names
            return build_model(config, "meta")
    return None


def _model_folder(config: TrainConfig, before: Mapping[str, Any]) -> str:
    named = _named_functions(config.model_dump(mode="json"))
    if not named:
        return ""
    recorded = before.get("model_folder", "")
    is_given = config.model_folder != recorded
    if config.model_folder and (is_given or named <= _named_functions(before)):
        return str(Path(config.model_folder).expanduser().absolute())
    return os.getcwd()


def _named_functions(config: Mapping[str, Any]) -> set[str]:
    """Return the values of a configuration that are `package.module:function`."""
    optimizer = config.get("optimizer", {})
    named = (config.get("model", ""), optimizer.get("name", ""), optimizer.get("schedule", ""))
    return {text for text in named if ":" in text and not text.startswith(_HUGGING_FACE)}


def _absolute(text: str) -> str:
    """Return the absolute path of a file or folder that exists; any other text unchanged."""
    if text.startswith(PREFIX):
        return absolute_reference(text)
    path = Path(text).expanduser()
    return str(path.absolute()) if text and path.exists() and not _is_word(text) else text


def _is_word(text: str) -> bool:
    """Return whether the text has a meaning of its own, whatever files exist."""
    return text in ("stdlib", "bytes") or text.startswith("ids:")


def _absolute_cluster(text: str) -> str:
    name, colon, number = text.rpartition(":")
    if not colon:
        name, number = text, ""
    is_file = name.endswith(".toml") or "/" in name
    return _absolute(name) + colon + number if is_file else text

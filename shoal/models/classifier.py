"""Hugging Face's sequence classifiers: their classes, and the first values of a head that no folder has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.errors import ModelError
from shoal.models.normal import normal

_ENDING = "ForSequenceClassification"
_COUNTS = "id2label", "num_labels"


@dataclass(frozen=True, slots=True)
class Classifier:
    """The classifier that a folder's model is, or becomes with a new head.

    Attributes:
        architecture: Its class in transformers.
        classes: Names of its classes, in order; empty if the folder has no head and names no classes.
        padding: Id of its padding token; None if it has none.
    """

    architecture: str
    classes: tuple[str, ...]
    padding: int | None

    @property
    def is_named(self) -> bool:
        """Whether its classes have names of their own."""
        return self.classes != tuple(f"LABEL_{number}" for number in range(len(self.classes)))


def is_classifier(config: Any) -> bool:
    """Return whether a configuration of transformers is a sequence classifier's."""
    return any(name.endswith(_ENDING) for name in getattr(config, "architectures", None) or ())


def read_classifier(path: Path, config: Any, options: Mapping[str, Any]) -> Classifier:
    """Return the classifier of a folder, or of a `config.json`.

    Args:
        path: The folder, or the file.
        config: Its configuration in transformers, with the options.
        options: Entries of the configuration that were changed.

    Raises:
        ModelError: transformers has no sequence classifier of its kind.
    """
    from transformers.models.auto import modeling_auto

    architecture = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if architecture is None:
        raise ModelError(
            f"{str(path)!r} is a {config.model_type} model, of which transformers has no sequence classifier",
            possible="DistilBERT, BERT, RoBERTa, Llama, GPT-2 and others with a ...ForSequenceClassification",
            change="give another model, or leave out data.label",
        )
    file = path / "config.json" if path.is_dir() else path
    entries = json.loads(file.read_text(encoding="utf-8"))
    names = tuple(name for _, name in sorted((config.id2label or {}).items()))
    padding = getattr(config, "pad_token_id", None)
    found = Classifier(architecture, names, padding)
    is_told = is_classifier(config) or any(name in options for name in _COUNTS)
    if is_told or (found.is_named and "id2label" in entries):
        return found
    return Classifier(architecture, (), padding)


def is_head(model: nn.Module, name: str) -> bool:
    """Return whether a parameter belongs to the head of a classifier, which weights of a base model lack."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return is_classifier(model.config) and (not name.startswith(prefix) or ".pooler." in name)


def fill_head(model: nn.Module, name: str, tensor: torch.Tensor, seed: int) -> None:
    """Fill a new parameter: matrices with normal numbers that depend on seed and name, biases with 0."""
    if tensor.dim() < 2:
        tensor.zero_()
        return
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    config: Any = model.config
    tensor.copy_(normal(tensor.shape, key, tensor.device) * getattr(config, "initializer_range", 0.02))


def new_parameters(model: nn.Module) -> tuple[str, ...]:
    """Return the parameters that the folder of a Hugging Face model lacks, and that get new values."""
    return tuple(getattr(model, "new_parameters", ()))

"""Sequence classification: the classes of labelled data and of the model, brought together.

With `data.label`, `hf:PATH` names a model with a head for classes. The number of classes and their names are
the model's if its folder has such a head or names classes. Otherwise they are the data's, and the head begins
with new values.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from torch import nn

from shoal.data import AnyCorpus, MixedCorpus, are_numbers, numbers_of, prepare, require_padding
from shoal.errors import ConfigError, PlanError
from shoal.models import classifier_of, is_classifier
from shoal.spec.plan import Plan
from shoal.train.config import TrainConfig

_HUGGING_FACE = "hf:"
_NAMES = "id2label"


def with_classes(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the classes of a Hugging Face model in `model_options`.

    A run keeps them, so that its model is built without its data later. Without `data.label`, or with a model
    of the user's own, the configuration is unchanged.

    Raises:
        UserError: The data or the model cannot be read, or a label is no class of the model.
    """
    if not config.data.label or not config.model.startswith(_HUGGING_FACE):
        return config
    corpus = prepare(config.data)
    assert not isinstance(corpus, MixedCorpus)  # which has no labels
    found = classifier_of(Path(config.model.removeprefix(_HUGGING_FACE)), config.model_options)
    classes = found.classes
    if are_numbers(corpus.labels):
        classes = classes or tuple(f"LABEL_{number}" for number in range(len(corpus.classes)))
    elif not classes or (not found.is_named and len(classes) == len(corpus.classes)):
        classes = corpus.classes
    numbers_of(corpus.labels, classes)
    options = {name: value for name, value in config.model_options.items() if name != "num_labels"}
    options |= {
        "architectures": [found.architecture],
        _NAMES: {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
    }
    padding = require_padding(corpus.tokenizer)
    if found.padding != padding:
        options["pad_token_id"] = padding
    return config.model_copy(update={"model_options": options})


def prepared(config: TrainConfig) -> AnyCorpus:
    """Return the data of a configuration, with its classes in the order of the model's."""
    corpus = prepare(config.data)
    names = config.model_options.get(_NAMES)
    if isinstance(corpus, MixedCorpus) or not corpus.labels or not names:
        return corpus
    return corpus.with_classes(tuple(names[str(number)] for number in range(len(names))))


def for_model(corpus: AnyCorpus, model: nn.Module) -> AnyCorpus:
    """Return the data as a model takes it: pairs with `token_type_ids` if the model tells two texts apart.

    A model does if its forward names `token_type_ids`, and its configuration, if it has one of Hugging Face,
    has two types or more.
    """
    if isinstance(corpus, MixedCorpus) or "token_type_ids" not in inspect.signature(model.forward).parameters:
        return corpus
    config = getattr(model, "config", None)
    is_own = config is None or not hasattr(config, "model_type")
    return corpus.with_types(is_own or getattr(config, "type_vocab_size", 0) > 1)


def require_classes(config: TrainConfig, model: nn.Module) -> None:
    """Refuse labelled data for a model of tokens, and a classifier without labelled data.

    Raises:
        ConfigError: Data and model do not fit each other.
    """
    if config.data.label and ":" not in config.model:
        raise ConfigError(
            f"data.label={config.data.label} needs a classifier, and {config.model} predicts tokens",
            possible="hf:PATH of a Hugging Face model, or package.module:function for a model that returns "
            "logits [batch, classes]",
            change="give another model, or leave out data.label",
        )
    if not config.data.label and is_classifier(getattr(model, "config", None)):
        raise ConfigError(
            f"the model {config.model} is a sequence classifier, and the data has no labels",
            possible="data.label with the name of a column",
            change="set data.label, or give a causal language model",
        )


def require_data_parallel(config: TrainConfig, plan: Plan) -> None:
    """Refuse Plans that cut the sequences or the layers of a classifier.

    Raises:
        PlanError: The data is labelled, and the Plan does.
    """
    degrees = {name: getattr(plan, name) for name in ("tp", "cp", "pp", "ep")}
    cut = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    if config.data.label and cut:
        raise PlanError(
            f"{', '.join(cut)} was given, and sequence classification (data.label) is trained by data "
            "parallelism only",
            possible="dp with any shard, such as dp=4,shard=zero3",
            change=f"leave out {' and '.join(name.partition('=')[0] for name in cut)}",
        )

"""Hugging Face's sequence classifiers: which weights are read, which are new, and what classes there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from labelled_stand_ins import SHAPES, shape
from torch import nn

from shoal.models import build, classifier_of, new_parameters

transformers = pytest.importorskip("transformers")

THREE = {"id2label": {"0": "bad", "1": "good", "2": "none"}, "label2id": {"bad": 0, "good": 1, "none": 2}}


def as_parts(folder: Path, options: dict[str, object]) -> nn.Module:
    """The model as ranks fill it: built without memory, then each parameter by its name."""
    model = build(f"hf:{folder}", overrides=options, device="meta")
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape)))
    for name, parameter in model.named_parameters():
        model.initialize_parameter(name, parameter, 7)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(18).view(3, 6) % 19 + 1
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] + [0] * 5])
    with torch.no_grad():
        return model.eval()(input_ids=ids * mask, attention_mask=mask).logits


@pytest.mark.parametrize("kind", list(SHAPES))
def test_a_classifier_has_the_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    config = shape(kind, num_labels=3)
    config.pad_token_id = 0
    theirs = transformers.AutoModelForSequenceClassification.from_config(config)
    theirs.save_pretrained(tmp_path)
    for model in (build(f"hf:{tmp_path}"), as_parts(tmp_path, {})):
        assert type(model) is type(theirs)
        assert new_parameters(model) == ()
        torch.testing.assert_close(logits(model), logits(theirs))


@pytest.mark.parametrize(
    ("kind", "saved", "head"),
    [
        ("distilbert", "AutoModel", {"pre_classifier", "classifier"}),
        ("distilbert", "AutoModelForMaskedLM", {"pre_classifier", "classifier"}),
        ("bert", "AutoModelForMaskedLM", {"bert.pooler.dense", "classifier"}),
        ("roberta", "AutoModelForMaskedLM", {"classifier.dense", "classifier.out_proj"}),
        ("llama", "AutoModelForCausalLM", {"score"}),
        ("gpt2", "AutoModelForCausalLM", {"score"}),
    ],
)
def test_weights_of_a_base_model_get_a_new_head(
    tmp_path: Path, kind: str, saved: str, head: set[str]
) -> None:
    torch.manual_seed(0)
    base = getattr(transformers, saved).from_config(shape(kind))
    base.save_pretrained(tmp_path)
    found = classifier_of(tmp_path, {})
    assert found.classes == ()
    options = {"architectures": [found.architecture], "pad_token_id": 0, **THREE}
    model = as_parts(tmp_path, options)
    assert {name.rpartition(".")[0] for name in new_parameters(model)} == head
    whole = build(f"hf:{tmp_path}", overrides=options)
    assert set(new_parameters(whole)) == set(new_parameters(model))
    prefix = base.base_model_prefix
    stored = {name.removeprefix(f"{prefix}."): value for name, value in base.named_parameters()}
    for name, value in model.named_parameters():
        if name in new_parameters(model):
            assert value.any() or name.endswith("bias")
            assert value.abs().max() < 0.2
        else:
            assert torch.equal(value, stored[name.removeprefix(f"{prefix}.")]), name
    again = as_parts(tmp_path, options)
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True)
    )
    assert model.config.num_labels == 3
    assert logits(model).shape == (3, 3)


def test_the_classes_of_a_folder_are_those_of_its_head_or_of_its_names(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    entries = {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]}
    for more, options, classes in [
        ({}, {}, ()),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, {}, ()),
        ({"id2label": {"0": "no", "1": "yes"}}, {}, ("no", "yes")),
        ({"architectures": ["DistilBertForSequenceClassification"]}, {}, ("LABEL_0", "LABEL_1")),
        ({}, {"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({}, THREE, ("bad", "good", "none")),
    ]:
        file.write_text(json.dumps(entries | more))
        found = classifier_of(file, options)
        assert (found.architecture, found.classes) == ("DistilBertForSequenceClassification", classes)

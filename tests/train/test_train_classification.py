"""Sequence classification: equal losses under every sharding, and a folder that transformers reads."""

from __future__ import annotations

import json

import pytest
import torch
from labelled_stand_ins import shape, texts, write_tokenizer, write_tsv
from run_stand_ins import shoal, train

from shoal.spec.run import Run
from shoal.train import load_model

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of labelled texts, and a folder with a DistilBERT without a head and its tokenizer."""
    folder = tmp_path_factory.mktemp("labelled")
    write_tsv(folder / "train.tsv", texts(300))
    write_tsv(folder / "dev.tsv", texts(60, seed=1))
    torch.manual_seed(0)
    transformers.AutoModelForMaskedLM.from_config(shape("distilbert")).save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    return folder


def words_of(folder, *more):
    settings = (
        f"model=hf:{folder / 'model'}",
        f"data.tokenizer={folder / 'model' / 'tokenizer.json'}",
        f"data.source={folder / 'train.tsv'}",
        f"data.validation={folder / 'dev.tsv'}",
        f"data.cache={folder / 'cache'}",
        "data.field=sentence",
        "data.label=label",
        "sequence=12",
        "batch=16",
        "steps=8",
        "optimizer.warmup=2",
        "optimizer.learning_rate=3e-3",
        *more,
    )
    return [word for each in settings for word in ("--set", each)]


def values_of(run, name):
    return [values[name] for values in Run(run).metrics() if name in values]


@pytest.fixture(scope="module")
def alone(ranks, folder):
    """The run of one device."""
    train(ranks, [*words_of(folder), "--plan", "dp=1", "--run", "alone"], folder)
    return folder / "alone"


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3"])
def test_two_ranks_have_the_losses_of_one_device(ranks, folder, alone, tmp_path, shard):
    words = [*words_of(folder), "--plan", f"dp=2,shard={shard},microbatch=4", "--run", "run"]
    train(ranks, words, tmp_path, on=2)
    for name in ("loss", "validation_loss", "validation_accuracy"):
        assert values_of(tmp_path / "run", name) == pytest.approx(values_of(alone, name), rel=2e-4), name
    assert len(values_of(alone, "loss")) == 8


def test_a_run_goes_on_with_another_number_of_ranks(ranks, folder, alone, tmp_path):
    words = [*words_of(folder, "checkpoint.every=3", "checkpoint.keep=9"), "--plan", "dp=2,shard=zero3"]
    train(ranks, [*words, "--run", "first"], tmp_path, on=2)
    saved = tmp_path / "first" / "checkpoints" / "step-00000003"
    train(ranks, ["--resume", str(saved), "--plan", "dp=1", "--run", "second"], tmp_path)
    assert values_of(tmp_path / "second", "loss") == pytest.approx(values_of(alone, "loss")[3:], rel=2e-4)


def test_the_export_is_exact_and_has_the_loss_of_the_run(ranks, folder, alone, tmp_path):
    ((code, _, err),) = ranks.run(shoal, 1, ["export", str(alone), str(tmp_path / "out")], tmp_path)
    assert code == 0, err
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == "DistilBertForSequenceClassification"
    ours, _ = load_model(alone, print)
    expected, found = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    rows = texts(60, seed=1)
    inputs = tokenizer([text for text, _ in rows], padding="max_length", max_length=12, return_tensors="pt")
    with torch.no_grad():
        loss = theirs(**inputs, labels=torch.tensor([label for _, label in rows])).loss.item()
    assert loss == pytest.approx(values_of(alone, "validation_loss")[-1], rel=1e-5)


def test_the_run_says_what_is_new_and_how_accurate_it_is(ranks, folder, tmp_path):
    settings = "steps=200", "optimizer.learning_rate=1e-2", "validation.every=0"
    words = ["train", *words_of(folder, *settings), "--plan", "dp=1", "--nproc", "1", "--run", "run"]
    ((code, out, err),) = ranks.run(shoal, 1, words, tmp_path)
    assert code == 0
    assert "new values for pre_classifier.weight, pre_classifier.bias, classifier.weight" in err
    accuracy = values_of(tmp_path / "run", "validation_accuracy")[-1]
    majority = sum(label for _, label in texts(60, seed=1)) / 60
    assert accuracy > majority + 0.1
    assert f"nats a text, accuracy {accuracy:.3f}" in out
    ((code, out, _),) = ranks.run(shoal, 1, ["report", "run", "--json"], tmp_path)
    assert json.loads(out)["validation_accuracy"]["last"]["value"] == accuracy
    ((code, _, err),) = ranks.run(shoal, 1, ["sample", "run"], tmp_path)
    assert code == 2
    assert "trained a classifier, which makes no text" in err


def test_names_of_classes_are_matched_with_those_of_the_model(ranks, folder, tmp_path):
    named = [(text, ("Negative", "POSITIVE")[label]) for text, label in texts(100)]
    file = write_tsv(tmp_path / "named.tsv", named)
    options = 'model_options={id2label={0="POSITIVE", 1="NEGATIVE"}}'
    words = words_of(folder, f"data.source={file}", "data.validation=", "steps=1", options)
    train(ranks, [*words, "--plan", "dp=1", "--run", "run"], tmp_path)
    _, config = load_model(tmp_path / "run", print)
    assert config.model_options["id2label"] == {"0": "POSITIVE", "1": "NEGATIVE"}
    assert config.model_options["label2id"] == {"POSITIVE": 0, "NEGATIVE": 1}
    words = words_of(folder, f"data.source={file}", "data.validation=", "steps=1")
    train(ranks, [*words, "--plan", "dp=1", "--run", "other"], tmp_path)
    assert load_model(tmp_path / "other", print)[1].model_options["id2label"] == {
        "0": "Negative",
        "1": "POSITIVE",
    }


@pytest.mark.parametrize("kind", ["distilbert", "bert"])
def test_an_export_of_pairs_has_the_loss_of_the_run_with_types_where_the_model_has_them(
    ranks, folder, tmp_path, kind
):
    model = tmp_path / kind
    torch.manual_seed(0)
    transformers.AutoModelForMaskedLM.from_config(shape(kind)).save_pretrained(model)
    write_tokenizer(model)
    firsts, seconds = texts(60), texts(60, seed=1)
    rows = [
        {"a": one, "b": two, "label": mine} for (one, mine), (two, _) in zip(firsts, seconds, strict=True)
    ]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(map(json.dumps, rows)))
    settings = (
        f"model=hf:{model}",
        f"data.tokenizer={model / 'tokenizer.json'}",
        f"data.source={pairs}",
        f"data.validation={pairs}",
        "data.field=a",
        "data.pair=b",
        "steps=4",
    )
    train(ranks, [*words_of(folder, *settings), "--plan", "dp=2", "--run", "run"], tmp_path, on=2)
    ((code, _, err),) = ranks.run(shoal, 1, ["export", "run", str(tmp_path / "out")], tmp_path)
    assert code == 0, err
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer(
        [row["a"] for row in rows],
        [row["b"] for row in rows],
        padding="max_length",
        truncation=True,
        max_length=12,
        return_token_type_ids=kind == "bert",
        return_tensors="pt",
    )
    with torch.no_grad():
        loss = theirs(**inputs, labels=torch.tensor([row["label"] for row in rows])).loss.item()
    assert loss == pytest.approx(values_of(tmp_path / "run", "validation_loss")[-1], rel=1e-5)


FACTORY = """
from torch import nn

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        held = attention_mask.unsqueeze(-1)
        return self.head((self.words(input_ids) * held).sum(1) / held.sum(1))
"""


def test_a_model_of_ones_own_gets_ids_and_mask(ranks, folder, tmp_path):
    (tmp_path / "bag_at_home.py").write_text(FACTORY)
    settings = "model=bag_at_home:Bag", "steps=100", "optimizer.learning_rate=0.3"
    train(
        ranks, [*words_of(folder, *settings), "--plan", "dp=2,precision=bf16", "--run", "run"], tmp_path, on=2
    )
    assert values_of(tmp_path / "run", "validation_accuracy")[-1] > 0.95


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["plan=dp=1,tp=2"], "tp=2 was given, and sequence classification (data.label) is trained by data"),
        (["plan=pp=2"], "pp=2 was given"),
        (["model=tiny"], "data.label=label needs a classifier, and tiny predicts tokens"),
        (['model_options={id2label={0="bad"}}'], "the data has the label '1', which is no class"),
        (["sequence=40"], "longer than the context of the model"),
        (["data.label=lable"], "did you mean 'label'"),
        (
            ["data.label=", 'model_options={architectures=["DistilBertForSequenceClassification"]}'],
            "is a sequence classifier, and the data has no labels",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_rank_starts(ranks, folder, tmp_path, settings, complaint):
    words = ["train", *words_of(folder, *settings), "--run", "run"]
    ((code, _, err),) = ranks.run(shoal, 1, words, tmp_path)
    assert code == 2, err
    assert complaint in err
    assert not (tmp_path / "run").exists()

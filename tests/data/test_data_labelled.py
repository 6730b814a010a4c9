"""Labelled texts as samples: one text each, padded or cut, with its class."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from labelled_stand_ins import texts, write_tokenizer, write_tsv

from shoal.data import DataConfig, LabelledSamples, Loader, prepare
from shoal.errors import ConfigError, DataError

Configure = Callable[..., DataConfig]

pytest.importorskip("tokenizers")


@pytest.fixture
def labelled(tmp_path: Path, configure: Configure) -> Callable[..., DataConfig]:
    """Makes the configuration of labelled data with BERT's kind of tokenizer."""
    folder = write_tokenizer(tmp_path / "tokenizer")

    def make(source: Path, **fields: object) -> DataConfig:
        return configure(
            source, **{"tokenizer": str(folder), "field": "sentence", "label": "label", **fields}
        )

    return make


def write(path: Path, rows: list[tuple[str, int]]) -> Path:
    columns = {"sentence": [text for text, _ in rows], "label": [label for _, label in rows]}
    if path.suffix == ".tsv":
        return write_tsv(path, rows)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("label", "sentence"), *((label, text) for text, label in rows)])
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"sentence": text, "label": label}) for text, label in rows))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table(columns), path)
    return path


def everything(samples: LabelledSamples) -> list[np.ndarray]:
    inputs, classes = samples.batch(np.arange(len(samples)))
    return [inputs["input_ids"].numpy(), inputs["attention_mask"].numpy(), classes.numpy()]


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl", ".parquet"])
def test_samples_are_what_transformers_makes_of_the_texts(
    tmp_path: Path, labelled: Configure, suffix: str
) -> None:
    transformers = pytest.importorskip("transformers")
    rows = texts(50)
    train, validation = write(tmp_path / f"train{suffix}", rows), write(tmp_path / f"dev{suffix}", rows[:9])
    corpus = prepare(labelled(train, validation=str(validation)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    options = {"padding": "max_length", "truncation": True, "max_length": 8, "return_tensors": "np"}
    expected = theirs([text for text, _ in rows], **options)
    ids, mask, classes = everything(corpus.samples("train", 8))
    assert np.array_equal(ids, expected["input_ids"])
    assert np.array_equal(mask, expected["attention_mask"])
    assert classes.tolist() == [label for _, label in rows]
    held_out = everything(corpus.samples("validation", 8))
    assert sorted(map(tuple, held_out[0])) == sorted(map(tuple, ids[:9]))
    assert held_out[2].sum() == classes[:9].sum()
    assert corpus.classes == ("0", "1")


def test_a_fraction_of_the_rows_is_kept_for_validation_and_an_epoch_has_each_sample_once(
    tmp_path: Path, labelled: Configure
) -> None:
    rows = [(f"fish {'film ' * (number % 7)}", number % 3) for number in range(400)]
    corpus = prepare(labelled(write_tsv(tmp_path / "all.tsv", rows), validation_fraction=0.2))
    train, validation = corpus.samples("train", 6), corpus.samples("validation", 6)
    assert len(train) + len(validation) == 400
    assert 80 - 40 < len(validation) < 80 + 40  # a deviation of 8
    seen = Loader(train, seed=3, batch_size=len(train)).fetch(0, len(train))
    assert sorted(map(tuple, seen[0]["input_ids"].tolist())) == sorted(map(tuple, everything(train)[0]))
    assert np.bincount(seen[1]).tolist() == np.bincount(everything(train)[2]).tolist()


def test_texts_are_tokenized_once_for_any_sequence_and_labels_may_be_names(
    tmp_path: Path, labelled: Configure
) -> None:
    rows = [(text, ("poor", "good")[label]) for text, label in texts(60)]
    config = labelled(write_tsv(tmp_path / "all.tsv", rows))
    first, second = prepare(config), prepare(config)
    assert isinstance(second.tokens, np.memmap)
    assert first.classes == second.classes == ("good", "poor")
    assert first.fingerprint == second.fingerprint
    short, long = second.samples("train", 4), second.samples("train", 12)
    assert everything(short)[0].shape == (len(long), 4)
    assert np.array_equal(everything(short)[2], everything(long)[2])
    swapped = [(text, {"poor": "good", "good": "poor"}[label]) for text, label in rows]
    config = labelled(write_tsv(tmp_path / "all.tsv", swapped))
    assert prepare(config).fingerprint != first.fingerprint


def test_rows_of_csv_and_tsv_are_documents_too(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "a.csv").write_text('\ufeffid,text\n1,"one, ""two""\nthree"\n2,\n3,four\n')
    (tmp_path / "b.tsv").write_text('text\tid\n"quoted" \t1\r\n\nfive\t2\n')
    corpus = prepare(configure(tmp_path, suffixes=(".csv", ".tsv")))
    documents = set(corpus.tokens.tobytes().split(b"\0"))
    assert documents == {b'one, "two"\nthree', b"four", b'"quoted" ', b"five", b""}


def test_a_file_may_be_for_validation_only(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "train.txt").write_text("t" * 500)
    (tmp_path / "held-out.txt").write_text("v" * 20)
    corpus = prepare(configure(tmp_path / "train.txt", validation=str(tmp_path / "held-out.txt")))
    assert bytes(corpus.tokens) == b"t" * 500 + b"\0" + b"v" * 20 + b"\0"
    assert corpus.boundary(8) == 501
    with pytest.raises(DataError, match="there are 21 tokens"):
        corpus.samples("validation", 30)


FIRST = ("fine film", 1), ("dull film", 0)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (("a film", -1), r"line 4 of .* has '-1' in the column 'label', which is no class"),
        (("a film", 0.5), r"line 4 of .* has '0\.5' in the column 'label', which is no class"),
        (("a film", ""), r"line 4 of .* has '' in the column 'label', which is no class"),
        ((" ", 1), r"line 4 of .* has an empty text in 'sentence'"),
        (("a\tfilm", 1), r"line 4 of .* has 3 columns\n.*possible: 2 columns.*sentence, label"),
    ],
)
def test_a_bad_row_is_refused_by_its_line(
    tmp_path: Path, labelled: Configure, row: tuple[str, object], complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        prepare(labelled(write_tsv(tmp_path / "all.tsv", [*FIRST, row])))
    assert not list((tmp_path / "cache").glob("*.tokens"))


@pytest.mark.parametrize("suffix", [".tsv", ".jsonl", ".parquet"])
def test_a_missing_column_is_refused_with_those_that_are_there(
    tmp_path: Path, labelled: Configure, suffix: str
) -> None:
    file = write(tmp_path / f"all{suffix}", list(FIRST))
    with pytest.raises(DataError, match=r"has no column 'lable' \(did you mean 'label'\?\)") as caught:
        prepare(labelled(file, label="lable"))
    assert "sentence, label" in caught.value.possible
    with pytest.raises(DataError, match="no text in the field 'txt'") as caught:
        prepare(labelled(file, field="txt"))
    assert "sentence" in caught.value.possible


def test_what_cannot_be_classified_is_refused(tmp_path: Path, labelled: Configure) -> None:
    train = write_tsv(tmp_path / "train.tsv", list(FIRST))
    dev = write_tsv(tmp_path / "dev.tsv", [*FIRST, ("a film", 2)])
    with pytest.raises(DataError, match="validation has the class '2', and no text to train on has it"):
        prepare(labelled(train, validation=str(dev)))
    with pytest.raises(DataError, match="all texts have the label '1'"):
        prepare(labelled(write_tsv(tmp_path / "one.tsv", [FIRST[0]] * 9), validation_fraction=0.01))
    (tmp_path / "a.txt").write_text("fine film")
    with pytest.raises(DataError, match="has no columns, and data"):
        prepare(labelled(tmp_path / "a.txt"))
    with pytest.raises(ConfigError, match="sequence length 2 has no room") as caught:
        prepare(labelled(train, validation=str(train))).samples("train", 2)
    assert "3 tokens or more" in caught.value.possible
    unpadded = write_tokenizer(tmp_path / "unpadded", padding="[NOTHING]")
    with pytest.raises(DataError, match="has no padding token"):
        prepare(labelled(train, tokenizer=str(unpadded)))

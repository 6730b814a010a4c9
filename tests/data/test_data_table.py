"""Datasets of the package `datasets` as sources: the rows that the package gives, and never the network."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from chat_stand_ins import conversations
from chat_stand_ins import write_tokenizer as write_chat_tokenizer
from labelled_stand_ins import texts, write_tokenizer

from shoal.data import Corpus, DataConfig, prepare
from shoal.data.sources import absolute_reference
from shoal.errors import DataError, MissingExtraError

Configure = Callable[..., DataConfig]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The package, with a cache of the test's own, and without a network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hugging-face")

    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return datasets


@pytest.fixture
def folder(datasets, tmp_path: Path) -> Path:
    """A folder of `save_to_disk` with labelled rows in two splits."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["poor", "good"])}
    )

    def split(rows: list[tuple[str, int]]):
        columns = {"text": [text for text, _ in rows], "label": [label for _, label in rows]}
        return datasets.Dataset.from_dict(columns, features=features)

    whole = datasets.DatasetDict(train=split(texts(2000)), validation=split(texts(9, seed=1)))
    whole.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def documents(corpus: object) -> Iterator[str]:
    assert isinstance(corpus, Corpus)
    return (text.decode() for text in corpus.tokens.tobytes().split(b"\0")[:-1])


def test_texts_of_a_saved_dataset_are_documents(folder: Path, datasets, configure: Configure) -> None:
    source = f"datasets:{folder}"
    corpus = prepare(configure(f"{source}#train", validation=f"{source}#validation"))
    expected = [*datasets.load_from_disk(folder)["train"]["text"], *(text for text, _ in texts(9, seed=1))]
    assert list(documents(corpus)) == expected
    assert isinstance(prepare(configure(source, validation=f"{source}#validation")).tokens, np.memmap)
    mixed = prepare(configure("x").model_copy(update={"source": {source: 1.0, f"{source}#validation": 3.0}}))
    assert mixed.samples("train", 8).counts[1] > 2 * mixed.samples("train", 8).counts[0]


def test_class_names_of_a_class_label_become_labels(folder: Path, configure: Configure) -> None:
    tokenizer = write_tokenizer(folder.parent / "tokenizer")
    given = {"tokenizer": str(tokenizer), "label": "label", "validation": f"datasets:{folder}#validation"}
    corpus = prepare(configure(f"datasets:{folder}#train", **given))
    assert corpus.classes == ("good", "poor")
    samples = corpus.samples("train", 8)
    _, classes = samples.batch(np.arange(len(samples)))
    assert [corpus.classes[number] for number in classes] == [
        ("poor", "good")[label] for _, label in texts(2000)
    ]


def test_a_column_of_messages_holds_conversations(datasets, tmp_path: Path, configure: Configure) -> None:
    pytest.importorskip("transformers")
    talks = conversations(8)
    datasets.Dataset.from_dict({"talk": talks}).save_to_disk(tmp_path / "talks")
    (tmp_path / "talks.jsonl").write_text("\n".join(json.dumps({"talk": talk}) for talk in talks))
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer")
    ours, lines = (
        prepare(configure(source, tokenizer=str(tokenizer), messages="talk", validation=str(source)))
        for source in (f"datasets:{tmp_path / 'talks'}", tmp_path / "talks.jsonl")
    )
    assert np.array_equal(ours.tokens, lines.tokens)


def test_a_folder_of_files_and_a_name_in_the_cache_are_read_without_a_network(
    datasets, tmp_path: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    for split in ("train", "test"):
        (local / f"{split}.jsonl").write_text("\n".join(json.dumps({"text": split}) for _ in range(3)))
    corpus = prepare(configure(f"datasets:{local}#test", validation=f"datasets:{local}"))
    assert list(documents(corpus)) == ["test"] * 3 + ["train"] * 3
    assert absolute_reference(f"datasets:{local}:default#test") == f"datasets:{local}:default#test"
    monkeypatch.chdir(local)
    assert absolute_reference("datasets:.#test").partition("#")[0] == f"datasets:{local}"
    local.rename(tmp_path / "moved")  # so that only what load_dataset has kept is left
    kept = prepare(configure("datasets:local:default#test", validation="datasets:local#train"))
    assert list(documents(kept)) == list(documents(corpus))


def test_what_is_not_there_is_refused_with_what_is(
    folder: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"no split 'trian' \(did you mean 'train'\?\)") as caught:
        prepare(configure(f"datasets:{folder}#trian"))
    assert caught.value.possible == "train, validation"
    with pytest.raises(DataError, match=r"no text in the field 'txt' \(did you mean 'text'\?\)"):
        prepare(configure(f"datasets:{folder}", field="txt"))
    with pytest.raises(DataError, match=r"no column 'lable' \(did you mean 'label'\?\)"):
        prepare(configure(f"datasets:{folder}", label="lable", tokenizer="bytes"))
    with pytest.raises(DataError, match=r"'datasets:nobody/nothing' cannot be read.*") as caught:
        prepare(configure("datasets:nobody/nothing"))
    assert "nothing is downloaded" in caught.value.possible
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingExtraError, match="needs the package 'datasets'") as missing:
        prepare(configure(f"datasets:{folder}"))
    assert "shoal[datasets]" in missing.value.change

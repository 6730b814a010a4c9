from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.data import Corpus, DataConfig, open_tokenizer, prepare
from shoal.data.token_writer import in_validation
from shoal.errors import ConfigError, DataError

Configure = Callable[..., DataConfig]


def write_files(folder: Path, count: int) -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    contents = {f"{index:04}.txt": f"document {index:04} has words\n".encode() for index in range(count)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return contents


def documents(tokens: np.ndarray) -> set[bytes]:
    return set(tokens.tobytes().rstrip(b"\0").split(b"\0"))


def split(corpus: Corpus, sequence: int) -> tuple[set[bytes], set[bytes]]:
    boundary = corpus.boundary(sequence)
    return documents(corpus.tokens[:boundary]), documents(corpus.tokens[boundary:])


def test_the_stream_is_the_training_documents_then_the_validation_documents(
    tmp_path: Path, configure: Configure
) -> None:
    contents = write_files(tmp_path / "data", 200)
    corpus = prepare(configure(tmp_path / "data", validation_fraction=0.1))
    expected = [
        b"".join(content + b"\0" for name, content in contents.items() if in_validation(name, 0.1) == held)
        for held in (False, True)
    ]
    assert corpus.tokens.tobytes() == b"".join(expected)
    assert corpus.documents_end == corpus.boundary(32) == len(expected[0])


def test_train_and_validation_share_no_document(tmp_path: Path, configure: Configure) -> None:
    contents = write_files(tmp_path / "data", 300)
    train, validation = split(prepare(configure(tmp_path / "data")), 32)
    assert not train & validation
    assert train | validation == set(contents.values())
    # 5 % of 300 is 15, with a deviation of sqrt(300 * 0.05 * 0.95) < 4; six of them either way.
    assert 0 < len(validation) < 15 + 24


def test_adding_documents_moves_none_between_the_splits(tmp_path: Path, configure: Configure) -> None:
    write_files(tmp_path / "data", 300)
    train, validation = split(prepare(configure(tmp_path / "data")), 32)
    write_files(tmp_path / "data", 400)
    more_train, more_validation = split(prepare(configure(tmp_path / "data")), 32)
    assert train < more_train
    assert validation < more_validation


def test_moving_the_folder_changes_neither_the_split_nor_the_fingerprint(
    tmp_path: Path, configure: Configure
) -> None:
    write_files(tmp_path / "data", 100)
    before = prepare(configure(tmp_path / "data"))
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    after = prepare(configure(tmp_path / "elsewhere"))
    assert np.array_equal(before.tokens, after.tokens)
    assert before.fingerprint == after.fingerprint


def test_rows_are_split_one_by_one(tmp_path: Path, configure: Configure) -> None:
    lines = [f'{{"text": "row {row:04}"}}' for row in range(400)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    train, validation = split(prepare(configure(tmp_path / "rows.jsonl")), 16)
    assert len(train) + len(validation) == 400
    assert validation


@given(st.lists(st.text(), min_size=1), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_fraction_keeps_what_a_smaller_one_held_out(
    names: list[str], one: float, other: float
) -> None:
    small, large = sorted((one, other))
    held_out = {name for name in names if in_validation(name, small)}
    assert held_out <= {name for name in names if in_validation(name, large)}


def test_the_split_takes_its_fraction_of_many_documents() -> None:
    count, fraction = 20_000, 0.05
    held_out = sum(in_validation(f"file-{index}.txt", fraction) for index in range(count))
    deviation = (count * fraction * (1 - fraction)) ** 0.5
    assert abs(held_out - count * fraction) < 5 * deviation


@given(
    length=st.integers(0, 3000),
    documents_end=st.floats(0, 1),
    fraction=st.floats(0.001, 0.5),
    sequence=st.integers(1, 100),
)
def test_both_splits_hold_a_sample_and_do_not_overlap_or_the_corpus_is_refused(
    length: int, documents_end: float, fraction: float, sequence: int
) -> None:
    tokens = np.arange(length)
    corpus = Corpus(tokens, int(documents_end * length), fraction, "", open_tokenizer("bytes"))
    if length < 2 * (sequence + 1):
        with pytest.raises(DataError, match=f"{length} tokens.*one sample takes {sequence + 1}"):
            corpus.samples("train", sequence)
        return
    train, validation = corpus.samples("train", sequence), corpus.samples("validation", sequence)
    assert train[len(train) - 1][1].max() < validation[0][0].min()


def test_one_document_is_split_at_its_tail(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "one.txt").write_bytes(b"x" * 9_999)
    corpus = prepare(configure(tmp_path / "one.txt", validation_fraction=0.1))
    assert corpus.boundary(64) == 9_000
    assert corpus.boundary(2_000) == 10_000 - 2_001  # validation holds at least one sample


def test_a_tokenizer_file_ends_each_document_with_its_own_token(
    tmp_path: Path, configure: Configure, word_tokenizer: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fish swim"}\n{"text": "in a shoal"}\n')
    corpus = prepare(configure(tmp_path / "a.jsonl", tokenizer=str(word_tokenizer)))
    parts = corpus.tokens.tobytes().split(b"\1")  # ids below 256 are kept as bytes; 1 is <eos>
    assert set(parts) == {bytes([2, 3]), bytes([4, 5, 6]), b""}


def test_an_unknown_split_is_refused_with_the_nearest(tmp_path: Path, configure: Configure) -> None:
    write_files(tmp_path / "data", 20)
    corpus = prepare(configure(tmp_path / "data"))
    with pytest.raises(ConfigError, match="did you mean 'validation'"):
        corpus.samples("validaton", 8)
    with pytest.raises(ConfigError, match="sequence length is 0"):
        corpus.samples("train", 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"sauce": "stdlib"},
        {"source": ()},
        {"source": ""},
        {"source": ["a.txt", ""]},
        {"suffixes": ["txt"]},
        {"suffixes": []},
        {"dtype": "float32"},
        {"validation_fraction": 0.0},
        {"validation_fraction": 1.0},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DataConfig(**fields)


def test_a_configuration_is_frozen_and_describes_each_field() -> None:
    config = DataConfig()
    with pytest.raises(ValidationError):
        config.source = "other"
    assert all(field.description for field in DataConfig.model_fields.values())

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import open_tokenizer
from shoal.errors import DataError, MissingExtraError


@given(st.text())
def test_bytes_give_any_text_back(text: str) -> None:
    tokenizer = open_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode("utf-8"))
    assert tokenizer.decode(ids.tolist()) == text


@given(st.binary())
def test_bytes_that_are_not_utf_8_are_kept_and_shown_with_replacements(raw: bytes) -> None:
    tokenizer = open_tokenizer("bytes")
    ids = tokenizer.encode(raw)
    assert bytes(ids.tolist()) == raw
    assert tokenizer.decode(ids.tolist()) == raw.decode("utf-8", errors="replace")


def test_bytes_have_256_ids_and_end_a_text_with_0() -> None:
    tokenizer = open_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_text) == ("bytes", 256, 0)


def test_lone_surrogates_do_not_stop_a_tokenizer(word_tokenizer: Path) -> None:
    text = json.loads('"fish \\ud800 swim"')
    assert open_tokenizer("bytes").encode(text).tolist() == list(b"fish ? swim")
    assert open_tokenizer(str(word_tokenizer)).encode(text).tolist() == [2, 0, 3]


def test_a_tokenizer_file_gives_the_ids_that_the_library_gives(word_tokenizer: Path) -> None:
    import tokenizers

    text = "a shoal that moves as one fish"
    reference = tokenizers.Tokenizer.from_file(str(word_tokenizer))
    tokenizer = open_tokenizer(str(word_tokenizer))
    assert tokenizer.encode(text).tolist() == reference.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert tokenizer.vocab_size == reference.get_vocab_size()
    assert tokenizer.end_of_text == reference.token_to_id("<eos>")


def test_a_tokenizer_file_replaces_bytes_that_are_not_utf_8(word_tokenizer: Path) -> None:
    assert open_tokenizer(str(word_tokenizer)).encode(b"fish \xff swim").tolist() == [2, 0, 3]


def test_a_tokenizer_file_neither_cuts_nor_fills_nor_frames_a_text(word_tokenizer: Path) -> None:
    import tokenizers

    edited = tokenizers.Tokenizer.from_file(str(word_tokenizer))
    edited.enable_truncation(2)
    edited.enable_padding(length=9)
    edited.post_processor = tokenizers.processors.TemplateProcessing(
        single="<eos> $A <eos>", special_tokens=[("<eos>", 1)]
    )
    edited.save(str(word_tokenizer))
    assert open_tokenizer(str(word_tokenizer)).encode("fish swim in a shoal").tolist() == [2, 3, 4, 5, 6]


def test_a_vocabulary_with_gaps_has_the_size_of_its_largest_id(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "x": 70_000}, unk_token="x")).save(
        str(tmp_path / "gaps.json")
    )
    assert open_tokenizer(str(tmp_path / "gaps.json")).vocab_size == 70_001


def test_a_folder_with_a_tokenizer_json_is_a_tokenizer(word_tokenizer: Path) -> None:
    folder, file = open_tokenizer(str(word_tokenizer.parent)), open_tokenizer(str(word_tokenizer))
    assert folder.identity == file.identity


def test_a_tokenizer_file_without_an_end_of_text_is_refused_with_the_names_that_would_do(
    tmp_path: Path,
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x")).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError) as caught:
        open_tokenizer(str(tmp_path / "t.json"))
    assert "t.json" in caught.value.given
    assert "<|endoftext|>" in caught.value.possible


def test_ids_are_written_as_numbers() -> None:
    tokenizer = open_tokenizer("ids:50257")
    assert tokenizer.vocab_size == 50257
    assert tokenizer.encode("0 50256\n7").tolist() == [0, 50256, 7]
    assert tokenizer.decode(np.array([0, 50256, 7])) == "0 50256 7"


@pytest.mark.parametrize("text", ["50257", "-1", "fish", "1.5", "²"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="is not an id"):
        open_tokenizer("ids:50257").encode(text)


@pytest.mark.parametrize("name", ["ids:", "ids:0", "ids:many", "ids:-3", "ids:99999999999"])
def test_ids_without_a_vocabulary_size_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=name):
        open_tokenizer(name)


def test_a_misspelt_tokenizer_is_refused_with_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'bytes'"):
        open_tokenizer("byte")


def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "config.json").write_text('{"hidden": 64}')
    with pytest.raises(DataError, match=r"config\.json"):
        open_tokenizer(str(tmp_path / "config.json"))


def test_a_tokenizer_file_without_the_package_names_the_extra(
    word_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"shoal\[hf\]"):
        open_tokenizer(str(word_tokenizer))

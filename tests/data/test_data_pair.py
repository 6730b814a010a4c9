"""Pairs of texts as samples: what transformers makes of them, also where they are too long."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from labelled_stand_ins import OTHER, write_tokenizer

from shoal.data import DataConfig, LabelledSamples, open_tokenizer, prepare
from shoal.errors import ConfigError, DataError

Configure = Callable[..., DataConfig]

pytest.importorskip("tokenizers")

WORDS = st.lists(st.sampled_from(OTHER), min_size=1, max_size=12).map(" ".join)


def write(path: Path, pairs: list[tuple[str, str]]) -> Path:
    rows = [{"a": one, "b": two, "label": number % 2} for number, (one, two) in enumerate(pairs)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def pair_config(configure: Configure, source: Path, tokenizer: object, **fields: object) -> DataConfig:
    columns = {"field": "a", "pair": "b", "label": "label", "validation": str(source)}
    return configure(source, **{**columns, "tokenizer": str(tokenizer), **fields})


def use_pairs_as_roberta(folder: Path) -> None:
    import tokenizers
    from tokenizers.processors import RobertaProcessing

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("form", ["bert", "roberta"])
def test_pairs_are_cut_and_joined_as_transformers_does(tmp_path_factory: pytest.TempPathFactory, form: str):
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    if form == "roberta":
        use_pairs_as_roberta(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_tokenizer(str(folder))

    @given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=8), st.integers(6, 20))
    def check(pairs: list[tuple[str, str]], sequence: int) -> None:
        rows = [
            np.concatenate((ours.encode(one), [ours.vocab_size], ours.encode(two), [ours.vocab_size + 1]))
            for one, two in pairs
        ]
        samples = LabelledSamples(np.concatenate(rows), np.array([1]), ours, sequence, has_types=True)
        inputs, classes = samples.batch(np.arange(len(pairs)))
        expected = theirs(
            [one for one, _ in pairs],
            [two for _, two in pairs],
            padding="max_length",
            truncation="longest_first",
            max_length=sequence,
            return_token_type_ids=True,
            return_tensors="np",
        )
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            assert np.array_equal(inputs[name], expected[name]), name
        assert classes.tolist() == [1] * len(pairs)

    check()


def test_pairs_are_read_from_two_columns_and_types_are_given_only_if_asked_for(
    tmp_path: Path, configure: Configure
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    source = write(tmp_path / "pairs.jsonl", [("a film", "the story"), ("one fish", "fine")])
    corpus = prepare(pair_config(configure, source, tokenizer))
    inputs, classes = corpus.samples("train", 8).batch(np.arange(2))
    assert list(inputs) == ["input_ids", "attention_mask"]
    names = open_tokenizer(str(tokenizer))
    assert names.decode(inputs["input_ids"][0]) == "[CLS] a film [SEP] the story [SEP] [PAD]"
    assert classes.tolist() == [0, 1]
    with pytest.raises(ConfigError, match="no room for a pair") as caught:
        corpus.samples("train", 4)
    assert "5 tokens or more" in caught.value.possible


def test_a_second_text_that_is_missing_or_empty_is_refused(tmp_path: Path, configure: Configure) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    source = write(tmp_path / "pairs.jsonl", [("a film", "the story"), ("one fish", " ")])
    with pytest.raises(DataError, match=r"line 2 of .* has an empty text in 'b'"):
        prepare(pair_config(configure, source, tokenizer))
    with pytest.raises(DataError, match=r"no text in the field 'c'") as caught:
        prepare(pair_config(configure, source, tokenizer, pair="c"))
    assert "data.pair" in caught.value.change
    with pytest.raises(ConfigError, match=r"pair=b was given without data\.label"):
        prepare(configure(source, pair="b"))

"""Conversations as samples: the chat template of the tokenizer, and answers as the only targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chat_stand_ins import FORGETFUL, MARKED, PLAIN, WORDS, conversations, write_jsonl, write_tokenizer
from pydantic import ValidationError

from shoal.data import DataConfig, prepare
from shoal.errors import DataError

transformers = pytest.importorskip("transformers")

Configure = Callable[..., DataConfig]


@pytest.fixture
def chat(tmp_path: Path, configure: Configure) -> Callable[..., DataConfig]:
    """Makes the configuration of conversations."""

    def make(source: Path, template: str = PLAIN, **fields: object) -> DataConfig:
        folder = write_tokenizer(tmp_path / "tokenizer", template)
        return configure(source, **{"tokenizer": str(folder), "messages": "messages", **fields})

    return make


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_samples_are_what_transformers_makes_of_the_messages(
    tmp_path: Path, chat: Configure, template: str, suffix: str
) -> None:
    rows = conversations(40)
    file = tmp_path / f"train{suffix}"
    if suffix == ".jsonl":
        write_jsonl(file, rows)
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"messages": rows}), file)
    config = chat(file, template, validation=str(file))
    samples = prepare(config).samples("train", 16)
    theirs = transformers.AutoTokenizer.from_pretrained(config.tokenizer)
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    inputs, targets = samples.batch(np.arange(len(samples)))
    assert len(samples) == 40
    for row, messages in enumerate(rows):
        expected = theirs.apply_chat_template(messages, chat_template=MARKED, **options)
        ids = (expected["input_ids"] + [0] * 17)[:17]
        mask = (expected["assistant_masks"] + [0] * 17)[:17]
        assert inputs[row].tolist() == ids[:-1]
        assert targets[row].tolist() == [
            token if is_answer else -100 for token, is_answer in zip(ids[1:], mask[1:], strict=True)
        ]
    assert int((targets != -100).sum()) > 100


def test_another_template_makes_the_tokens_anew(tmp_path: Path, chat: Configure) -> None:
    file = write_jsonl(tmp_path / "train.jsonl", conversations(40))
    first = prepare(chat(file)).fingerprint
    assert prepare(chat(file)).fingerprint == first
    assert prepare(chat(file, PLAIN.replace("<end>", "<end><eos>"))).fingerprint != first


ANSWER = {"role": "assistant", "content": "one"}
QUESTION = {"role": "user", "content": "fish ?"}


@pytest.mark.parametrize(
    ("row", "template", "complaint"),
    [
        ("fish", PLAIN, "line 1 of .* holds no messages"),
        ([], PLAIN, "line 1 of .* holds no messages"),
        ([{"from": "user"}], PLAIN, "line 1 of .* holds no messages"),
        ([QUESTION], PLAIN, "line 1 of .* has no answer: .* but user"),
        ([QUESTION, ANSWER], "{{ raise_exception('no fish') }}", "does not fit the chat template: .*no fish"),
        ([QUESTION, ANSWER, QUESTION, ANSWER], FORGETFUL, "changes earlier messages of line 1"),
        ([QUESTION, ANSWER], "", "has no chat template"),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_line(
    tmp_path: Path, chat: Configure, row: object, template: str, complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        prepare(chat(write_jsonl(tmp_path / "train.jsonl", [row]), template))


def test_a_sequence_without_answers_a_missing_column_and_two_tasks_are_refused(
    tmp_path: Path, chat: Configure
) -> None:
    long = [{"role": "user", "content": " ".join(WORDS)}, ANSWER]
    file = write_jsonl(tmp_path / "train.jsonl", [long] * 3)
    with pytest.raises(DataError, match="no conversation has an answer within its first 9 tokens"):
        prepare(chat(file, validation=str(file))).samples("train", 8)
    with pytest.raises(DataError, match=r"has no column 'massages' \(did you mean 'messages'\?\)"):
        prepare(chat(file, messages="massages"))
    with pytest.raises(DataError, match="has no chat template"):
        prepare(chat(file, tokenizer="bytes"))
    with pytest.raises(ValidationError, match="two tasks"):
        chat(file, label="label")

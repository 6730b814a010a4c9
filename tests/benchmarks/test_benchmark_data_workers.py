"""The benchmark of data workers: its contestants read windows of one text."""

import json
import sys
from itertools import islice
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import data_workers

pytest.importorskip("tokenizers")


def test_contestants_give_windows_of_the_text(tmp_path):
    data_workers.make_data(tmp_path, mib=1)
    tokenizer = data_workers.open_tokenizer(str(tmp_path / "tokenizer.json"))
    tokens = []
    for line in (tmp_path / "text.jsonl").read_text().splitlines():
        tokens += tokenizer.encode(json.loads(line)["text"]).tolist()
    wanted = tokens[: data_workers.BATCH * data_workers.SEQUENCE + 1]
    batch = next(data_workers.with_data_loader(tmp_path, 0))
    assert [*batch[:, :-1].flatten().tolist(), int(batch[-1, -1])] == wanted
    text = tokenizer.decode(tokens)
    stream = data_workers.with_shoal(tmp_path, 0)
    for inputs, targets in islice(stream, 3):
        assert inputs.shape == targets.shape == (data_workers.BATCH, data_workers.SEQUENCE)
        for row in inputs:
            pieces = tokenizer.decode(row.tolist()).split("</s>")
            assert all(piece.strip("\ufffd") in text for piece in pieces)
    stream.close()


@pytest.mark.parametrize("kind", data_workers.STEPS.values())
def test_a_step_takes_its_time(kind):
    data_workers.step_of(kind, 0.001)()

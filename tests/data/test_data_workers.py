"""Worker processes: the results of one process, in order, and errors that say which."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chat_stand_ins import conversations, write_jsonl, write_tokenizer
from worker_stand_ins import make

from shoal.data import DataConfig, prepare
from shoal.data.workers import Workers
from shoal.errors import DataError, LostProcessError
from shoal.signals import ANSWERED

Configure = Callable[..., DataConfig]


def test_results_come_in_order_and_errors_in_place_of_results() -> None:
    with Workers(2, make) as workers:
        assert list(workers.map(range(10))) == [2 * value for value in range(10)]
        results = workers.map([11, 12, 13, 14])
        assert [next(results), next(results)] == [22, 24]
        with pytest.raises(DataError, match="13 was given"):
            next(results)
        assert list(workers.map([1, 2, 3])) == [2, 4, 6]


@pytest.mark.parametrize("number", sorted(ANSWERED))
def test_signals_to_all_processes_of_a_run_do_not_end_workers(number: signal.Signals) -> None:
    with Workers(1, make) as workers:
        result = workers.submit(21)
        for process in workers._processes:  # which may not even have begun
            process.send_signal(number)
        assert result.result() == 42
        for process in workers._processes:
            process.send_signal(number)
        assert list(workers.map(range(3))) == [0, 2, 4]


def test_another_worker_takes_the_place_of_one_that_is_lost() -> None:
    with Workers(2, make) as workers:
        assert list(workers.map([1, 2])) == [2, 4]
        workers._processes[0].kill()
        with pytest.warns(UserWarning, match="was ended by SIGKILL; another one takes its place"):
            assert list(workers.map(range(6))) == [0, 2, 4, 6, 8, 10]


@pytest.mark.filterwarnings("ignore:a worker process for data")
def test_workers_that_are_lost_again_are_no_wrong_input() -> None:
    with Workers(2, make) as workers:
        with pytest.raises(LostProcessError, match=r"was ended by SIGKILL.* data\.workers") as caught:
            list(workers.map([1, -1, 2, 3]))
        assert caught.value.exit_code == 1
        assert list(workers.map([1, 2, 3])) == [2, 4, 6]


def test_tokens_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, configure: Configure, word_tokenizer: Path
) -> None:
    generator = np.random.default_rng(0)
    words = np.array(["fish", "swim", "in", "a", "shoal"])
    rows = [" ".join(words[generator.integers(5, size=200)]) for _ in range(1500)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    (tmp_path / "whole.txt").write_text("\n".join(rows[:99]))
    np.save(tmp_path / "ids.npy", generator.integers(11, size=5000))
    suffixes = (".jsonl", ".npy", ".txt")
    found = []
    for workers in (0, 1, 3):
        fields = {"tokenizer": str(word_tokenizer), "suffixes": suffixes, "workers": workers}
        found.append(prepare(configure(tmp_path, cache=tmp_path / str(workers), **fields)))
    assert len(found[0].tokens) > 5000 + 1500 * 200
    for corpus in found[1:]:
        assert corpus.fingerprint == found[0].fingerprint
        assert np.array_equal(corpus.tokens, found[0].tokens)


def test_conversations_are_encoded_by_workers_too(tmp_path: Path, configure: Configure) -> None:
    pytest.importorskip("transformers")
    source = write_jsonl(tmp_path / "talks.jsonl", conversations(200))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    given = {"tokenizer": str(tokenizer), "messages": "messages"}
    alone, helped = (
        prepare(configure(source, cache=tmp_path / str(workers), workers=workers, **given))
        for workers in (0, 2)
    )
    assert np.array_equal(alone.tokens, helped.tokens)

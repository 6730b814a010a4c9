"""Loggers: the metrics file, TensorBoard, several as one."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from shoal.errors import MissingExtraError
from shoal.record import Logger, Loggers, MetricsWriter
from shoal.record.destinations.opening import TensorBoardLogger
from shoal.spec.run import read_metrics


class Failing(Logger):
    """Fails from a step on, as a logger whose server is gone."""

    def __init__(self, from_step: int) -> None:
        self.from_step = from_step
        self.calls = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        if step >= self.from_step:
            raise ConnectionError("server is gone")

    def close(self) -> None:
        raise ConnectionError("server is gone")


def test_each_call_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(3):
        writer.log(step, {"loss": 1.0 / (step + 1), "tokens": 64})
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == step + 1
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == {"step": 1, "loss": 0.5, "tokens": 64}


def test_every_line_is_strict_json_also_where_the_loss_is_not_finite(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.log(0, {"loss": math.nan, "grad_norm": math.inf, "other": -math.inf})
    writer.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 0, "loss": "NaN", "grad_norm": "Infinity", "other": "-Infinity"}


def test_scalars_of_other_libraries_are_numbers_too(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.log(0, {"loss": numpy.float32(0.5)})
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 0.5}]


def test_a_resumed_run_appends_below_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0,"loss":3.0}\n{"step":1,"lo')
    writer = MetricsWriter(path)
    writer.log(1, {"loss": 2.0})
    writer.close()
    assert [values["loss"] for values in read_metrics(path)] == [3.0, 2.0]


def test_a_full_disk_is_reported_once_and_stops_nothing() -> None:
    reports: list[str] = []
    writer = MetricsWriter("/dev/full", say=reports.append)
    for step in range(3):
        writer.log(step, {"loss": 1.0})
    writer.close()
    assert len(reports) == 1
    assert "No space left on device" in reports[0]


def test_a_logger_that_fails_is_reported_once_and_the_others_go_on(tmp_path: Path) -> None:
    reports: list[str] = []
    failing = Failing(from_step=1)
    loggers = Loggers([failing, MetricsWriter(tmp_path / "metrics.jsonl")], say=reports.append)
    for step in range(4):
        loggers.log(step, {"loss": 1.0})
    loggers.close()
    assert reports == ["Failing failed and is left out from now on: server is gone"]
    assert failing.calls == 2
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_a_logger_that_fails_to_close_does_not_keep_the_others_open(tmp_path: Path) -> None:
    reports: list[str] = []
    loggers = Loggers([Failing(from_step=9), MetricsWriter(tmp_path / "metrics.jsonl")], say=reports.append)
    loggers.close()
    loggers.log(0, {"loss": 1.0})
    assert len(reports) == 1
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_tensorboard_reads_the_scalars_that_were_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    for step in range(3):
        logger.log(step, {"loss": 1.5 - step / 2})
    logger.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(0, 1.5), (1, 1.0), (2, 0.5)]


def test_tensorboard_that_cannot_write_stops_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    reports: list[str] = []
    (tmp_path / "file").write_text("")
    loggers = Loggers([TensorBoardLogger(tmp_path / "file")], say=reports.append)
    for step in range(2):
        loggers.log(step, {"loss": 1.0})
    loggers.close()
    assert len(reports) == 1


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(MissingExtraError, match=r"shoal\[tensorboard\]"):
        TensorBoardLogger(tmp_path)

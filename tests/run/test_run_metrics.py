"""The metrics file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.spec.run import Run, metrics_line, read_metrics
from shoal.spec.run.account import read_events


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@given(st.floats())
def test_any_number_survives_a_line_of_strict_json(value: float) -> None:
    line = metrics_line(3, {"loss": value})
    json.loads(line, parse_constant=refuse_constant)
    assert line.count("\n") == 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0.1, 7])
def test_a_value_is_read_as_it_was_written(tmp_path: Path, value: float) -> None:
    (tmp_path / "metrics.jsonl").write_text(metrics_line(3, {"loss": value}))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3, "loss": value}]


def test_a_loss_that_is_not_a_number_is_read_as_such(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(metrics_line(3, {"loss": math.nan}))
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[0]["loss"])


def test_a_resumed_run_replaces_the_steps_that_it_does_again(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {})
    losses = [(0, 3.0), (1, 2.0), (2, 1.5), (1, 2.1), (2, 1.6)]
    run.metrics_file.write_text("".join(metrics_line(step, {"loss": loss}) for step, loss in losses))
    assert [(values["step"], values["loss"]) for values in run.metrics()] == [(0, 3.0), (1, 2.1), (2, 1.6)]


def test_validation_joins_the_step_that_it_follows(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {})
    run.metrics_file.write_text(metrics_line(4, {"loss": 2.0}) + metrics_line(4, {"validation_loss": 2.5}))
    assert run.metrics() == [{"step": 4, "loss": 2.0, "validation_loss": 2.5}]


def test_a_line_torn_anywhere_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole, torn = metrics_line(0, {"loss": 3.0}), metrics_line(1, {"loss": 2.0})
    for cut in range(1, len(torn) - 1):
        path.write_text(whole + torn[:cut])
        assert [values["step"] for values in read_metrics(path)] == [0]
        path.write_text(whole + torn[:cut] + "\n" + torn)
        assert [values["step"] for values in read_metrics(path)] == [0, 1]


def test_a_run_has_no_metrics_before_its_first_step(tmp_path: Path) -> None:
    assert Run.create(tmp_path / "run", {}).metrics() == []


@pytest.mark.parametrize("line", ["[1]", '{"loss": 1}', '{"step": "one"}', "3"])
def test_a_line_that_is_no_step_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics_line(0, {}) + line + "\n")
    with pytest.raises(ShoalError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_a_file_that_an_editor_marked_loses_no_line(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(
        b'\xef\xbb\xbf{"step":1,"time":1,"event":"began"}\r\n{"step":2}\r\n'
    )
    assert [values["step"] for values in read_metrics(path)] == [1, 2]
    assert [event["event"] for event in read_events([path])] == ["began"]

"""Profiles of chosen steps, and after a signal."""

import gzip
import json
import os
import signal

import pytest
import torch

from shoal.record import Marks, SpanRecorder
from shoal.spec.timeline import Kind
from shoal.train.rank_job import Profiling
from shoal.units import parse_steps

CPU = torch.device("cpu")


def names_in(path):
    with gzip.open(path, "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"]]


def train(profiling, recorder, numbers):
    for number in numbers:
        with profiling.step(number), recorder.step(number), recorder.span(Kind.FORWARD, "work"):
            torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_steps_that_were_asked_for_are_in_the_trace_with_marked_spans(tmp_path):
    marks, said = Marks(), []
    recorder = SpanRecorder(tmp_path / "rank-00000.jsonl", 0, marks=marks)
    profiling = Profiling((3, 4), tmp_path / "profile", 0, CPU, marks, memory=True, say=said.append)
    train(profiling, recorder, range(1, 7))
    profiling.close()
    recorder.close()
    names = names_in(tmp_path / "profile" / "rank-00000-steps-3-4.json.gz")
    assert names.count("forward work") == names.count("aten::mm") == 2
    assert {"step 3", "step 4"} <= set(names)
    assert not {"step 2", "step 5"} & set(names)
    assert said == [f"steps 3 to 4 are profiled in {tmp_path / 'profile'}"]
    assert marks.new is None


def test_a_signal_asks_for_the_next_five_steps_and_a_run_that_ends_before_keeps_what_it_has(tmp_path):
    before = signal.getsignal(signal.SIGUSR2)
    marks, said = Marks(), []
    recorder = SpanRecorder(tmp_path / "rank-00001.jsonl", 1, marks=marks)
    profiling = Profiling(None, tmp_path, 1, CPU, marks, memory=False, say=said.append)
    train(profiling, recorder, [7])
    os.kill(os.getpid(), signal.SIGUSR2)
    train(profiling, recorder, range(8, 14))
    os.kill(os.getpid(), signal.SIGUSR2)
    train(profiling, recorder, range(14, 16))
    profiling.close()
    assert names_in(tmp_path / "rank-00001-steps-8-12.json.gz").count("forward work") == 5
    assert names_in(tmp_path / "rank-00001-steps-14-15.json.gz").count("forward work") == 2
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_profile_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    marks, said = Marks(), []
    recorder = SpanRecorder(tmp_path / "rank-00000.jsonl", 0, marks=marks)
    profiling = Profiling((1, 1), tmp_path / "file", 0, CPU, marks, memory=False, say=said.append)
    train(profiling, recorder, range(1, 4))
    profiling.close()
    assert len(said) == 1
    assert "failed" in said[0]


def test_steps_are_read_as_first_and_last():
    assert parse_steps("100:105") == (100, 105)
    assert parse_steps("7") == (7, 7)
    for wrong in ("", ":", "1:", "5:4", "-1:2", "a:b", "1:2:3"):
        with pytest.raises(ValueError, match="write FIRST:LAST"):
            parse_steps(wrong)

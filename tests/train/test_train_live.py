"""What a run tells the person before it."""

from __future__ import annotations

import io

import pytest
import torch

from shoal.train import StepResult
from shoal.train.result import LiveLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


def result(step, seconds=0.5):
    loss, norm, stop = torch.tensor([2.0, 1.0, 0.0])
    return StepResult(step, loss, norm, stop, learning_rate=1e-3, tokens=1000, seconds=seconds)


def test_without_a_terminal_there_is_a_line_every_so_many_steps_and_for_the_last():
    stream = io.StringIO()
    live = LiveLine(25, 10, stream)
    for step in range(1, 26):
        live.show(result(step))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]
    assert all("loss 2.000" in line and "2,000 tokens/s" in line for line in lines)
    assert "left" in lines[0]
    assert "left" not in lines[-1]
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_each_step_writes_over_the_one_before_and_messages_stay(monkeypatch):
    monkeypatch.setattr("shoal.train.result.time.monotonic", iter(range(3)).__next__)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    live = LiveLine(3, 10, stream)
    live.show(result(1))
    live.say("a message")
    live.show(result(2))
    live.show(result(3))
    pieces = stream.getvalue().split("\r\x1b[K")
    assert pieces[0] == ""
    assert pieces[2] == "a message\n"
    assert [piece[:35] for piece in (pieces[1], *pieces[3:])] == [
        f"{'#' * done}{'-' * (20 - done)} {share}  step {step}/3"
        for step, done, share in ((1, 6, " 33%"), (2, 13, " 67%"), (3, 20, "100%"))
    ]


def test_on_a_terminal_there_are_at_most_ten_lines_a_second_and_the_last_step_is_shown(monkeypatch):
    monkeypatch.setattr("shoal.train.result.time.monotonic", (step / 64 for step in range(129)).__next__)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    live = LiveLine(129, 1, stream)
    for step in range(1, 130):
        live.show(result(step))
    shown = [int(line.split("step ")[1].split("/")[0]) for line in stream.getvalue().split("\r\x1b[K")[1:]]
    assert shown == [*range(1, 129, 7), 129]


def test_a_line_is_never_wider_than_its_terminal(monkeypatch):
    """It would wrap, and the next line would not be written over it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("SHOAL_TERMINAL", "50")  # a rank, whose output the launcher passes on
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    LiveLine(1_000_000, 10).show(result(123_456))
    line = stream.getvalue().removeprefix("\r\x1b[K")
    assert len(line) == 49
    assert "12%  step 123456/1000000" in line


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    LiveLine(1, 1, stream).show(result(1))
    assert stream.getvalue().endswith("\n")
    assert "\x1b" not in stream.getvalue()


def test_the_time_left_is_told_from_the_steps_of_this_process(monkeypatch):
    clock = iter([100.0, 102.0])
    monkeypatch.setattr("shoal.train.result.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    live = LiveLine(60, 10, stream)
    live.show(result(49))  # a resumed run: 2 s for one step, 10 to make
    live.show(result(50))
    assert stream.getvalue().rstrip().endswith("20 s left")


@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_runs_have_a_line(steps):
    stream = io.StringIO()
    live = LiveLine(steps, 20, stream)
    for step in range(1, steps + 1):
        live.show(result(step))
    assert stream.getvalue().count("\n") == 1

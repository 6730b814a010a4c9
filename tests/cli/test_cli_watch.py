"""`shoal watch`."""

import json
import math
import re

import pytest
from rich.console import Console

from shoal.analyze.diagnosis import verdict
from shoal.analyze.diagnosis.run_follower import RunFollower
from shoal.cli.main import main
from shoal.cli.watch import drawn, sparkline
from shoal.spec.run import Run, metrics_line
from shoal.spec.run.writer import Claiming
from shoal.spec.timeline import Kind, Lane, Span, Timeline

STEPS = 30
DESCRIPTION = {
    "name": "tiny",
    "plan": "dp=2",
    "world_size": 2,
    "config": {"steps": STEPS},
    "model": {"name": "hostile \x1b[2J [bold]name", "parameters": 1_200_000},
}


def spans(first, last):
    for index in range(first, last):
        start = 1.0 * index
        for rank in (0, 1):
            yield Span(rank, Lane.COMPUTE, Kind.STEP, str(index), start, 1.0)
            yield Span(rank, Lane.COMPUTE, Kind.FORWARD, "", start, 0.6 + 0.2 * rank)


def line(step):
    values = {"loss": 5 - step / 10, "tokens_per_second": 1000.0, "step_seconds": 1.0}
    return metrics_line(step, values)


@pytest.fixture
def run(tmp_path):
    made = Run.create(tmp_path / "run", DESCRIPTION)
    Timeline(spans(1, 11)).write(made.timeline)
    made.metrics_file.write_text("".join(map(line, range(1, 11))))
    return made


def picture(followed, width=100):
    followed.refresh()
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(drawn(followed, width))
    return capture.get()


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_a_run_is_followed_through_torn_lines_until_its_last_step(run):
    lock = Claiming(run.checkpoints).wait()
    followed = RunFollower(run, steps=20)
    followed.refresh()
    assert (followed.values["step"], followed.seconds_left, followed.alive) == (10, 20.0, True)
    assert followed.breakdown.parts.compute == pytest.approx(0.7)
    assert followed.metrics.curve("loss") == pytest.approx([5 - step / 10 for step in range(1, 11)])
    append(run.metrics_file, line(11)[:20])
    followed.refresh()
    assert followed.values["step"] == 10
    append(
        run.metrics_file, line(11)[20:] + "not JSON\n" + line(12) + metrics_line(12, {"loss": float("nan")})
    )
    followed.refresh()
    assert followed.values["step"] == 12
    assert followed.unread == 1
    *numbers, diverged = followed.metrics.curve("loss")
    assert numbers == pytest.approx([5 - step / 10 for step in range(1, 12)])
    assert math.isnan(diverged)
    Timeline(spans(1, STEPS + 1)).write(run.timeline)  # as a run that goes on with a new header does
    append(run.metrics_file, "".join(map(line, range(13, STEPS + 1))))
    lock.close()
    followed.refresh()
    assert followed.is_done
    assert followed.alive is False
    assert len(followed.timeline.steps()) == 20  # the newest


def test_verdicts_rest_between_looks_and_the_last_one_knows_all_steps(run):
    lock = Claiming(run.checkpoints).wait()
    followed = RunFollower(run, rest=1e9)
    followed.refresh()
    first = followed.breakdown
    Timeline(spans(1, STEPS + 1)).write(run.timeline)
    append(run.metrics_file, line(11))
    followed.refresh()
    assert (followed.values["step"], followed.breakdown) == (11, first)
    lock.close()
    followed.refresh()
    assert len(followed.breakdown.ranks[0].steps) == STEPS


def test_lines_of_the_timeline_that_cannot_be_read_are_counted_and_left_out(run, capsys):
    path = run.timeline_file(1)
    text = path.read_text()
    path.write_text(text.replace('"start":3.000000000', '"start":"x"', 1))
    assert main(["watch", str(run.path), "--once", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["unread_lines"] == 1
    assert told["ranks"]["1"]["compute"] == pytest.approx(0.8)
    run.timeline_file(0).write_text("no timeline\n")
    assert main(["watch", str(run.path), "--once", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["unread_lines"], list(told["ranks"])) == (2, ["1"])


def test_a_rank_that_was_lost_does_not_keep_the_others_from_being_followed(run):
    Timeline(span for span in spans(11, STEPS + 1) if span.rank == 0).write(run.timeline)
    followed = RunFollower(run, steps=10)
    followed.refresh()
    assert [each.rank for each in followed.breakdown.ranks] == [0]
    assert followed.timeline.steps()[-1] == STEPS


def test_the_picture_has_progress_parts_and_ranks_and_no_escape_of_a_run(run):
    text = picture(RunFollower(run))
    assert "10/30  33%  20 s left" in text
    assert "compute 70%" in text
    assert re.search(r"rank 1 +█{50,}", text)
    assert "No verdict." in text  # there are too few steps for one
    assert "\x1b" not in text
    assert "hostile ?[2J [bold]name" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_sparkline_spans_its_range_and_marks_what_is_not_finite():
    assert sparkline([0, 1, 2, 3], 4) == "▁▃▆█"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([0, float("nan"), 1], 3) == "▁!█"


def test_the_command_ends_with_the_run_and_says_how(run, capsys, monkeypatch):
    monkeypatch.setattr("os.nice", int)  # this process goes on
    Claiming(run.checkpoints).wait().close()
    assert main(["watch", str(run.path)]) == 1
    assert capsys.readouterr().out == (
        "step 10/30  loss 4.000  tokens/s 1,000  20 s left  compute 70%, other 30%  "
        "ended before its last step\n"
    )
    append(run.metrics_file, line(STEPS))
    Timeline(spans(1, STEPS)).write(run.timeline)
    assert main(["watch", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "ended after its last step"
    assert isinstance(told["values"]["step"], int)
    assert told["ranks"]["1"]["compute"] == pytest.approx(0.8)
    assert told["verdict"]["bottleneck"] == verdict(Timeline.read(run.timeline)).bottleneck is not None


def test_what_cannot_be_watched_is_refused(run, tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert main(["watch", str(run.path), "--every", "0"]) == 2
    assert "seconds above 0" in capsys.readouterr().err

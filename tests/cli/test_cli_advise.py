"""`shoal advise`, and `shoal train --resume RUN --advice`."""

import json
from argparse import Namespace

import pytest

from shoal.cli.main import main
from shoal.cli.train import _advised
from shoal.errors import RunError
from shoal.spec.plan import Plan
from shoal.spec.run import Run
from shoal.spec.timeline import Kind, Lane, Span, Timeline


def spans(seconds):
    for index in range(12):
        for rank, took in enumerate(seconds):
            yield Span(rank, Lane.COMPUTE, Kind.STEP, str(index), 10.0 * index, 5.0)
            yield Span(rank, Lane.COMPUTE, Kind.FORWARD, "", 10.0 * index, took)
            wait = 10.0 * index + took, 5.0 - took, 1 << 20, (0, 1)
            yield Span(rank, Lane.COMPUTE, Kind.COLLECTIVE, "all_reduce:0", *wait)


@pytest.fixture
def make(tmp_path):
    def made(*seconds):
        described = {"config": {"model": "package:model", "batch": 12}, "plan": "dp=2,microbatch=1"}
        run = Run.create(tmp_path / "run", described)
        Timeline(spans(seconds)).write(run.timeline)
        return run

    return made


def test_advice_is_printed_with_its_gain_and_the_command_that_applies_it(make, capsys):
    run = make(2.0, 4.0)
    assert main(["advise", str(run.path)]) == 0
    printed = capsys.readouterr()
    assert "fewer micro-batches: shares=8-4." in printed.out
    assert "step 5 s now, 3.67 s predicted: 26.7% less" in printed.out
    assert f"shoal train --resume {run.path} --set 'plan=" in printed.out
    assert "other Plans are not played" in printed.err
    assert main(["advise", str(run.path), "--json", "--cluster", "laptop:2"]) == 0
    printed = capsys.readouterr()
    (advice,) = json.loads(printed.out)["advice"]
    assert advice["gain"] == pytest.approx(1 - (5 - 4 / 3) / 5)
    assert "other Plans are not played: " in printed.err


def test_a_resumed_run_takes_the_best_advice_if_asked(make, capsys):
    run = make(2.0, 4.0)
    (setting,) = _advised(Namespace(advice=True, cluster=None), run)
    assert Plan.parse(setting.removeprefix('plan="').removesuffix('"')).shares == "8-4"
    assert "advice: Give slower ranks fewer micro-batches" in capsys.readouterr().err
    assert _advised(Namespace(advice=False, cluster=None), run) == ()
    with pytest.raises(RunError, match="no run is resumed"):
        _advised(Namespace(advice=True, cluster=None), None)


def test_where_nothing_is_faster_the_run_goes_on_as_it_was(make, capsys):
    run = make(4.0, 4.0)
    assert _advised(Namespace(advice=True, cluster=None), run) == ()
    assert "goes on as it was" in capsys.readouterr().err
    assert main(["advise", str(run.path)]) == 0
    assert "Nothing was found" in capsys.readouterr().out


def test_a_run_without_steps_is_refused(tmp_path, capsys):
    run = Run.create(tmp_path / "empty", {})
    assert main(["advise", str(run.path)]) == 2
    assert "no Plan and batch" in capsys.readouterr().err

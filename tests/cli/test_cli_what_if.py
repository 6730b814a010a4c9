"""`shoal what-if` on a run whose delay is known."""

import json

import pytest

from shoal.analyze.diagnosis import Cause
from shoal.analyze.diagnosis.compute_time import PHASES
from shoal.cli.main import main
from shoal.errors import RunError
from shoal.spec.run import Run
from shoal.testing.delays import Delay, Jitter, Layout, delayed_timeline

STEADY = Jitter([[dict.fromkeys(PHASES, 1.0)]])


@pytest.fixture
def run(tmp_path):
    """A run of four ranks, of which rank 2 is slow in forward."""
    made = Run.create(tmp_path / "run", {"name": "played", "world_size": 4})
    delayed_timeline(Layout(4), 30, STEADY, 0, Delay(2, Cause.FORWARD, 0.1)).write(made.timeline)
    return made


def test_the_slow_rank_is_worth_the_most_and_the_replay_is_exact(run, capsys):
    assert main(["what-if", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["replayed"] == pytest.approx(told["seconds"], rel=1e-6)
    by_rank = {each["what"]: each["seconds"] for each in told["savings"] if each["kind"] == "rank"}
    assert max(by_rank, key=by_rank.get) == "rank 2 works as its peers do"
    assert told["slowdown"] > 1.05
    assert main(["what-if", str(run.path)]) == 0
    assert "rank 2 works as its peers do" in capsys.readouterr().out


def test_the_report_names_the_slow_rank(run, capsys):
    assert main(["report", str(run.path), "--json"]) == 0
    (straggler,) = json.loads(capsys.readouterr().out)["verdict"]["stragglers"]
    assert (straggler["ranks"], straggler["cause"]) == ([2], "forward")
    assert main(["report", str(run.path)]) == 0
    assert "Straggler: rank 2, forward, persistent." in capsys.readouterr().out


def test_a_run_without_steps_has_nothing_to_replay(tmp_path):
    made = Run.create(tmp_path / "run", {"name": "empty"})
    assert main(["what-if", str(made.path)]) == RunError.exit_code

"""The account of a run, as report, watch and the pages tell it, and failures of a run to come."""

import json

import pytest
from rich.console import Console

from shoal.analyze.diagnosis.run_follower import RunFollower
from shoal.cli.main import main
from shoal.cli.watch import drawn
from shoal.spec.cluster import Cluster
from shoal.spec.run import Run, account, write_event
from shoal.web.live import live
from shoal.web.query import Query
from shoal.web.saves import saves

SIMULATE = ["simulate", "--model", "125m", "--cluster", "dgx-a100:64", "--batch", "64"]
SIMULATE += ["--plan", "dp=64,precision=bf16", "--steps", "2000000"]


@pytest.fixture
def run(tmp_path):
    config = {"steps": 200, "checkpoint": {"every": "auto", "mtbf": 10.0}}
    made = Run.create(tmp_path / "one", {"world_size": 4, "config": config})
    began = 1_800_000_000.0
    write_event(made.events_file, "began", at=began + 100, launched=began, ranks=4)
    write_event(made.events_file, "loaded", at=began + 100, step=0)
    write_event(made.events_file, "spent", at=began + 900, step=80, seconds={"steps": 780.0, "save": 20.0})
    write_event(made.events_file, "failed", at=began + 1000)
    write_event(made.events_file, "began", at=began + 1400, launched=began + 1300, ranks=4)
    write_event(made.events_file, "loaded", at=began + 1400, step=60)
    write_event(made.events_file, "spent", at=began + 2000, step=100, seconds={"load": 40.0, "steps": 560.0})
    return made


def test_report_divides_the_wall_clock_and_prices_it(run, capsys, tmp_path):
    path = tmp_path / "mine.toml"
    Cluster.parse("dgx-h100:8").replace(price=9.0).write(path)
    assert main(["report", str(run.path), "--cluster", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["account"]
    counted = 780 * 60 / 80 + 560
    assert told["goodput"] == pytest.approx(counted / 2000)
    assert told["step_seconds"] + sum(told["lost_seconds"].values()) == pytest.approx(2000)
    # Nobody is paid from the failure, which was noted at 1,000 s, to the next command.
    assert told["dollars"] == pytest.approx(9 * 4 * 1700 / 3600)
    assert told["dollars_left"] == pytest.approx(9 * 4 * (2000 - 100 - 300) / 3600)
    assert main(["report", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert "33 min 20 s: 2 starts, 1 failure" in printed
    assert "goodput      57.2%: 19 min 5 s of steps that count" in printed
    assert "100 steps in 26 min 40 s" in printed


def test_watch_and_the_pages_tell_what_the_library_tells(run, capsys):
    found = account(run)
    assert main(["watch", str(run.path), "--once", "--plain"]) == 0
    assert "goodput 57.2%" in capsys.readouterr().out
    assert main(["watch", str(run.path), "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["account"]["goodput"] == found.goodput
    followed = RunFollower(run)
    followed.refresh()
    console = Console(width=100, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(drawn(followed, 100))
    assert "57.2% of 33 min 20 s, lost: waiting 15.0%" in capture.get()
    for page in (saves, live):
        told = page(followed, Query())["account"]
        assert (told["lost_seconds"], told["failures"]) == (found.lost, 1)


def test_a_run_without_events_has_no_account(tmp_path, capsys):
    made = Run.create(tmp_path / "old", {"world_size": 1})
    assert account(made) is None
    assert main(["report", str(made.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["account"] is None
    assert main(["report", str(made.path)]) == 0
    assert "goodput" not in capsys.readouterr().out


def test_failures_by_chance_agree_with_the_formula_where_nothing_is_repaired(capsys):
    assert main([*SIMULATE, "--failures", "runs=40,interval=0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    played = found["failures"]
    assert played["nodes"] == 8
    assert played["goodput"] == pytest.approx(found["long_run"]["goodput"], abs=4 * played["goodput_error"])
    assert played["goodput"] + sum(played["lost"].values()) == pytest.approx(1)
    assert main([*SIMULATE, "--failures"]) == 0
    assert "no spare node was left after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("spare=3", "did you mean 'spares'"),
        ("repair=fast", "repair=fast is not allowed"),
        ("repair_tail=fat", "fixed, exponential, heavy"),
        ("runs=0", "runs=0 is not allowed"),
        ("hardware=2", "hardware=2.0 is not allowed"),
        ("shrinks", "is no setting"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(capsys, settings, said):
    assert main([*SIMULATE, "--failures", settings]) == 2
    assert said in capsys.readouterr().err


def test_failures_need_the_length_of_the_run_and_a_rate(capsys, tmp_path):
    assert main([*SIMULATE[:-2], "--failures", "spares=1"]) == 2
    assert "without the length of a run" in capsys.readouterr().err
    path = tmp_path / "mine.toml"
    Cluster.parse("dgx-a100:64").replace(failures=0.0).write(path)
    words = [str(path) if word == "dgx-a100:64" else word for word in SIMULATE]
    assert main([*words, "--failures"]) == 2
    assert "does not say how often devices fail" in capsys.readouterr().err

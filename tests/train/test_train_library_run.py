"""A Trainer of the library leaves a Run that `shoal report` reads, and tells of what it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from library_run_stand_ins import go_on_with_it, leave_a_run, refusal_of

import shoal
from shoal import train
from shoal.cli.main import main
from shoal.spec.run import Run


def report(path, capsys):
    assert main(["report", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_report_explains_a_run_of_the_library_and_callbacks_hear_of_it(ranks, tmp_path, capsys):
    folder = tmp_path / "run"
    for told in ranks.run(leave_a_run, 2, "dp=2,shard=zero1", folder):
        assert told == {
            "steps": [1, 2, 3, 4],
            "validations": [(4, ["far", "loss"])],
            "saved": ["step-00000004"],
        }
    found = report(folder, capsys)
    assert found["plan"] == "dp=2,shard=zero1,microbatch=4"
    assert found["steps"] == 4
    assert found["validation_loss"]["last"]["step"] == 4
    assert found["tokens_per_second"] > 0
    assert sorted(map(int, found["breakdown"]["ranks"])) == [0, 1]
    assert Run.open(folder).metrics()[-1]["far"] > 0
    account = shoal.account(folder)
    assert account is not None
    assert {"start", "save", "validation"} <= {
        cause for cause, seconds in account.lost.items() if seconds > 0
    }
    assert account.goodput * account.wall + sum(account.lost.values()) == pytest.approx(account.wall)

    for message in ranks.run(go_on_with_it, 2, "dp=2,shard=zero3", folder):
        assert "holds a run, and a new run would overwrite it" in message
    found = report(folder, capsys)
    assert found["plan"] == "dp=2,shard=zero3,microbatch=4"
    assert (found["steps"], found["since_step"]) == (5, 5)
    both = shoal.account(folder)
    assert both is not None
    assert both.wall > account.wall
    assert both.launches == 2


def test_a_directory_that_holds_something_else_is_refused_on_every_rank(ranks, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for message in ranks.run(refusal_of, 2, tmp_path):
        assert "exists already, and a run is never overwritten" in message


def test_one_file_of_training_opens_all_that_a_run_holds():
    """The command and the library have one writer, so that what one of them leaves, the other leaves too."""
    opened = ("TimeAccount(", "MetricsWriter(", "MemoryRecord(", "claim_together(", "write_decision(")
    opened += ("exchange_clocks(", "open_recorder(", ".describe(")
    files = {path.name: path.read_text() for path in Path(train.__file__).parent.glob("*.py")}
    for name in opened:
        assert [file for file, text in files.items() if name in text.replace(f"def {name}", "")] == [
            "run_writer.py"
        ], name

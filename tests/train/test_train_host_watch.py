"""A host is examined when a run starts, and hangs are reported in the run."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shoal.collectives import watch_hangs
from shoal.launch.local import World
from shoal.machine.doctor import Finding, HostReport, Verdict
from shoal.spec.run import Run
from shoal.train import agreement


@pytest.fixture(autouse=True)
def _watch_restored():
    watch = watch_hangs()
    faults = watch.faults
    yield
    watch.is_on, watch.folder, watch.faults = False, None, faults


def look(run: Run, local_rank: int = 0, unit: int = 0, replaces_ranks: bool = False) -> None:
    world = World(rank=3, ranks=8, local_rank=local_rank, master=("", 0))
    agreement.look_at_host(run, world, unit=unit, replaces_ranks=replaces_ranks)


def test_the_first_rank_of_a_host_writes_a_report_and_prints_what_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", {})
    findings = [Finding("memory", Verdict.WARN, "little"), Finding("MTU", Verdict.BAD, "differs", "set one")]
    monkeypatch.setattr(agreement, "examine_quickly", lambda machine, folders: findings)
    look(run, local_rank=1)
    assert not (run.path / "doctor").exists()
    look(run)
    (report,) = HostReport.read_all(run.path / "doctor")
    assert (report.host, list(report.findings)) == (socket.gethostname(), findings)
    assert capsys.readouterr().err == f"{socket.gethostname()}: MTU: differs; set one\n"


def test_hangs_are_reported_in_the_run_and_apart_for_each_worker(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {})
    look(run)
    assert watch_hangs().folder == run.log / "hang"
    look(run, unit=4)
    assert watch_hangs().folder == run.log / "hang-4"


def test_ranks_that_are_replaced_are_not_examined(tmp_path: Path) -> None:
    look(Run.create(tmp_path / "run", {}), replaces_ranks=True)
    assert watch_hangs().faults == ("timeout",)

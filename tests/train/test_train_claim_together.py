"""All ranks of a training see the run that one of them has claimed."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from rank_stand_ins import on_ranks

from shoal.checkpoint import Coordinator
from shoal.errors import RunError
from shoal.spec.run import Run
from shoal.spec.run.writer import Claiming, is_written
from shoal.train.agreement import claim_together


def test_one_rank_claims_and_all_see_it(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {})
    writers = on_ranks(3, lambda ranks: claim_together(ranks, run, print, acts=ranks.rank == 0))
    assert [writer is not None for writer in writers] == [True, False, False]
    assert is_written(run.checkpoints)
    assert on_ranks(2, lambda ranks: claim_together(ranks, run, print, acts=False)) == [None, None]


def test_a_directory_that_a_rank_does_not_see_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.train.agreement._SEEN", 0.5)
    runs = [Run.create(tmp_path / name, {}) for name in ("one", "two")]
    heard = []

    def claim(ranks: Coordinator) -> object:
        gather = ranks.all_gather_object
        monkeypatch.setattr(
            ranks, "all_gather_object", lambda value: heard.append(ranks.rank) or gather(value)
        )
        return claim_together(ranks, runs[ranks.rank], print, acts=ranks.rank == 0)

    errors = on_ranks(2, claim)
    assert heard.count(0) >= 4, "a rank that sees the run waits in one collective for one that does not"
    for rank, error in enumerate(errors):
        assert isinstance(error, RunError)
        assert f"host {platform.node()} does not see the run {runs[rank].path}" in str(error)


def test_a_refusal_is_that_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(claiming: Claiming) -> None:
        raise RunError("process 7 on another writes it", possible="", change="")

    monkeypatch.setattr(Claiming, "poll", refuse)
    run = Run.create(tmp_path / "run", {})
    errors = on_ranks(2, lambda ranks: claim_together(ranks, run, print, acts=ranks.rank == 0))
    assert all("process 7" in str(error) for error in errors)


def test_a_run_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {})
    run.checkpoints.rmdir()
    run.checkpoints.write_text("a file")
    errors = on_ranks(2, lambda ranks: claim_together(ranks, run, print, acts=ranks.rank == 0))
    assert all(f"the run {run.path} cannot be written: " in str(error) for error in errors)

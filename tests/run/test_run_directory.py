"""The run directory."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from shoal.errors import RunError, ShoalError
from shoal.spec.run import Run, default_path
from shoal.spec.timeline import Span, Timeline

DESCRIPTION = {"name": "tiny", "world_size": 2}


def test_a_created_run_opens_with_its_description(tmp_path: Path) -> None:
    created = Run.create(tmp_path / "runs" / "tiny", DESCRIPTION)
    opened = Run.open(created.path)
    assert opened.description == DESCRIPTION
    assert all(path.is_dir() for path in (opened.checkpoints, opened.log, opened.timeline))
    assert not list(created.path.glob("*.tmp"))


def test_an_empty_directory_may_become_a_run(tmp_path: Path) -> None:
    assert Run.create(tmp_path, DESCRIPTION).description == DESCRIPTION


def test_only_the_owner_enters_a_new_run_and_a_directory_that_was_there_keeps_its_mode(
    tmp_path: Path,
) -> None:
    new, given = tmp_path / "runs" / "new", tmp_path / "given"
    given.mkdir()
    given.chmod(0o750)
    before = os.umask(0o022)
    try:
        Run.create(new, DESCRIPTION)
        Run.create(given, DESCRIPTION)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (new, given, new / "run.json")}
    assert modes == {"new": 0o700, "given": 0o750, "run.json": 0o644}


def test_a_directory_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        Run.create(tmp_path, DESCRIPTION)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_run_is_not_made_over_a_file_or_under_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        Run.create(tmp_path / "file", DESCRIPTION)
    with pytest.raises(RunError, match="cannot be made"):
        Run.create(tmp_path / "file" / "run", DESCRIPTION)


def test_a_description_that_json_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Run.create(tmp_path / "run", {"seed": object()})
    assert not (tmp_path / "run").exists()


def test_a_failed_write_leaves_a_directory_that_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(RunError, match="No space left"):
            Run.create(tmp_path / "run", DESCRIPTION)
    with pytest.raises(RunError, match=r"no run\.json"):
        Run.open(tmp_path / "run")
    assert Run.create(tmp_path / "run", DESCRIPTION).description == DESCRIPTION  # once there is room


@pytest.mark.parametrize(
    "left", [["timeline"], ["timeline", "checkpoints", "log"], ["run.json.0a.tmp", "log"]]
)
def test_a_creation_that_was_cut_off_can_be_made_again(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).touch() if name.endswith(".tmp") else (tmp_path / name).mkdir()
    (tmp_path / "log").mkdir(exist_ok=True)
    (tmp_path / "log" / "rank-0.log").write_text("begins")
    assert Run.create(tmp_path, DESCRIPTION).description == DESCRIPTION


@pytest.mark.parametrize(
    "kept", ["checkpoints/step-00000001/x", "timeline/x", "log/notes", "run.json.bak", "log"]
)
def test_what_no_creation_leaves_is_no_place_for_a_run(tmp_path: Path, kept: str) -> None:
    (tmp_path / kept).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / kept).write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        Run.create(tmp_path, DESCRIPTION)


@pytest.mark.parametrize("has_links", [True, False])
def test_one_of_two_creations_at_once_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    sync = os.fsync

    def other_first(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        Run.create(tmp_path, {"name": "first"})
        sync(descriptor)

    def refused(*_: object) -> None:
        raise PermissionError("no links here")

    if not has_links:
        monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(os, "fsync", other_first)
    with pytest.raises(RunError, match="was made by another process just now"):
        Run.create(tmp_path, {"name": "second"})
    assert Run.open(tmp_path).description == {"name": "first"}


def test_opening_names_the_run_that_may_be_meant(tmp_path: Path) -> None:
    Run.create(tmp_path / "tiny-20250131-090507", DESCRIPTION)
    with pytest.raises(RunError) as caught:
        Run.open(tmp_path / "tiny-20250131-090508")
    assert "does not exist (did you mean 'tiny-20250131-090507'?)" in caught.value.given


def test_opening_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="is a file"):
        Run.open(tmp_path / "file")
    with pytest.raises(RunError, match=r"has no run\.json"):
        Run.open(tmp_path / "empty")
    with pytest.raises(RunError, match="does not exist"):
        Run.open(tmp_path / "absent" / "run")


def test_a_malformed_description_is_named(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", DESCRIPTION)
    for text in ('{"name":', "[]"):
        (run.path / "run.json").write_text(text)
        with pytest.raises(ShoalError, match=r"run\.json"):
            _ = Run.open(run.path).description


def test_the_newest_run_is_the_one_made_last(tmp_path: Path) -> None:
    assert Run.newest(tmp_path) is None
    for age, name in enumerate(["b", "c", "a"]):
        run = Run.create(tmp_path / name, DESCRIPTION)
        os.utime(run.path / "run.json", (1e9 - age, 1e9 - age))
    (tmp_path / "not-a-run").mkdir()
    newest = Run.newest(tmp_path)
    assert newest is not None
    assert newest.path == tmp_path / "b"


def test_default_paths_are_not_there_yet(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        paths.append(default_path(tmp_path, "tiny"))
        Run.create(paths[-1], DESCRIPTION)
    assert len(set(paths)) == 3
    assert all(path.parent == tmp_path and path.name.startswith("tiny-2") for path in paths)


def test_a_run_and_a_timeline_agree_on_the_file_of_a_rank(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", DESCRIPTION)
    Timeline([Span(7, "compute", "forward", "", 0.0, 1.0)]).write(run.timeline)
    assert list(run.timeline.iterdir()) == [run.timeline_file(7)]


def test_run_json_reads_well(tmp_path: Path) -> None:
    text = (Run.create(tmp_path / "run", DESCRIPTION).path / "run.json").read_text()
    assert text == json.dumps(DESCRIPTION, indent=2) + "\n"

"""`shoal checkpoint ls`, `verify` and `convert`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_stand_ins import flip, tensors, wholes

from shoal.checkpoint import SingleProcess, save
from shoal.cli.commands import add_command
from shoal.cli.main import main
from shoal.errors import CheckpointError

SHARD = "rank-00000.safetensors"


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    for step in (100, 200):
        save(tmp_path / "checkpoints", step, wholes(tensors(step)), {}, SingleProcess())
    return tmp_path


def shoal(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "checkpoint")
    parsed = parser.parse_args(["checkpoint", *arguments])
    return int(parsed.run(parsed))


def test_ls_lists_the_checkpoints_of_a_run_newest_first(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal("ls", str(run_directory)) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "size", "files", "tensors", "checkpoint"]
    assert [(row.split()[0], row.split()[2:4]) for row in rows] == [("200", ["1", "4"]), ("100", ["1", "4"])]


@pytest.mark.parametrize("action", ["ls", "verify"])
def test_json_tells_what_the_table_tells(
    action: str, run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal(action, str(run_directory), "--json") == 0
    newest, oldest = json.loads(capsys.readouterr().out)
    path = run_directory / "checkpoints" / "step-00000200"
    assert newest == {
        "step": 200,
        "path": str(path),
        "files": 1,
        "tensors": 4,
        "bytes": (path / SHARD).stat().st_size,
        "problem": None,
    }
    assert oldest["step"] == 100


def test_verify_names_a_flipped_byte_which_ls_does_not_look_for(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_directory / "checkpoints" / "step-00000100"
    flip(path / SHARD, -1)
    assert shoal("ls", str(run_directory)) == 0
    capsys.readouterr()
    assert shoal("verify", str(run_directory)) == 1
    out = capsys.readouterr().out
    assert f"corrupt: {path / SHARD} was changed after it was written" in out
    verdict = "CORRUPT: 1 of 2 checkpoints, step 100; the newest sound one is that of step 200"
    assert out.splitlines()[-1] == verdict
    assert shoal("verify", str(run_directory / "checkpoints" / "step-00000200")) == 0


def test_verify_ends_with_a_verdict(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("verify", str(run_directory)) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("SOUND: all 2 checkpoints, ")
    assert shoal("verify", str(run_directory / "checkpoints" / "step-00000200")) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("SOUND: the checkpoint of step 200, ")
    for path in (run_directory / "checkpoints").glob("step-*"):
        flip(path / SHARD, -1)
    assert shoal("verify", str(run_directory)) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "CORRUPT: 2 of 2 checkpoints, steps 200, 100; none is sound"


@pytest.mark.parametrize("action", ["ls", "verify"])
@pytest.mark.parametrize("missing", [SHARD, "manifest.json"])
def test_a_missing_file_is_named_with_exit_code_one(
    action: str, missing: str, run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_directory / "checkpoints" / "step-00000200" / missing).unlink()
    assert shoal(action, str(run_directory), "--json") == 1
    newest, oldest = json.loads(capsys.readouterr().out)
    assert missing in newest["problem"]
    assert oldest["problem"] is None


def test_a_path_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        shoal("ls", str(tmp_path))


@pytest.mark.parametrize("action", ["ls", "verify"])
def test_a_path_that_does_not_exist_is_refused_with_the_nearest(
    action: str, run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", action, f"{run_directory}s"]) == 2
    error = capsys.readouterr().err
    assert f"did you mean '{run_directory.name}'" in error
    assert "possible: a run" in error


def test_the_command_is_defined_without_torch() -> None:
    program = "import sys, shoal.cli.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_convert_says_what_it_wrote_and_there_and_back_nothing_differs(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back = run_directory / "dcp", run_directory / "back"
    assert shoal("convert", str(run_directory), str(out), "--to", "dcp") == 0
    assert shoal("convert", str(out), str(back), "--to", "shoal") == 0
    newest = run_directory / "checkpoints" / "step-00000200"
    assert capsys.readouterr().out.splitlines() == [
        f"wrote 4 tensors of {newest} to {out}",
        f"wrote {back / newest.name}",
    ]
    assert shoal("diff", str(run_directory), str(back)) == 0

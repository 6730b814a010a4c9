"""Where ledgers lie: nothing of others is written or removed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shoal.analyze.hang import Ledger, ledger_folder

LONG_AGO = (1, 1)
NOBODY = 2**22 + 1  # a number that no process has

LIVING = f"""
import os, sys
from pathlib import Path
from shoal.analyze.hang import Ledger
os.getpid = lambda: {NOBODY}  # as in another PID namespace
ledger = Ledger(Path(sys.argv[1]), 0, 0)
stacks = ledger.open_stacks()
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that all users share."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("SHOAL_LEDGERS", raising=False)
    return folder


def old(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("x")
        os.utime(folder / name, LONG_AGO)


def test_a_link_in_the_place_of_the_folder_is_refused_by_name(shared: Path, tmp_path: Path) -> None:
    folder, home = ledger_folder(), tmp_path / "home"
    home.mkdir()
    old(home, f"calls-{NOBODY}", "thesis-2024")
    folder.rmdir()
    folder.symlink_to(home)
    with pytest.raises(PermissionError, match=str(folder)):
        ledger_folder()
    with pytest.raises(OSError):
        Ledger(folder, 0, 0)
    assert sorted(os.listdir(home)) == sorted([f"calls-{NOBODY}", "thesis-2024"])


def test_a_folder_that_others_can_write_to_is_refused(shared: Path) -> None:
    ledger_folder().chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        ledger_folder()


def test_only_ledgers_of_processes_that_ended_long_ago_are_removed(shared: Path, tmp_path: Path) -> None:
    folder = ledger_folder()
    old(
        folder,
        f"calls-{NOBODY}",
        f"stacks-{NOBODY}",
        "thesis-2024",
        f"results-{NOBODY}",
        f"calls-{os.getppid()}",
    )
    (folder / f"calls-{NOBODY + 1}").write_text("new")
    (folder / f"stacks-{NOBODY + 1}").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / f"calls-{NOBODY + 2}")
    os.utime(folder / f"calls-{NOBODY + 2}", LONG_AGO)
    before = set(os.listdir(folder))
    Ledger(folder, 0, 0)
    after = set(os.listdir(folder)) - {f"calls-{os.getpid()}"}
    assert before - after == {f"calls-{NOBODY}", f"stacks-{NOBODY}"}


def test_the_ledger_of_a_process_that_lives_elsewhere_stays(shared: Path) -> None:
    folder = ledger_folder()
    with subprocess.Popen(
        [sys.executable, "-c", LIVING, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as living:
        assert living.stdout is not None
        assert living.stdout.readline() == "there\n"
        names = f"calls-{NOBODY}", f"stacks-{NOBODY}"
        for name in names:
            os.utime(folder / name, LONG_AGO)
        Ledger(folder, 0, 0)
        assert set(names) <= set(os.listdir(folder))
        living.communicate("", timeout=60)
    Ledger(folder, 0, 0)
    assert not set(names) & set(os.listdir(folder))


def test_a_link_in_the_place_of_a_ledger_is_not_followed(shared: Path, tmp_path: Path) -> None:
    folder, victim = ledger_folder(), tmp_path / "victim"
    victim.write_text("x")
    (folder / f"calls-{os.getpid()}").symlink_to(victim)
    (folder / f"stacks-{os.getpid()}").symlink_to(victim)
    ledger = Ledger(folder, 0, 0)
    with pytest.raises(OSError):
        ledger.open_stacks()
    assert victim.read_text() == "x"

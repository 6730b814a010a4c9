"""Temporary folders: those of killed processes go, and nothing else does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import scratch
from shoal.scratch import scratch_folder

OWNER = """
import os, sys
from pathlib import Path
from shoal.scratch import scratch_folder
os.getpid = lambda: 2 ** 22 + 1  # a number that no process has here, as that of one in another PID namespace
with scratch_folder("test-", Path(sys.argv[1])) as folder:
    (folder / "file").write_text("content")
    if sys.argv[2] == "forks" and os.fork() == 0:
        print(folder, os.readlink("/proc/self"), flush=True)
        sys.stdin.read()
        os._exit(0)
    if sys.argv[2] == "forks":
        os.kill(int(os.readlink("/proc/self")), 9)
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def owner(parent: Path, how: str = "") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that uses a folder until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().split()[0])


def start(parent: Path) -> None:
    """What another start of a program does."""
    with scratch_folder("test-", parent) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_the_folder_of_a_process_that_lives_stays_whatever_its_number(tmp_path: Path) -> None:
    with owner(tmp_path) as (_, folder):
        start(tmp_path)
        assert (folder / "file").read_text() == "content"
    assert not folder.exists()


def test_the_folder_of_a_killed_process_goes(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, folder):
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert folder.exists()
        start(tmp_path)
        assert not folder.exists()


def test_the_folder_of_a_killed_process_stays_while_one_that_it_forked_lives(tmp_path: Path) -> None:
    with owner(tmp_path, "forks") as (process, folder):
        process.wait()
        start(tmp_path)
        assert (folder / "file").exists()


def test_what_is_in_doubt_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, now = tmp_path / "home", f"test-7-{scratch._boot()}-abcdefgh"
    home.mkdir()
    (home / "thesis").write_text("x")
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / now).symlink_to(home)
    for name in ("test-7-00000000-abcdefgh", "test-7-abcdefgh", f"test-{now}", "test-7-unlocked-abcdefgh"):
        (shared / name).mkdir()
    (shared / f"{now}x").write_text("a file")
    kept = sorted(os.listdir(shared))
    start(shared)
    assert sorted(os.listdir(shared)) == kept
    assert (home / "thesis").exists()
    (shared / f"{now}y").mkdir()  # of nobody, of this boot
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    start(shared)
    assert (shared / f"{now}y").exists(), "of another user"
    monkeypatch.undo()
    start(shared)
    assert sorted(os.listdir(shared)) == kept


def test_without_locks_nothing_is_removed_but_the_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"test-7-{scratch._boot()}-abcdefgh").mkdir()

    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    start(tmp_path)
    assert len(os.listdir(tmp_path)) == 1
    with scratch_folder("test-", tmp_path) as folder:
        monkeypatch.undo()  # for others the file system has locks
        start(tmp_path)
        assert folder.exists()


def test_who_removes_what_is_left_may_come_before_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = fcntl.flock, list[str]()

    def late(descriptor: int, how: int) -> None:
        lock(descriptor, how)
        if not taken:
            taken.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            shutil.rmtree(taken[0])

    monkeypatch.setattr("fcntl.flock", late)
    with scratch_folder("test-", tmp_path) as folder:
        assert folder.exists()
        assert str(folder) != taken[0]

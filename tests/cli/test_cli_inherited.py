"""What the program that starts `shoal` leaves to it, beside its arguments, does not change what it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import contextlib, json, os, subprocess, sys
from pathlib import Path
from shoal.cli.main import main
sys.argv = ["shoal", "--version"]
with contextlib.suppress(SystemExit):
    main()
print("printed", file=sys.stderr)
os.write(2, b"by a library")
file = Path(FILE).open("w")
ended = subprocess.run(["false"]).returncode
json.dump([file.fileno(), ended, [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]], file)
"""


def close_all() -> None:
    for number in range(3):
        os.close(number)


def after(begin: Callable[[], object], file: Path) -> tuple[int, int, list[str]]:
    """Return the number of a file that the program opens, a child's exit code, and where 0, 1 and 2 lead."""
    program = f"FILE = {str(file)!r}\n{PROGRAM}"
    subprocess.run([sys.executable, "-c", program], check=True, preexec_fn=begin)
    number, ended, places = json.loads(file.read_text())
    return number, ended, places


def test_no_file_is_where_a_library_prints_though_the_program_began_with_all_closed(tmp_path: Path) -> None:
    number, _, places = after(close_all, tmp_path / "told")
    assert number > 2
    assert places == ["/dev/null"] * 3


def test_exit_codes_count_though_the_program_before_ignored_those_of_its_children(tmp_path: Path) -> None:
    _, ended, _ = after(lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN), tmp_path / "told")
    assert ended == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_a_training_though_the_program_before_had_blocked_it(number: signal.Signals) -> None:
    program = (
        "import os, sys, time; from shoal.signals import end_early; "
        "end_early(75); os.kill(os.getpid(), int(sys.argv[1])); time.sleep(1)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(int(number))],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [number]),
    )
    assert ended.returncode == 75
    assert number.name in ended.stderr

"""Stacks that a debugger of the host prints."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from shoal.analyze.hang.process import native_stacks

DEBUGGER = """#!/bin/sh
kill -STOP "$2"
exec sleep 60
"""


def test_a_debugger_that_takes_too_long_leaves_the_process_running(tmp_path, monkeypatch):
    """One that is killed while it attaches leaves a process stopped."""
    debugger = tmp_path / "eu-stack"
    debugger.write_text(DEBUGGER)
    debugger.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with subprocess.Popen(["sleep", "60"]) as process:
        assert native_stacks(process.pid, 0.5) == ""
        until = time.monotonic() + 120
        while " (sleep) T " in Path(f"/proc/{process.pid}/stat").read_text():
            assert time.monotonic() < until, "it is stopped"
            time.sleep(0.01)
        process.kill()

"""The program `shoal` where a pipe breaks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shoal.cli import doctor
from shoal.cli.main import main


def test_the_end_of_another_process_is_not_taken_for_that_of_the_reader(monkeypatch):
    def run(_):
        raise BrokenPipeError("a process that this one talks to")

    monkeypatch.setattr(doctor, "run", run)
    with pytest.raises(BrokenPipeError):
        main(["doctor"])


def test_a_reader_of_the_output_that_has_read_enough_is_no_failure():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "shoal", "completion", "bash"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")

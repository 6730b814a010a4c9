"""A run that is stopped, or met by a second process, while its model is probed ends as at any other time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SETTINGS = {"model": "probed_stand_ins:Waiting", "batch": 2, "sequence": 16, "steps": 2, "device": "cpu"}
SETTINGS |= {"validation.samples": 2, "optimizer.warmup": 1}


def command(*arguments, **changes):
    settings = [word for key, value in (SETTINGS | changes).items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "shoal", "train", *map(str, arguments), *settings]


@pytest.fixture
def environment(tmp_path):
    here = Path(__file__).parent
    return os.environ | {"WAITING": str(tmp_path), "PYTHONPATH": f"{here}:{here.parent.parent}"}


def test_a_probe_may_be_stopped_and_holds_the_run(tmp_path, environment):
    run, begun = tmp_path / "run", tmp_path / "begun"
    first = subprocess.Popen(
        command("--run", run, "--plan", "cp=2"), env=environment, stderr=subprocess.PIPE, text=True
    )
    while first.poll() is None and not begun.exists():
        time.sleep(0.01)
    assert first.poll() is None, first.communicate()
    resume = [sys.executable, "-m", "shoal", "train", "--resume", str(run)]
    second = subprocess.run(resume, env=environment, capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert f"writes the run {run}" in second.stderr
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate()
    assert first.returncode == 75
    assert "stopped by SIGTERM before the first step: no step is lost" in said
    assert not list((run / "checkpoints").glob("step-*"))
    (tmp_path / "go").touch()
    third = subprocess.run(resume, env=environment, capture_output=True, text=True, check=False)
    assert third.returncode == 0, third.stderr
    assert [each.name for each in (run / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert not any("Traceback" in text for text in (said, second.stderr, third.stderr))

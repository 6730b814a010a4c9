"""The benchmark of recovery: what it says followed the loss of a rank, and how the peers' trainings wait."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import recovery
from recovery_contestants import Made, Task

BENCHMARKS = Path(recovery.__file__).parent


def steps(rank, numbers, begin, ranks, loss=1.0, mark=0.0):
    """Steps of a second each."""
    return [
        Made(rank, number, begin + at, begin + at + 1, loss, ranks, mark) for at, number in enumerate(numbers)
    ]


def test_steps_that_are_made_again_are_not_new():
    before = steps(0, range(1, 8), 0, 2) + steps(1, range(1, 7), 0, 2)  # rank 1 is lost in step 7
    after = steps(0, range(5, 12), 10, 2) + steps(1, range(5, 12), 10, 2)
    unbroken = dict.fromkeys(range(1, 30), 1.0)
    found = recovery.recovery_of(before + after, 6.5, unbroken, {})
    assert (found.next, found.new, found.whole, found.again) == (4.5, 7.5, 4.5, 3)
    assert found.is_good
    assert not recovery.recovery_of(before + after, 6.5, unbroken | {9: 1.01}, {}).is_good


def test_a_rank_that_goes_on_alone_is_not_both():
    before = steps(0, range(1, 6), 0, 2) + steps(1, range(1, 6), 0, 2)
    alone = steps(0, range(6, 9), 6, 1)
    assert recovery.recovery_of(before + alone, 5.0, {}, {}) is None
    both = steps(0, range(9, 13), 9, 2, mark=3.0)
    found = recovery.recovery_of(before + alone + both + steps(1, range(9, 13), 9, 2, mark=3.0), 5.0, {}, {})
    assert (found.next, found.new, found.whole, found.again, found.is_good) == (2.0, 2.0, 5.0, 0, True)
    others = recovery.recovery_of(before + alone + both + steps(1, range(9, 13), 9, 2, mark=4.0), 5.0, {}, {})
    assert not others.is_good


@pytest.mark.long
def test_the_peers_training_goes_on_from_its_snapshot(tmp_path):
    task, folder = Task("tiny", every=2, turn=6), str(tmp_path)
    environment = {
        **os.environ,
        "PYTHONPATH": str(BENCHMARKS),
        "RECOVERY_FOLDER": folder,
        "RECOVERY_MODEL": task.shape,
        "RECOVERY_EVERY": "2",
        "RECOVERY_TURN": "6",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    command = [sys.executable, str(BENCHMARKS / "recovery_training.py"), "ddp"]
    (tmp_path / "go-0").touch()
    for first in (0, 6):
        process = subprocess.Popen(command, env=environment)
        try:
            while not [*tmp_path.glob(f"at-{first + 6}-*")]:
                assert process.poll() is None
        finally:
            process.kill()
            process.wait()
        (tmp_path / f"go-{first + 6}").touch()
    made = [json.loads(line)["step"] for line in (tmp_path / "steps-0.jsonl").read_text().splitlines()]
    assert made == list(range(1, 13))

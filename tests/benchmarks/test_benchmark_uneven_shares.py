"""The benchmark of uneven shares: each rank makes the micro-batches of its share, a step waits for all."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import uneven_shares


@pytest.mark.parametrize(("shares", "numbers"), [("equal", [4, 4]), ("6-2", [6, 2])])
def test_a_step_waits_for_the_rank_whose_micro_batches_take_longest(shares, numbers):
    speeds = [0.01, 0.03]
    seconds, made = uneven_shares.measured(f"dp=2,microbatch=1,shares={shares}", speeds, 8, 4)
    assert made == numbers
    assert seconds >= max(number * each for number, each in zip(numbers, speeds, strict=True))

"""The benchmark of uneven shares: a slow rank with fewer micro-batches makes a step that much shorter."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import uneven_shares


def test_a_step_waits_for_the_rank_whose_micro_batches_take_longest():
    speeds = [0.01, 0.03]
    equal, fewer = (
        uneven_shares.measured(f"dp=2,microbatch=1,shares={text}", speeds, 8, 4) for text in ("equal", "6-2")
    )
    assert equal >= 4 * 0.03
    assert 6 * 0.01 <= fewer < equal

"""The checks of groups on a GPU, tried on a CPU: the program is the same, and there are no findings."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_checks_groups as checks
import torch
from torch.testing import assert_close

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "check",
    [
        checks.check_collectives_in_the_gpus_memory,
        checks.check_buckets_in_the_gpus_memory,
        checks.check_buckets_by_way_of_the_host,
        checks.check_expandable_segments,
        checks.check_nccl_with_one_rank,
    ],
)
def test_a_check_finds_nothing_wrong(check):
    assert "\n" not in check(CPU)


def test_a_check_says_which_element_is_wrong():
    wanted = torch.arange(5.0)
    result = wanted.clone()
    case = checks.Case("broken", lambda: result[3].fill_(7.0), result, wanted)
    with pytest.raises(AssertionError, match=r"1 of 5 elements are wrong; element 3 is 7\.0, wanted 3\.0"):
        checks._compare(case, "broken", CPU)


def test_what_ranks_bring_is_exact_in_16_bits():
    halves = [checks._brought(rank, 200, torch.bfloat16) for rank in range(checks.RANKS)]
    floats = [checks._brought(rank, 200, torch.float32) for rank in range(checks.RANKS)]
    assert_close((sum(halves) / checks.RANKS).float(), sum(floats) / checks.RANKS, rtol=0, atol=0)

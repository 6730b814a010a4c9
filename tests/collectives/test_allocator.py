"""Freed memory that is kept need not be cleared again, and memory that is returned has to be."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from shoal.collectives import keep_freed_memory, return_freed_memory
for call in ({calls}):
    if not call():
        raise SystemExit(77)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(16 << 20).fill_(1.0)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(20):  # until the heap has holes of the size, which take a few rounds to form
    faults()
print(sum(faults() for _ in range(5)))
"""


def faults(calls):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(calls=calls)], capture_output=True, text=True
    )
    if ended.returncode == 77:
        pytest.skip("the C library has no mallopt")
    return int(ended.stdout)


def test_kept_memory_is_taken_again_without_page_faults_until_it_is_returned():
    kept = faults("keep_freed_memory,")
    assert 20 * kept < faults("")
    assert 20 * kept < faults("keep_freed_memory, return_freed_memory")

"""Shared tensors: what they take of the system, what goes back to it, and what forked processes may do."""

from __future__ import annotations

import gc
import os
import resource

import pytest
import torch
import torch.distributed as dist

from shoal.collectives import empty, trim
from shoal.collectives.ctypes_core import load_core
from shoal.errors import CollectiveError

core = load_core()
if core is None:
    pytest.skip("the native core was not built", allow_module_level=True)

RANKS = 2
MOST_KEPT = 128
"""Segments without tensors that a process keeps (csrc/transport/shared_buffers.cc)."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_small_tensors_take_few_descriptors_and_are_reduced_like_others(ranks):
    ranks.run(reduce_many_small_tensors, RANKS)


def reduce_many_small_tensors() -> None:
    gc.collect()  # what tests before this one left
    trim()
    before = descriptors()
    tensors = [empty(1000).fill_(index) for index in range(900)]
    assert descriptors() - before <= 4
    for tensor in tensors:
        dist.all_reduce(tensor)
    for index, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((1000,), float(index * RANKS)))
    dist.barrier()
    del tensor, tensors
    assert trim() >= 900 * 4000
    assert trim() == 0
    assert descriptors() <= before


def test_freed_tensors_of_many_sizes_keep_few_descriptors_and_peers_read_the_next_ones_right(ranks):
    ranks.run(reduce_tensors_of_many_sizes, RANKS)


def reduce_tensors_of_many_sizes() -> None:
    trim()
    before, held = descriptors(), [empty(100_000).fill_(1.0)]
    for index in range(2 * MOST_KEPT):
        tensor = empty(50_000 + 2000 * index).fill_(index)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, float(index * RANKS)))
        if index % 50 == 0:
            del tensor
            trim()
    dist.all_reduce(held[0])
    assert torch.equal(held[0], torch.full((100_000,), float(RANKS)))
    assert descriptors() - before <= MOST_KEPT + 2
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= min(hard, 65_536)


def test_what_a_forked_process_writes_to_a_shared_tensor_stays_with_it(ranks):
    ranks.run(write_in_a_forked_process, RANKS)


def write_in_a_forked_process() -> None:
    rank = dist.get_rank()
    tensors = [empty(count).fill_(rank + 1.0) for count in (1000, 300_000)]
    for tensor in tensors:
        dist.all_reduce(tensor)  # so that the peer has them mapped
    child = os.fork()
    if child == 0:
        for tensor in tensors:
            tensor.add_(100.0)
        os._exit(0 if all(bool((tensor == 103.0).all()) for tensor in tensors) else 1)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, 3.0))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, 6.0))


def test_memory_that_the_system_does_not_have_is_an_error_that_says_so():
    with pytest.raises(CollectiveError, match=r"of \d+ bytes cannot be mapped") as caught:
        empty(1 << 58)
    assert caught.value.fault == "system"

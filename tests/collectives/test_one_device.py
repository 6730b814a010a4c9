"""Ranks that share a device reduce and gather in its memory; the device here is one of `late_device.py`."""

from __future__ import annotations

import signal
import time
from functools import partial

import one_device_cases as cases
import pytest
import torch
from fault_ranks import Ranks


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_same_bits_and_the_hosts_sums_within_rounding(ranks, size):
    first, *others = ranks.run(cases.sum_as_the_host_does, size)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_operands_larger_than_a_buffer_may_overlap_their_results(ranks):
    ranks.run(cases.work_in_pieces_that_overlap, 3)


@pytest.mark.parametrize(
    ("size", "backend"), [(2, "shoal_prompt_shared"), (3, "shoal_prompt_shared"), (3, "shoal_pieces")]
)
def test_stripes_of_a_buffer_are_gathered_and_summed_there(ranks, size, backend):
    ranks.run(cases.move_stripes, size, size, backend)


def test_stripes_that_do_not_fit_are_refused_and_the_group_goes_on(ranks):
    for texts in ranks.run(cases.refuse_stripes, 2):
        for each in ("not within the buffer", "overlaps", "whole elements"):
            assert sum(each in text for text in texts) == 2
        assert all(text.startswith("invalid") for text in texts)


def test_messages_and_other_groups_do_not_wait_for_a_collective_on_the_device(ranks):
    ranks.run(cases.call_out_of_step, 3)


def test_a_buffer_is_kept_until_the_slowest_rank_has_read_it(ranks):
    ranks.run(cases.read_late, 3)


def test_buffers_grow_and_are_freed(ranks):
    ranks.run(cases.grow_and_free, 3)


def test_a_rank_without_memory_sends_all_by_the_host_and_says_so(ranks):
    for texts in ranks.run(cases.do_with_what_there_is, 3):
        assert ["by way of the host" in text for text in texts] == [True, True]


def test_one_rank_without_direct_reads_sends_all_by_the_host(ranks):
    assert ranks.run(cases.be_told_to_go_by_the_host, 3) == [False] * 3


def test_a_rank_that_never_comes_is_named(ranks):
    for text, fault, rank in ranks.run(cases.fail, 3, "never comes")[::2]:
        assert (fault, rank) == ("timeout", 1)
        assert "all_reduce on" in text


def test_calls_that_differ_are_refused_on_all_ranks(ranks):
    for text, fault, _ in ranks.run(cases.fail, 3, "calls another"):
        assert fault == "mismatch"
        assert "44 bytes" in text


def test_stripes_that_differ_are_refused_on_all_ranks(ranks):
    for text, fault, _ in ranks.run(cases.fail, 3, "has other stripes"):
        assert fault == "mismatch"
        assert "in 2 stripes" in text


def test_a_rank_that_fails_frees_the_others(ranks):
    for text, fault, _ in ranks.run(cases.fail, 3, "fails"):
        assert fault == "aborted"
        assert "no memory" in text


def test_a_rank_may_leave_while_it_waits_for_others(ranks):
    assert ranks.run(cases.leave_what_others_never_call, 3)[0] < 3


@pytest.mark.parametrize("is_known", [True, False])
def test_a_rank_that_is_killed_is_named_soon(is_known):
    with Ranks(partial(cases.be_lost, is_known=is_known), 3) as processes:
        processes.hear()
        time.sleep(0.05)
        moment = processes.send(1, signal.SIGKILL)
        for ended in processes.hear(0, 2):
            assert (ended.rank, ended.fault) == (1, "peer lost"), ended
            assert ended.moment - moment < 2

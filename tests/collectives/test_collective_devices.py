"""Tensors on a device go by way of the host; the device here works as late as streams and events allow."""

from __future__ import annotations

import device_cases
import pytest

from shoal.testing import RankPool


@pytest.mark.parametrize(
    ("size", "backend"), [(2, "shoal_late"), (3, "shoal_late"), (3, "shoal_late_shared")]
)
def test_operands_and_results_of_late_kernels_are_waited_for(ranks, size, backend):
    ranks.run(device_cases.wait_for_what_is_late, size, 7, backend)


@pytest.mark.parametrize("backend", ["shoal_prompt", "shoal_prompt_shared", "shoal_pieces"])
def test_collectives_of_a_device_give_what_one_process_computes(ranks, backend):
    ranks.run(device_cases.run_cases, 3, 5, 3, backend)


@pytest.mark.parametrize("backend", ["shoal_late", "shoal_late_shared"])
def test_a_work_may_be_waited_for_twice_dropped_and_polled(ranks, backend):
    ranks.run(device_cases.wait_twice_drop_and_poll, 2, backend)


def test_a_message_is_written_after_what_the_callers_stream_did_before(ranks):
    ranks.run(device_cases.receive_on_another_stream, 2)


def test_host_buffers_are_used_again_once_the_device_has_read_them(ranks):
    assert max(ranks.run(device_cases.reuse_host_buffers, 2)) <= 4


def test_a_backend_that_torch_left_out_is_not_replaced_in_silence(ranks):
    for text in ranks.run(device_cases.use_another_backend_for_gpus, 2):
        assert "cpu:gloo,cuda:nccl" in text


def test_operands_on_two_devices_are_refused(ranks):
    for text in ranks.run(device_cases.refuse_mixed_operands, 2):
        assert "on one device" in text


@pytest.mark.parametrize("backend", ["shoal_prompt", "shoal_prompt_shared"])
def test_layouts_and_what_pytorch_builds_on_groups_train_on_a_device_as_one_process_does(backend):
    plans = [
        "dp=4,shard=zero3",
        "dp=2,tp=2,tensor=async,shard=zero1",
        "dp=2,cp=2",
        "pp=2,tp=2,tensor=sequence",
    ]
    with RankPool(backend) as pool:
        pool.run(device_cases.use_what_pytorch_builds_on_groups, 2)
        assert pool.run(device_cases.compare, 4, plans)[0] == ["passed "] * len(plans)

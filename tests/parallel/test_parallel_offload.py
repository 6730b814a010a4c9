"""State in files: trainings have the bits of those that keep it in memory, and no file is left."""

import itertools
import resource
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_stand_ins import (
    ALL,
    BLOCK,
    STATE,
    InfiniteOnce,
    frozen_trained,
    full_in_the_middle,
    interrupted,
    refusal,
    trained,
)

from shoal.errors import LayoutError, PlanError
from shoal.parallel import OffloadedOptimizer, parallelize
from shoal.parallel.local_shards import ALIGNMENT
from shoal.parallel.offload.offloaded_optimizer import packs_of
from shoal.parallel.offload.storage import StateFile, Storage, aligned_buffer
from shoal.record import SpanRecorder
from shoal.spec.plan import GRANULE, Plan, Tiers
from shoal.spec.timeline import Kind, Timeline

RESIDENT = ["dp=1", "dp=1,microbatch=2,precision=bf16", "dp=2,shard=zero1", "dp=2,shard=zero2,microbatch=2"]
CUT = [
    "dp=1,shard=zero3",
    "dp=2,shard=zero3,microbatch=2",
    "dp=2,shard=zero3,precision=bf16,recompute=full",
    "dp=2,tp=2,shard=zero3",
    "dp=4,replicate=2,shard=zero3,microbatch=1",
    "dp=1,pp=2,shard=zero3,microbatch=2",
]


def assert_equal(one, other):
    losses, state = one
    assert other[0] == losses
    assert state.keys() == other[1].keys()
    for name, value in state.items():
        assert torch.equal(other[1][name], value), name


def both(ranks, plan, offload, folder, least=0, **settings):
    size = Plan.parse(plan).ranks
    results = [
        trained(text, folder, least, **settings)
        if size == 1
        else ranks.run(trained, size, text, folder, least)[0]
        for text in (plan, f"{plan},{offload}")
    ]
    assert_equal(*results)


@pytest.mark.parametrize("plan", RESIDENT)
def test_with_the_optimizer_s_state_in_files_a_training_has_the_same_bits(ranks, tmp_path, plan):
    both(ranks, plan, STATE, tmp_path)


@pytest.mark.parametrize("plan", CUT)
def test_with_all_state_in_files_a_training_has_the_same_bits(ranks, tmp_path, plan):
    both(ranks, plan, ALL, tmp_path)


@pytest.mark.parametrize("parts", ["gradients:file", "parameters:file"])
def test_gradients_and_parameters_may_be_in_files_alone(ranks, tmp_path, parts):
    both(ranks, "dp=1,shard=zero3,microbatch=2", f"{STATE}+{parts}", tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "lion"},
        {"name": "sgd", "options": {"momentum": 0.9, "nesterov": True}},
        {"name": "adamw", "options": {"amsgrad": True}, "clip": None},
        {"name": "offload_stand_ins:plain_factory"},
    ],
)
def test_any_optimizer_that_changes_each_element_by_itself_can_have_its_state_in_files(
    ranks, tmp_path, settings
):
    both(ranks, "dp=1,shard=zero3", ALL, tmp_path, **settings)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_that_are_not_trained_are_in_files_too_and_memory_orders_are_kept(tmp_path, precision):
    plan = f"dp=1,shard=zero3,precision={precision}"
    one, other = (frozen_trained(text, tmp_path) for text in (plan, f"{plan},{ALL}"))
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_that_is_not_finite_changes_nothing_in_files(tmp_path, step):
    plan = "dp=1,shard=zero3"
    results = [trained(text, tmp_path, loss=InfiniteOnce(step)) for text in (plan, f"{plan},{ALL}")]
    assert str(results[0][0]) == str(results[1][0])  # NaN is not equal to itself
    for name, value in results[0][1].items():
        assert torch.equal(results[1][1][name], value), name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"dp=1,{STATE}", f"dp=1,{STATE}"),
        (f"dp=1,shard=zero3,{ALL}", "dp=1,shard=zero3"),
        ("dp=1,shard=zero3", f"dp=1,shard=zero3,{ALL}"),
        (f"dp=1,{STATE}", f"dp=1,shard=zero3,{ALL}"),
    ],
)
def test_checkpoints_go_from_files_into_memory_and_back(tmp_path, before, after):
    went_on, taken_up = interrupted(before, after, tmp_path)
    assert went_on == taken_up


def test_checkpoints_go_from_files_to_other_ranks(ranks, tmp_path):
    before, after = f"dp=2,shard=zero3,{ALL}", "dp=2,shard=zero1"
    went_on, taken_up = ranks.run(interrupted, 2, before, after, tmp_path)[0]
    assert [loss for loss, _ in went_on] == pytest.approx([loss for loss, _ in taken_up], rel=1e-5)


@given(
    shapes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=6),
    blocks=st.integers(1, 3),
)
def test_blocks_hold_each_element_once_and_cut_where_vectors_end(shapes, blocks):
    model = torch.nn.Module()
    for index, shape in enumerate(shapes):
        model.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros([*shape, 7])))
    parallel = parallelize(model, "dp=1")
    held = {id(each): [] for each in parallel.owned}
    for pack in packs_of(parallel.owned):
        places = []
        for first, elements, parts in pack.blocks(blocks * 512):
            assert first % 512 == 0
            for part in parts:
                assert 0 <= part.at < part.at + part.stop - part.first <= elements
                assert part.first % ALIGNMENT == 0
                places.append((first + part.at, first + part.at + part.stop - part.first))
                held[id(part.owned)].append((part.first, part.stop))
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))
    for owned in parallel.owned:
        ranges = held[id(owned)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == owned.local.numel()
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges))


def test_a_segment_s_tensor_and_its_ranges_show_the_same_values(tmp_path):
    file = StateFile(tmp_path, "values")
    segments = [file.add(elements, torch.float32) for elements in (3 * GRANULE - 5, 7)]
    assert all(not segment.tensor.any() for segment in segments)
    buffer = aligned_buffer(GRANULE, torch.float32)
    segments[0].write(GRANULE, torch.arange(GRANULE, out=buffer))
    assert torch.equal(segments[0].tensor[GRANULE : 2 * GRANULE], torch.arange(GRANULE).float())
    segments[0].tensor[GRANULE + 3] = -1
    segments[1].tensor.fill_(5)
    segments[0].read(GRANULE, buffer)
    assert buffer[:5].tolist() == [0, 1, 2, -1, 4]
    segments[1].read(0, buffer)
    assert buffer[:8].tolist() == [5] * 7 + [0]


def test_a_wait_for_a_file_is_recorded_and_a_move_that_is_done_is_not(tmp_path):
    recorder = SpanRecorder(tmp_path / "rank-00000.jsonl", 0)
    storage = Storage(Tiers(optimizer="file"), tmp_path, recorder)
    done = storage.start(lambda: None)
    done.result()
    storage.wait(done, "read:nothing")
    later = storage.start(time.sleep, 0.05)
    storage.wait(later, "read:block")
    recorder.close()
    (span,) = Timeline.read(tmp_path)
    assert (span.kind, span.name) == (Kind.FILE_WAIT, "read:block")


@pytest.mark.parametrize("tiers", [Tiers(optimizer="host"), Tiers(optimizer="file")])
def test_on_a_gpu_the_step_is_made_in_the_host_s_memory_and_copied_back(tmp_path, tiers):
    """With copies between two places in the CPU's memory."""
    models = []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        parallel = parallelize(torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.Linear(90, 3)), "dp=1")
        options = {"lr": 1e-2, "fused": True}
        if is_offloaded:
            parallel.device, parallel.storage = torch.device("cuda"), Storage(tiers, tmp_path)
            optimizer = OffloadedOptimizer(
                parallel, parallel.parameters(), torch.optim.AdamW, block=BLOCK, **options
            )
        else:
            optimizer = torch.optim.AdamW(parallel.parameters(), **options)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for parameter in parallel.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        models.append([each.detach() for each in parallel.parameters()])
    assert all(map(torch.equal, *models))


def test_what_cannot_be_offloaded_is_refused(tmp_path):
    for text, part in {
        "optimiser:file": "did you mean 'optimizer'",
        "optimizer:disk": "optimizer:host or file",
        "optimizer:file+optimizer:file": "twice",
        "gradients:file": "optimizer:file+gradients:file",
    }.items():
        with pytest.raises(PlanError, match=part.replace("+", r"\+")):
            Plan.parse(f"shard=zero3,offload={text}")
    for plan in (f"dp=2,shard=zero1,{ALL}", f"dp=2,shard=zero2,{ALL}", f"dp=2,exchange=local,{STATE}"):
        with pytest.raises(PlanError, match="offload"):
            Plan.parse(plan)
    assert "needs whole parameters" in refusal(f"dp=1,{STATE}", tmp_path, name="muon")
    assert "keeps no state" in refusal(f"dp=1,{STATE}", tmp_path, name="sgd")
    said = refusal(f"dp=1,{STATE}", tmp_path, name="offload_stand_ins:whole_factory")
    assert "by itself" in said
    assert "without a folder" in refusal(f"dp=1,{STATE}", None)
    parallel = parallelize(torch.nn.Linear(2, 2), "dp=1")
    with pytest.raises(LayoutError, match="stays here"):
        OffloadedOptimizer(parallel, parallel.parameters(), torch.optim.AdamW)


def test_a_folder_without_space_or_permission_is_named(tmp_path):
    (tmp_path / "file").touch()
    assert refusal(f"dp=1,{STATE}", tmp_path / "file").startswith("ConfigError: offload_folder=")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, before[1]))
    try:
        said = refusal(f"dp=1,{STATE}", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "of this rank needs" in said
    assert "free space" in said


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (f"dp=1,{STATE}", "the optimizer's exp_avg"),
        (f"dp=1,shard=zero3,{ALL}", "the gradients"),
        ("dp=1,offload=activations:file", "the activations"),
    ],
)
def test_a_disk_that_is_full_in_the_middle_is_named_and_the_last_checkpoint_is_intact(tmp_path, plan, what):
    (tmp_path / "empty").mkdir()
    said, expected, taken_up = full_in_the_middle(plan, tmp_path)
    assert said.startswith(f"cannot write {what}")
    assert "No space left" in said
    assert taken_up == expected


@pytest.mark.parametrize(
    ("plan", "offload"),
    [
        ("dp=1", "activations:file"),
        ("dp=1,microbatch=2,precision=bf16,recompute=full", "activations:file"),
        ("dp=1,recompute=selective", "optimizer:file+activations:file"),
        ("dp=2,tp=2,microbatch=2", "activations:file"),
        ("dp=2,shard=zero3,microbatch=2", "optimizer:file+gradients:file+parameters:file+activations:file"),
        ("dp=1,pp=2,microbatch=1,schedule=zb-h1", "activations:file"),
        ("dp=1,recompute=full:1", "activations:file:1"),
        ("dp=1,microbatch=2,recompute=selective", "optimizer:file+activations:file:2"),
        ("dp=1,pp=2,microbatch=2", "activations:file:2"),
    ],
)
def test_with_activations_in_files_a_training_has_the_same_bits(ranks, tmp_path, plan, offload):
    both(ranks, plan, f"offload={offload}", tmp_path, least=256)

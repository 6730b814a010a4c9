"""Checkpoints of a loop of one's own: any number of ranks and any Plan on the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from portable_stand_ins import (
    SAVED_AFTER,
    batch_norms,
    interrupted,
    refusal,
    refusal_to_count,
    round_trip,
    saved_beside,
    steps,
    taken_up,
    training,
)

import shoal
from shoal.checkpoint import Piece, SingleProcess, checkpoints, dtype_named, load, read_manifest, verify
from shoal.errors import CheckpointError
from shoal.spec.plan import Plan

HYBRID = "dp=4,replicate=2,shard=zero3"


def ranks_of(plan):
    return Plan.parse(plan).ranks


@pytest.mark.parametrize("kind", ["adamw", "two"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp=2,shard=zero1", "dp=2,shard=zero1"),
        ("dp=2,shard=zero3", HYBRID),
        (HYBRID, "dp=1"),
        ("dp=1", "dp=2,shard=zero2"),
    ],
)
def test_a_loop_goes_on_under_any_plan_as_if_it_had_not_stopped(ranks, tmp_path, kind, before, after):
    path, whole = ranks.run(interrupted, ranks_of(before), before, kind, tmp_path)[0]
    verify(path, SingleProcess())
    for state, losses, rate, calls in ranks.run(taken_up, ranks_of(after), after, kind, tmp_path):
        assert state == {"step": SAVED_AFTER, "words": ["a", 1, None]}
        assert rate == pytest.approx(5e-3 if kind == "adamw" else 5e-2)
        assert calls == [SAVED_AFTER] * 2
        # fp32 sums in another order
        assert losses == (whole if before == after else pytest.approx(whole, rel=1e-5))


@pytest.mark.parametrize(("before", "after"), [("dp=2,shard=zero1", "dp=2"), ("dp=2", "dp=2,shard=zero3")])
def test_what_is_loaded_and_saved_again_is_bitwise_the_same(ranks, tmp_path, before, after):
    ranks.run(round_trip, 2, before, after, tmp_path)
    values = []
    for folder in ("first", "second"):
        (path,) = checkpoints(tmp_path / folder)
        tensors = read_manifest(path).tensors
        pieces = [
            Piece.whole(name, torch.empty(record.shape, dtype=dtype_named(record.dtype)))
            for name, record in tensors.items()
        ]
        load(path, pieces, SingleProcess())
        values.append({piece.name: piece.tensor for piece in pieces})
    assert values[0].keys() == values[1].keys()
    assert {name.split("/")[0] for name in values[0]} == {"fixed", "model", "optimizer", "optimizer-tensor"}
    for name, value in values[0].items():
        assert torch.equal(values[1][name], value), name


def test_each_rank_gets_its_own_statistics_back(ranks, tmp_path):
    results = ranks.run(batch_norms, 2, "dp=2,shard=zero1", tmp_path)
    assert results[0][0] != results[1][0]
    assert all(before == after for before, after in results)


def test_a_loop_saves_beside_its_steps_what_it_would_save_while_it_waits(ranks, tmp_path):
    for waits, newest in ranks.run(saved_beside, 2, "dp=2,shard=zero1", tmp_path):
        assert waits == ["step-00000000", "step-00000001"]
        assert newest == tmp_path / "beside" / "step-00000001"
    assert checkpoints(tmp_path / "beside") == [newest]
    verify(newest)
    ours, theirs = read_manifest(newest), read_manifest(tmp_path / "waits" / newest.name)
    assert ours.files == theirs.files
    assert ours.state == theirs.state


def test_a_corrupt_checkpoint_is_passed_over_and_steps_are_counted(tmp_path):
    parallel, optimizer = training("dp=1", "adamw", seed=0)
    steps(parallel, optimizer, 0, 1)
    saved = parallel.full_state_dict()
    assert shoal.save(tmp_path, parallel, optimizer).name == "step-00000000"
    steps(parallel, optimizer, 1, 2)
    newest = shoal.save(str(tmp_path), parallel, optimizer)
    assert newest.name == "step-00000001"
    (newest / "rank-00000.safetensors").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="step-00000001 is corrupt and is skipped"):
        assert shoal.load(tmp_path, parallel, optimizer) == {"step": 0}
    assert all(torch.equal(value, saved[name]) for name, value in parallel.full_state_dict().items())
    steps(parallel, optimizer, 1, 3)
    before = parallel.full_state_dict(), copy.deepcopy(optimizer.state_dict())
    older = newest.with_name("step-00000000")
    content = (older / "rank-00000.safetensors").read_bytes()
    (older / "rank-00000.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with (
        pytest.warns(UserWarning, match="is corrupt"),
        pytest.raises(CheckpointError, match="has no sound checkpoint"),
    ):
        shoal.load(tmp_path, parallel, optimizer)
    assert all(torch.equal(value, before[0][name]) for name, value in parallel.full_state_dict().items())
    for key, held in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1]["state"][key][name]) for name, value in held.items())


def test_a_directory_that_one_rank_cannot_read_is_refused_on_all(ranks, tmp_path):
    for text in ranks.run(refusal_to_count, 2, "dp=2", tmp_path / "saved", tmp_path / ("x" * 300)):
        assert "rank 1" in text
        assert "cannot be read: File name too long" in text


def test_what_does_not_fit_is_refused_by_name_on_all_ranks(ranks, tmp_path):
    path, _ = ranks.run(interrupted, 2, "dp=2,shard=zero1", "adamw", tmp_path)[0]
    for text in ranks.run(refusal, 2, "dp=2", "two", path):
        assert "has the state of the optimizer AdamW, and the optimizer is now Adafactor and SGD" in text
    parallel, _ = training("dp=1", "adamw", seed=1)
    groups = [{"params": [each]} for each in parallel.parameters() if each.requires_grad]
    with pytest.raises(
        CheckpointError, match="the settings of 1 groups of parameters, and the optimizer has 4"
    ):
        shoal.load(path, parallel, torch.optim.AdamW(groups))
    weights_only = shoal.save(tmp_path / "weights", parallel)
    with pytest.raises(CheckpointError, match="has the state of no optimizer, and the optimizer is"):
        shoal.load(weights_only, parallel, torch.optim.AdamW(groups))
    with pytest.raises(CheckpointError, match="is not JSON"):
        shoal.save(tmp_path / "weights", parallel, kept={1, 2})
    with pytest.raises(CheckpointError, match="does not exist"):
        shoal.load(tmp_path / "nowhere", parallel)

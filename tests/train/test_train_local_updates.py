"""Local updates and compression in the Trainer: interruptions, stops, steps that one worker leaves out."""

import pytest
import torch
import torch.distributed as dist
from train_stand_ins import (
    FailingLoss,
    make_trainer,
    resume_half_way,
    save_half_way,
    weights,
    with_and_without_interruption,
)

from shoal.train import OptimizerConfig

LOCAL = "dp=2,exchange=local,every=2"


@pytest.mark.parametrize(
    "plan",
    [
        LOCAL,
        f"{LOCAL},fragments=2,compress=topk:8",
        f"{LOCAL},compress=int8,delay=1",
        "dp=4,shard=zero3,replicate=2,exchange=local,every=2",
        "dp=2,compress=topk:8",
        "dp=2,compress=powersgd:2",
        "dp=2,shard=zero2,compress=int8",
        "dp=4,shard=zero1,replicate=2,compress=sign,microbatch=1",
    ],
)
def test_a_resumed_run_is_bitwise_the_one_that_went_on(ranks, tmp_path, plan):
    """Both saved half-way: with local updates workers become equal when they save."""
    size = 4 if "dp=4" in plan else 2
    for resumed, without in ranks.run(with_and_without_interruption, size, plan, tmp_path):
        ours, theirs = resumed.pop("weights"), without.pop("weights")
        assert resumed == without
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def stretched(folder):
    """The weights with rounds that grow as the learning rate falls: without an interruption, and with one."""

    def make():
        optimizer = OptimizerConfig(warmup=0, learning_rate=1e-2)
        return make_trainer("dp=2,exchange=local,every=1,stretch=4", steps=8, optimizer=optimizer)

    trainer, resumed = make(), None
    for step in range(8):
        if step == 5:
            resumed = make()
            resumed.load(trainer.save(folder, {}))
        trainer.step()
    while resumed.step_count < 7:
        resumed.step()
    before_last = weights(resumed)
    resumed.step()
    for each in (trainer, resumed):
        each.close()
    return weights(trainer), weights(resumed), before_last


def test_a_resumed_run_knows_the_highest_learning_rate(ranks, tmp_path):
    """At step 5 it has fallen to 0.45 of it, and rounds have four steps: the last one is the next merge."""
    one, other = ranks.run(stretched, 2, tmp_path)
    for without, resumed, _ in (one, other):
        assert all(torch.equal(without[name], resumed[name]) for name in without)
    assert any(not torch.equal(value, other[2][name]) for name, value in one[2].items())


@pytest.mark.parametrize(("first", "second"), [(LOCAL, "dp=1"), ("dp=1", f"{LOCAL},compress=int8")])
def test_any_plan_takes_the_state_of_local_updates(ranks, tmp_path, first, second):
    saved = ranks.run(save_half_way, 1 if first == "dp=1" else 2, first, tmp_path)
    resumed = ranks.run(resume_half_way, 1 if second == "dp=1" else 2, second, saved[0][0])
    assert len({tuple(losses) for losses, _ in resumed}) == len(resumed)  # each worker has a loss of its own
    seen = sorted(sample for _, samples in (*saved, *resumed) for sample in samples)
    assert seen == sorted(set(seen))  # no sample was repeated


def stops(plan):
    """The steps after which each of 6 says that it stops, where rank 1 is asked to in its second."""
    trainer = make_trainer(plan)
    told = [trainer.step(stop=dist.get_rank() == 1 and number >= 1).stop for number in range(6)]
    trainer.close()
    return told


def test_workers_stop_after_the_same_merge(ranks):
    for told in ranks.run(stops, 2, "dp=2,exchange=local,every=3"):
        assert told == [False, False, True, False, False, True]


def with_a_bad_worker(plan):
    optimizer = OptimizerConfig(warmup=2, learning_rate=1e-2, skip=10)
    trainer = make_trainer(plan, loss=FailingLoss(1, float("nan")), optimizer=optimizer)
    results = [trainer.step() for _ in range(6)]
    trainer.close()
    with trainer.parallel.gathered():
        values = [each.detach().clone() for each in trainer.parallel.module.parameters()]
    return [result.skipped != "" for result in results], values


def test_a_worker_that_skips_steps_is_waited_for_and_changes_nothing(ranks):
    one, other = ranks.run(with_a_bad_worker, 2, LOCAL)
    assert one[0] == [False] * 6
    assert other[0] == [False, False, True, True, True, True]
    for first, second in zip(one[1], other[1], strict=True):
        assert torch.equal(first, second)
        assert first.isfinite().all()

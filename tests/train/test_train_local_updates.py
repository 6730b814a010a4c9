"""Local updates and compression in the Trainer: interruptions, stops, steps that one worker leaves out."""

import pytest
import torch
import torch.distributed as dist
from train_stand_ins import (
    SHAPE,
    STEPS,
    FailingLoss,
    make_trainer,
    resume_half_way,
    save_half_way,
    weights,
    with_and_without_interruption,
)

from shoal.models import build
from shoal.train import OptimizerConfig, Trainer

LOCAL = "dp=2,exchange=local,every=2"


@pytest.mark.parametrize(
    "plan",
    [
        LOCAL,
        f"{LOCAL},fragments=2,compress=topk:8",
        f"{LOCAL},compress=int8,delay=1",
        f"{LOCAL},compress=powersgd:2",
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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("every=3", [False, False, True, False, False, True]),
        # What merges that begin after steps 3 and 6 tell is known when they end.
        ("every=3,delay=1", [False, False, False, True, False, True]),
        ("every=4,fragments=2", [False, True, False, True, False, True]),
        ("every=6,fragments=2,delay=2", [False, False, False, False, True, True]),
        ("every=5,dense=3", [False, True, True, False, False, True]),
    ],
)
def test_workers_stop_after_the_same_merge(ranks, settings, expected):
    """At the end of the training, after step 6, all merge."""
    for told in ranks.run(stops, 2, f"dp=2,exchange=local,{settings}"):
        assert told == expected


def whole_at_the_end(plan, folder):
    """Half-way and at the end: whether all merged, and the values before the save, after it, and saved."""
    trainer, found = make_trainer(plan), []
    for step in range(STEPS):
        trainer.step()
        if step in (2, STEPS - 1):
            last = weights(trainer)
            other = make_trainer(plan)
            other.load(trainer.save(folder, {}))
            found.append((trainer.optimizer.has_merged, last, weights(trainer), weights(other)))
            other.close()
    trainer.close()
    return found


@pytest.mark.parametrize(
    "settings", ["every=3,fragments=3", "every=3,fragments=2,compress=topk:8", "every=6,fragments=2,delay=2"]
)
def test_workers_are_equal_after_the_last_step_and_in_each_checkpoint(ranks, tmp_path, settings):
    one, other = ranks.run(whole_at_the_end, 2, f"dp=2,exchange=local,{settings}", tmp_path)
    for number, ((merged, last, saved, loaded), (_, last_there, saved_there, _)) in enumerate(
        zip(one, other, strict=True)
    ):
        assert merged
        for name in last:
            assert torch.equal(saved[name], saved_there[name])
            assert torch.equal(saved[name], loaded[name])
            if number == 1:  # the last step merges by itself
                assert torch.equal(last[name], last_there[name])
                assert torch.equal(last[name], saved[name])


class Masked:
    """Samples of which every second one counts a single target."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        tokens = torch.randint(61, (13,), generator=torch.Generator().manual_seed(index))
        targets = tokens[1:].clone()
        if index % 2:
            targets[1:] = -100
        return tokens[:-1], targets


def masked(plan, average):
    model = build("tiny", overrides=SHAPE, device="meta")
    config = OptimizerConfig(name="sgd", warmup=0, learning_rate=0.1, clip=None)
    trainer = Trainer(model, Masked(), plan, batch=4, steps=9, seed=3, optimizer=config)
    trainer._guide = None
    found = []
    for _ in range(3):
        if average:
            trainer.optimizer.average_next()
        result = trainer.step()
        found.append((result.loss, result.gradient_norm))
    values = weights(trainer)
    trainer.close()
    return found, values


@pytest.mark.parametrize(
    ("plan", "average"),
    [
        ("dp=2,exchange=local,every=4,dense=3", False),
        ("dp=2,exchange=auto", True),
        ("dp=4,shard=zero1,replicate=2,exchange=local,every=4,dense=3", False),
    ],
)
def test_dense_steps_weigh_masked_targets_by_their_number(ranks, plan, average):
    """As one device does; fp32 rounds sums of other orders by 1e-6."""
    alone, values = ranks.run(masked, 1, "dp=1", False)[0]
    for found, theirs in ranks.run(masked, 4 if "dp=4" in plan else 2, plan, average):
        for ours, expected in zip(found, alone, strict=True):
            assert ours == pytest.approx(expected, rel=1e-5)
        for name, value in theirs.items():
            torch.testing.assert_close(value, values[name], rtol=0, atol=1e-5)


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

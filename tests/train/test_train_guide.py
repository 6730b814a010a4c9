"""exchange=auto: what it measures, what it chooses, and that guards bring dense steps back."""

import itertools
import re

import pytest
import torch
from train_stand_ins import make_trainer, weights

from shoal.parallel import LocalUpdates
from shoal.parallel.communication import Axis
from shoal.parallel.exchange import switchable_exchange
from shoal.predict.planner import DENSE
from shoal.spec.plan import Plan
from shoal.train import Callbacks, HeldOut, OptimizerConfig, Runtime, exchange_tuner, measured_exchange
from shoal.train import step as step_module
from shoal.train.exchange_choice import Compared, HeldOutValues, Stray, Watch, compared
from shoal.train.forward_backward import Passes

SLOW = 1e-6  # seconds of each byte that a rank sends
COMPUTE = 0.01  # seconds of the forwards and backwards of a step
PARTS = ("replicate", "workers")  # axes between workers


class Clock:
    """Time as links take it that are slow from a step on, and until another: nothing waits for it."""

    def __init__(self, first=0, last=1 << 30):
        self.first, self.last, self.step, self.now = first, last, 0, 0.0
        self.before = []

    def perf_counter(self):
        return self.now

    def sends(self, axis, nbytes):
        if axis.name in PARTS and axis.size > 1 and self.first <= self.step < self.last:
            self.now += SLOW * nbytes * (axis.size - 1) / axis.size

    def __enter__(self):
        for module in (step_module, switchable_exchange, measured_exchange):
            self.set(module, "time", self)
        run, reduce, gather, exchange = Passes.run, Axis.all_reduce, Axis.all_gather, Axis.all_to_all

        def passes(passes, position, **named):
            self.now += COMPUTE
            return run(passes, position, **named)

        def all_reduce(axis, tensor, name):
            self.sends(axis, 2 * tensor.numel() * tensor.element_size())
            return reduce(axis, tensor, name)

        def all_gather(axis, tensor, name):
            self.sends(axis, tensor.numel() * tensor.element_size())
            return gather(axis, tensor, name)

        def all_to_all(axis, received, sent, name, **rows):
            self.sends(axis, sent.numel() * sent.element_size())
            return exchange(axis, received, sent, name, **rows)

        self.set(Passes, "run", passes)
        self.set(Axis, "all_reduce", all_reduce)
        self.set(Axis, "all_gather", all_gather)
        self.set(Axis, "all_to_all", all_to_all)
        return self

    def set(self, owner, name, value):
        self.before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def __exit__(self, *_):
        for owner, name, value in self.before:
            setattr(owner, name, value)


def guided(
    plan,
    steps,
    *,
    network=None,
    before_step=lambda trainer: None,
    until=lambda trainer, decisions: False,
    load=None,
    **options,
):
    """Decisions, and the weights after the last step."""
    decisions = []
    settings = {"optimizer": OptimizerConfig(warmup=2, learning_rate=3e-3), **options}
    trainer = make_trainer(plan, steps=steps, callbacks=Callbacks(on_decision=decisions.append), **settings)
    if load is not None:
        trainer.load(load)
    with network or Clock(last=0) as links:
        while trainer.step_count < steps and not until(trainer, decisions):
            links.step = trainer.step_count
            before_step(trainer)
            trainer.step()
    trainer.close()
    return decisions, weights(trainer), trainer


def trials_that_fail(workers):
    """Weights of dense steps, and of auto on slow links where no trial passes."""
    before, exchange_tuner.compared = exchange_tuner.compared, lambda *_: Compared(1.0, "it was to fail")
    try:
        dense = guided(workers, 45, dropout=0.1)[1]
        decisions, values, _ = guided(f"{workers},exchange=auto,every=4", 45, network=Clock(), dropout=0.1)
    finally:
        exchange_tuner.compared = before
    return dense, values, [each.reason for each in decisions]


@pytest.mark.parametrize("workers", ["dp=2", "dp=4,shard=zero3,replicate=2", "dp=2,tp=2"])
def test_trials_leave_no_trace(ranks, workers):
    """Whatever is tried and fails, the training is the one with whole gradients."""
    size = Plan.parse(workers).ranks
    for dense, values, reasons in ranks.run(trials_that_fail, size, workers):
        assert sum("failed: it was to fail" in reason for reason in reasons) >= 2
        for name in dense:
            # Steps that measure sum gradients in another order.
            assert torch.allclose(dense[name], values[name], rtol=0, atol=2e-5), name


def trial_of_dense_steps(plan):
    """What trials find if dense steps are made whatever is tried."""

    def stay(trainer):
        trainer.optimizer.follow = lambda exchange: None

    decisions, _, _ = guided(plan, 40, network=Clock(), before_step=stay, dropout=0.1)
    return [each.numbers for each in decisions if "worth" in each.numbers]


def test_a_trial_makes_the_same_steps_again(ranks):
    for found in ranks.run(trial_of_dense_steps, 2, "dp=2,exchange=auto,every=4"):
        assert found
        for numbers in found:
            assert numbers["worth"] == 1.0
            assert numbers["its loss"] == numbers["dense loss"]


def seconds_of_each(plan):
    """By exchange, the predicted seconds of a step, and those that the clock shows."""
    found = {}
    with Clock():
        trainer = make_trainer(plan, steps=500)
        while trainer._guide._choices.conditions is None:
            trainer.step()
        the_guide, trainer._guide = trainer._guide, None
        for text, exchange in the_guide._choices.exchanges.items():
            trainer.optimizer.follow(exchange)
            steps = [trainer.step().seconds for _ in range(2 * exchange.every)]
            found[text] = the_guide._choices.expected(text).seconds, sum(steps) / len(steps)
        trainer.optimizer.follow(the_guide._choices.exchanges[DENSE])
        trainer.close()
    return found


@pytest.mark.parametrize("plan", ["dp=2", "dp=4", "dp=4,shard=zero2,replicate=2"])
def test_predicted_seconds_are_those_of_the_bytes_that_are_sent(ranks, plan):
    (found, *_) = ranks.run(seconds_of_each, Plan.parse(plan).ranks, f"{plan},exchange=auto,every=4")
    assert len(found) == 6
    for text, (predicted, shown) in found.items():
        # Not predicted: reports, the presence of gradients, and that four workers fill up the last blocks of
        # their parts, with so small a model a fifth of its elements.
        assert predicted == pytest.approx(shown, rel=0.2 if plan == "dp=4" else 0.05), text


def on_links(plan, steps, first, last):
    decisions, _, trainer = guided(plan, steps, network=Clock(first, last))
    told = [(each.step, each.exchange, each.reason, each.numbers) for each in decisions]
    return told, trainer._guide.followed


def test_on_slow_links_it_follows_what_passed_a_trial(ranks):
    found = ranks.run(on_links, 2, "dp=2,exchange=auto,every=4", 150, 0, 1 << 30)
    for decisions, followed in found:
        assert followed != DENSE
        trial = re.compile(f"a trial of {re.escape(followed)} over . steps passed")
        assert any(trial.search(reason) for _, _, reason, _ in decisions)
        measured = decisions[0][3]
        # Between two workers a rank sends the bytes of a vector once, and for each parameter a number that
        # says whether it has a gradient.
        assert measured["seconds a byte"] == pytest.approx(SLOW, rel=0.005)
        assert measured["seconds without exchange"] == pytest.approx(
            COMPUTE, rel=0.05
        )  # and a report's bytes
    # All ranks decide alike.
    assert [each[:3] for each in found[0][0]] == [each[:3] for each in found[1][0]]


def test_on_quick_links_steps_stay_dense(ranks):
    for decisions, followed in ranks.run(on_links, 2, "dp=2,exchange=auto,every=50", 60, 0, 0):
        assert followed == DENSE
        first, second = [reason for _, _, reason, _ in decisions]
        assert first == "measured"
        assert second.startswith("the quickest: exchange=bucketed: 0.01 s a step predicted")


def on_links_that_become_quick(plan, last):
    """What was decided until dense steps are back, or step 1,200, and what is followed then."""

    def is_back(trainer, decisions):
        measured = [each.numbers["dense seconds"] for each in decisions if "dense seconds" in each.numbers]
        return bool(measured) and measured[-1] < 2 * COMPUTE and trainer._guide.followed == DENSE

    decisions, _, trainer = guided(plan, 1200, network=Clock(0, last), until=is_back)
    return [(each.exchange, each.numbers) for each in decisions], trainer._guide.followed


def test_when_links_become_quick_steps_become_dense_again(ranks):
    for decisions, followed in ranks.run(on_links_that_become_quick, 2, "dp=2,exchange=auto,every=4", 140):
        assert any(exchange != DENSE for exchange, _ in decisions)
        assert followed == DENSE
        measured = [numbers["dense seconds"] for _, numbers in decisions if "dense seconds" in numbers]
        assert measured[0] > 0.05
        assert measured[-1] == pytest.approx(COMPUTE, rel=0.01)


def with_a_bad_stretch(plan):
    """Learning rates are raised a thousandfold once an exchange is followed."""

    def disturb(trainer):
        if trainer._guide.followed != DENSE:
            trainer._stepping.rates._peaks[:] = [3.0 for _ in trainer._stepping.rates._peaks]

    decisions, _, trainer = guided(plan, 120, network=Clock(), before_step=disturb)
    return [(each.exchange, each.reason) for each in decisions], trainer._guide._choices.tried


def test_a_followed_exchange_that_diverges_is_left_and_counts_as_failed(ranks):
    for decisions, tried in ranks.run(with_a_bad_stretch, 2, "dp=2,exchange=auto,every=4"):
        left = [reason for exchange, reason in decisions if exchange == DENSE and "the loss rose" in reason]
        assert left
        assert all("the loss rose" in tried[reason.partition(" failed")[0]].failed for reason in left)


def resumed(plan, folder):
    _, _, trainer = guided(plan, 120, network=Clock())
    followed = trainer._guide.followed
    saved = trainer.save(folder)
    again, _, other = guided(plan, 150, network=Clock(), load=saved)
    return followed, [each.reason for each in again], other._guide.followed


def test_a_resumed_training_measures_and_then_follows_what_had_passed(ranks, tmp_path):
    for followed, reasons, then in ranks.run(resumed, 2, "dp=2,exchange=auto,every=4", tmp_path):
        assert then == followed != DENSE
        assert reasons[:2] == ["measured", "it was followed before"]


def moved(plan):
    """What LocalUpdates tells of a round, and the moves themselves."""
    trainer = make_trainer(plan)
    before = torch.cat([each.local.flatten() for each in trainer.parallel.owned])
    assert isinstance(trainer.optimizer, LocalUpdates)
    changed = []
    whole = LocalUpdates._start

    def start(updates, number):
        changed.append(torch.cat([each.local.flatten() for each in trainer.parallel.owned]))
        whole(updates, number)

    LocalUpdates._start = start
    for _ in range(3):
        trainer.step()
    LocalUpdates._start = whole
    trainer.close()
    return before, changed[0], trainer.optimizer.take_moved()


def test_the_mean_cosine_of_workers_is_that_of_their_moves(ranks):
    found = ranks.run(moved, 2, "dp=2,exchange=local,every=3")
    moves = [(after - before).double() for before, after, _ in found]
    own = sum(float(told[0]) for _, _, told in found) / 2
    mean = float(found[0][2][1])
    assert own == pytest.approx(sum(float(move.square().sum()) for move in moves) / 2, rel=1e-4)
    assert mean == pytest.approx(float((sum(moves) / 2).square().sum()), rel=1e-4)


def test_guards_say_which_one_fails():
    plan = Plan(dp=4, compress="topk:64")
    calm = Stray(likeness=0.5, own=1.0, left=0.1)
    watch = Watch(plan.exchanged)
    assert watch.look(2.0, 1.0, calm) == watch.look(2.4, 1.0, calm) == ""
    assert "rose from 2 to 2.6" in watch.look(2.6, 1.0, calm)
    assert "rose" in watch.look(float("nan"), 1.0, calm)
    apart = calm._replace(likeness=-0.1)
    for exchange in ("exchange=local", "exchange=local,compress=int8"):
        local = Watch(Plan.parse(f"dp=4,{exchange}").exchanged)
        assert local.look(2.0, 1.0, apart) == ""
        assert local.look(2.0, 1.0, calm) == ""
        assert local.look(2.0, 1.0, apart) == ""
        assert "against each other" in local.look(2.0, 1.0, apart)
    # The mean of sparse movements is short, which says nothing about workers.
    assert [watch.look(2.0, 1.0, apart) for _ in range(3)] == [""] * 3
    # Karimireddy et al., lemma 3: at most 4 (1 - 1/64) 64^2 of the largest square, for each of two memories.
    most = 2 * 4 * (1 - 1 / 64) * 64**2
    assert watch.look(2.0, 1.0, calm._replace(left=0.99 * most)) == ""
    assert "left out" in watch.look(2.0, 1.0, calm._replace(left=1.01 * most))


def values(*losses, accuracy=0.5):
    return [HeldOutValues(loss, {"accuracy": accuracy}) for loss in losses]


def test_trials_compare_in_equal_time_and_beyond_noise():
    first = HeldOutValues(3.0, {"accuracy": 0.3})
    dense = values(2.0, 2.0)
    assert compared(first, dense, values(2.0, 2.0), 1.0) == Compared(1.0, "")
    assert compared(first, dense, values(2.01, 2.01), 1.0) == (pytest.approx(0.99), "")
    assert (
        "loss is 2.03, and 2 after dense steps of equal time"
        in compared(first, dense, values(2.03), 1.0).failed
    )
    # In half the time dense steps come half as far, and tasks are compared where the loss is equal.
    half = values(2.5, 2.5, accuracy=0.4)
    assert compared(first, dense, half, 0.5) == Compared(0.5, "")
    assert "loss is 2.5" in compared(first, dense, half, 0.6).failed
    # With a deviation of 0.1 on both sides, 2.2 may be 2.
    assert compared(first, values(1.9, 2.1), values(2.1, 2.3), 1.0).failed == ""
    assert compared(first, values(1.9, 2.1), values(2.2, 2.4), 1.0).failed != ""
    nan = compared(first, dense, values(2.0, float("nan")), 1.0)
    assert "loss is nan" in nan.failed
    assert nan.worth == 0.05


def test_a_task_can_fail_where_the_loss_is_equal():
    """Equal losses have hidden worse tasks."""
    first, dense = HeldOutValues(3.0, {"accuracy": 0.3}), values(2.0, 2.0)
    assert compared(first, dense, values(2.0, accuracy=0.491), 1.0).failed == ""
    assert "accuracy is 0.48, and 0.5 after" in compared(first, dense, values(2.0, accuracy=0.48), 1.0).failed
    assert "accuracy is 0.39, and 0.4 after" in compared(first, dense, values(2.5, accuracy=0.39), 0.5).failed


def with_a_task(plan):
    """A held-out task that is worse whenever it is measured after the exchange that is tried."""
    calls = itertools.count()  # before a trial, after four dense steps, after the other four

    def task(output, targets):
        return 0.9 if next(calls) % 9 < 5 else 0.1

    samples = [(torch.arange(12), torch.arange(12))] * 4
    held_out = HeldOut(samples, count=4, functions={"task": task})
    still = OptimizerConfig(learning_rate=1e-7)  # losses are equal
    runtime = Runtime(held_out=held_out)
    decisions, _, _ = guided(plan, 40, network=Clock(), runtime=runtime, optimizer=still)
    return [each.reason for each in decisions]


def test_a_task_that_is_held_out_can_fail_a_trial(ranks):
    for reasons in ranks.run(with_a_task, 2, "dp=2,exchange=auto,every=4"):
        assert any("failed: task is 0.1, and 0.9 after dense steps" in reason for reason in reasons)

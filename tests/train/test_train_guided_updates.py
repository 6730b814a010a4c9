"""An exchange that changes while a training runs: each stretch is what a fixed Plan would do."""

import pytest
import torch
from train_stand_ins import make_trainer, weights

STEPS = 9


def values_under(plan, script=(), **options):
    """Weights after each step; `script` says before which step which settings of the Plan are followed."""
    trainer = make_trainer(plan, steps=STEPS, **options)
    trainer._guide = None  # the script says what is followed
    found = []
    for step in range(STEPS):
        for number, settings in script:
            if number == step and settings == "average":
                trainer.optimizer.average_next()
            elif number == step:
                trainer.optimizer.follow(
                    trainer.plan.replace(**{"exchange": "bucketed"} | settings).exchanged
                )
        trainer.step()
        found.append(weights(trainer))
    trainer.close()
    return found


def both(plan, guided, script):
    return values_under(plan), values_under(guided, script)


@pytest.mark.parametrize("workers", ["dp=2", "dp=4,shard=zero2,replicate=2", "dp=4,shard=zero3,replicate=2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"exchange": "local", "every": 3},
        {"compress": "topk:8"},
        {"exchange": "local", "every": 2, "compress": "int8"},
    ],
)
def test_a_change_after_dense_steps_is_the_plan_that_begins_with_dense_steps(ranks, workers, settings):
    fixed = ",".join(f"{name}={value}" for name, value in settings.items())
    size = 2 if workers == "dp=2" else 4
    for expected, found in ranks.run(
        both, size, f"{workers},{fixed},dense=3", f"{workers},exchange=auto", [(3, settings)]
    ):
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for name in ours:
                # Sums of compressed steps are cast at other places; local steps have equal bits.
                assert torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6), (step, name)


def test_dense_steps_between_others_and_steps_that_average_after_backward_are_dense(ranks):
    script = [(1, "average"), (2, {"compress": "int8"}), (4, {}), (6, "average")]
    for expected, found in ranks.run(both, 2, "dp=2", "dp=2,exchange=auto", script):
        for step in (0, 1):
            assert all(
                torch.allclose(found[step][name], expected[step][name], atol=1e-7) for name in found[0]
            )


def across(plan, script):
    """Weights after each step, and whether all workers have equal ones."""
    found = values_under(plan, script)
    return [torch.cat([each.flatten() for each in step.values()]) for step in found]


def test_workers_are_equal_wherever_the_exchange_changes(ranks):
    script = [(1, {"exchange": "local", "every": 2}), (5, {"compress": "sign"}), (7, {}), (8, "average")]
    one, other = ranks.run(across, 2, "dp=2,exchange=auto", script)
    equal = [torch.equal(first, second) for first, second in zip(one, other, strict=True)]
    # Steps 2 and 4 are in the middle of rounds of two steps.
    assert equal == [True, False, True, False, True, True, True, True, True]

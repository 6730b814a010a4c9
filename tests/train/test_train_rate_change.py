"""What a resumed run tells of its learning rate."""

from __future__ import annotations

import re

import pytest

from shoal.train import TrainConfig, learning_rate, load_config
from shoal.train.learning_rate import describe_rate_change

BEFORE = TrainConfig.model_validate({"steps": 600, "optimizer": {"learning_rate": 2e-3, "warmup": 50}})


def told(*settings, made=600, before=BEFORE):
    now = load_config(settings=settings, base=before.model_dump(mode="json"))
    return now, describe_rate_change(before, now, made)


def rate(config, step):
    return learning_rate(config.optimizer, step=step, steps=config.steps, batch=config.batch)


def test_a_course_that_is_as_it_was_is_not_told():
    assert told(made=300)[1] == ""
    assert told("batch=32", "checkpoint.every=7", made=300)[1] == ""


@pytest.mark.parametrize("settings", [("steps=12000",), ("steps=1200", "batch=64", "optimizer.scaling=sqrt")])
def test_more_steps_are_told_with_the_last_rate_and_the_next(settings):
    now, text = told(*settings)
    assert text.startswith("warning: the learning rate was 0.0002 at step 600")
    assert f"is {rate(now, 600):.3g} at step 601" in text
    assert f"steps went from 600 to {now.steps}" in text


@pytest.mark.parametrize("steps", [601, 605, 660, 1200, 12000])
@pytest.mark.parametrize("options", [(), ("optimizer.scaling=linear", "batch=48"), ("optimizer.decay=0.5",)])
def test_the_settings_that_are_offered_go_on_from_the_last_rate_and_end_below_it(steps, options):
    before = load_config(settings=options, base=BEFORE.model_dump(mode="json"))
    now, text = told(f"steps={steps}", before=before)
    last = rate(before, 599)
    if rate(now, 600) < 1.1 * last:  # a few steps more are the end of the decay
        assert "to go on" not in text
        return
    offered = re.findall(r"--set (\S+)", text)
    accepted = load_config(settings=offered, base=now.model_dump(mode="json"))
    rates = [rate(accepted, step) for step in range(600, steps)]
    assert rates[0] == pytest.approx(last, rel=0.01)
    assert rates == sorted(rates, reverse=True)
    end = float(re.search(r"end at (\S+):", text)[1])
    assert rates[-1] == pytest.approx(end, rel=0.01)


def test_a_constant_rate_that_goes_on_is_told_without_a_warning():
    before = load_config(
        settings=["optimizer.schedule=constant-then-decay"], base=BEFORE.model_dump(mode="json")
    )
    _, text = told("steps=1200", made=400, before=before)
    assert text == (
        "the learning rate was 0.002 at step 400, the last step made, and is 0.002 at step 401, "
        "since steps went from 600 to 1200"
    )


def test_a_rate_that_falls_at_once_is_told_with_what_to_set():
    _, text = told("steps=401", made=400)
    assert text.startswith("the learning rate was ")
    assert "steps went from 600 to 401" in text


def test_the_rate_that_was_recorded_counts_where_the_configuration_was_changed_before():
    now = BEFORE.model_copy(update={"steps": 6000})
    assert "was 0.0002 at step 600" in describe_rate_change(now, now, 600, last=2e-4)


def test_a_run_whose_steps_are_all_made_has_no_next_rate():
    assert describe_rate_change(BEFORE, BEFORE, 600, last=1.0) == ""


def test_a_function_of_the_user_is_not_taken_for_a_named_schedule():
    now, text = told("optimizer.schedule=somewhere:absent", made=300)
    assert text.endswith("another course, since optimizer.schedule went from cosine to somewhere:absent")
    assert describe_rate_change(now, now, 300, last=1.0) == ""

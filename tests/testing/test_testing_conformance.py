"""What holds the zoo against one device finds what departs, and goes on after what fails."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shoal.errors import ModelError
from shoal.parallel import Parallel
from shoal.testing.conformance import Case, outcomes
from shoal.testing.zoo import batch_norm, no_list


def changed(**changes):
    return replace(no_list(), **changes)


def loss_of_a_rank_alone(model, batch):
    if dist.is_initialized() and dist.get_rank() == 1:
        raise ValueError("rank 1 alone cannot go on")
    return no_list().loss(model, batch)


def crashes():
    """One rank raises."""
    return changed(loss=loss_of_a_rank_alone)


def refuses():
    """No rank lays it out."""

    def build():
        raise ModelError("this is given", possible="that", change="this to that")

    return changed(build=build)


def refuses_late():
    """It is refused after the first step."""

    def batch(number):
        if number == 1 and dist.is_initialized():
            raise ModelError("this comes late", possible="early", change="it")
        return no_list().batch(number)

    return changed(batch=batch)


def departs():
    """Under a Plan the last layer's gradient is a thousandth too large."""

    def loss(model, batch):
        if isinstance(model, Parallel):
            model.module.third.weight.register_hook(lambda gradient: gradient * 1.001)
        return no_list().loss(model, batch)

    return changed(loss=loss)


def moves_what_stays():
    """Under a Plan a buffer changes."""

    def build():
        model = no_list().build()
        model.register_buffer("kept", torch.full((2,), 1e-6))
        return model

    def loss(model, batch):
        if isinstance(model, Parallel):
            model.module.kept.mul_(1 + 1e-5)
        return no_list().loss(model, batch)

    return changed(build=build, loss=loss)


ENTRIES = {
    each.__name__: each
    for each in (batch_norm, crashes, departs, moves_what_stays, no_list, refuses, refuses_late)
}


def verdict_on(ranks, entry, sharding="zero1"):
    case = Case(entry, sharding, "fp32")
    return outcomes(ranks, [case], ENTRIES)[case]


def test_a_gradient_that_is_a_thousandth_too_large_departs(ranks):
    verdict = verdict_on(ranks, "departs")
    assert verdict.outcome == "failed"
    assert (verdict.departure.quantity, verdict.departure.name) == ("gradient", "third.weight")


def test_a_bit_that_must_stay_and_changes_is_a_failure(ranks):
    verdict = verdict_on(ranks, "moves_what_stays")
    assert verdict.outcome == "failed"
    assert (verdict.departure.quantity, verdict.departure.name) == ("buffer", "kept")


@pytest.mark.parametrize(
    ("entry", "outcome", "text"),
    [
        ("refuses", "refused", "this is given"),
        ("refuses_late", "failed", "refused too late, after the first step: this comes late"),
        ("crashes", "broken", "ValueError: rank 1 alone cannot go on"),
    ],
)
def test_what_does_not_train_is_told_with_its_words(ranks, entry, outcome, text):
    verdict = verdict_on(ranks, entry)
    assert verdict.outcome == outcome
    assert text in verdict.reason


def test_cases_go_on_after_one_that_fails(ranks):
    cases = [Case(entry, "none", "fp32") for entry in ("crashes", "refuses", "no_list", "batch_norm")]
    found = outcomes(ranks, cases, ENTRIES)
    assert [found[case].outcome for case in cases] == ["broken", "refused", "passed", "passed"]

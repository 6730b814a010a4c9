"""What holds the zoo against one device finds what departs, and goes on after what fails."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shoal.errors import ModelError
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
        if dist.is_initialized():
            model.module.third.weight.register_hook(lambda gradient: gradient * 1.001)
        return no_list().loss(model, batch)

    return changed(loss=loss)


def moves_what_stays():
    """Under a Plan a buffer changes."""

    def build():
        model = no_list().build()
        model.register_buffer("kept", torch.full((2,), float(not dist.is_initialized())))
        return model

    return changed(build=build)


ENTRIES = {
    each.__name__: each
    for each in (batch_norm, crashes, departs, moves_what_stays, no_list, refuses, refuses_late)
}


def outcome_of(ranks, entry, sharding="zero1"):
    case = Case(entry, sharding, "fp32")
    return outcomes(ranks, [case], ENTRIES)[case]


def test_a_gradient_that_is_a_thousandth_too_large_departs(ranks):
    outcome = outcome_of(ranks, "departs")
    assert outcome.kind == "failed"
    assert "third.weight by" in outcome.text or "gradient norm by" in outcome.text


def test_a_bit_that_must_stay_and_changes_is_a_failure(ranks):
    outcome = outcome_of(ranks, "moves_what_stays")
    assert (outcome.kind, "kept by" in outcome.text) == ("failed", True)


@pytest.mark.parametrize(
    ("entry", "kind", "text"),
    [
        ("refuses", "refused", "ModelError: this is given"),
        ("refuses_late", "failed", "refused too late, after the first step: this comes late"),
        ("crashes", "failed", "ValueError: rank 1 alone cannot go on"),
    ],
)
def test_what_does_not_train_is_told_with_its_words(ranks, entry, kind, text):
    outcome = outcome_of(ranks, entry)
    assert outcome.kind == kind
    assert text in outcome.text


def test_cases_go_on_after_one_that_fails(ranks):
    cases = [Case(entry, "none", "fp32") for entry in ("crashes", "refuses", "no_list", "batch_norm")]
    found = outcomes(ranks, cases, ENTRIES)
    assert [found[case].kind for case in cases] == ["failed", "refused", "agrees", "agrees"]

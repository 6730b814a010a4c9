"""The mean time between failures that a run believes, against Bayes' rule by numbers."""

import math

import pytest

from shoal.predict.cost.outlook import seconds_between_failures


@pytest.mark.parametrize(
    ("prior", "seen", "seconds"), [(86_400.0, 0, 3600.0), (3600.0, 3, 7200.0), (60.0, 40, 1e4)]
)
def test_it_is_the_inverse_of_the_mean_of_the_rates_posterior(prior, seen, seconds):
    # An exponential prior of the rate, whose mean is 1 / prior, times Poisson's likelihood, on a fine grid.
    rates = [rate * 60 / prior / 200_000 for rate in range(1, 200_000)]
    weights = [math.exp(-rate * (prior + seconds)) * (rate * prior) ** seen for rate in rates]
    mean = sum(rate * weight for rate, weight in zip(rates, weights, strict=True)) / sum(weights)
    assert seconds_between_failures(prior, seen, seconds) == pytest.approx(1 / mean, rel=0.01)


def test_what_is_seen_outweighs_the_guess():
    assert seconds_between_failures(1e6, 0, 0.0) == 1e6
    assert seconds_between_failures(1e6, 1000, 1e6) == pytest.approx(2e6 / 1001)

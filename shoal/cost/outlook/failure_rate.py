"""How often a run fails: what was expected before it, corrected by the failures that were seen in it.

Failures come independently of each other, so their number in a time is a Poisson variable whose rate is not
known. What is expected before the run, one failure in `prior` seconds, counts as if it had been seen: it is
a Gamma distribution of the rate with shape 1 and scale 1 / prior. After `seen` failures in `seconds` the rate
has a Gamma distribution with shape 1 + seen and scale 1 / (prior + seconds), whose mean is

    (1 + seen) / (prior + seconds)

Its inverse is the mean time between failures that this module gives. A run that never fails believes ever
longer times, one that fails often soon believes what it sees, and the first guess is forgotten once some
failures were seen. See Gelman et al., "Bayesian Data Analysis", section 2.6, for the Gamma prior.
"""

from __future__ import annotations


def seconds_between_failures(prior: float, seen: int, seconds: float) -> float:
    """Return the mean time between failures of a run.

    Args:
        prior: Seconds between failures as expected before the run.
        seen: Failures that were seen.
        seconds: Seconds of the run in which they were seen.
    """
    return (prior + seconds) / (1 + seen)

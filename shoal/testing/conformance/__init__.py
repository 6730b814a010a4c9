"""Train entries of the zoo under Shoal's library interface and on one device, and compare the results.

Nouns: Case (an entry, a sharding, a precision), Training (the results of a training), Outcome (whether a Case
    agrees with one device, is refused by a named error, or fails). `outcomes` runs Cases on the ranks of a
    RankPool, `expected` gives the required Outcome of each, `table` prints them. The tests and the docs call
    these.
"""

from shoal.testing.conformance.case import PRECISIONS, SHARDINGS, Case
from shoal.testing.conformance.expected import all_cases, expected, sampled_cases, table
from shoal.testing.conformance.outcome import Outcome, judge
from shoal.testing.conformance.reference import train_alone
from shoal.testing.conformance.run import outcomes
from shoal.testing.conformance.training import Training
from shoal.testing.conformance.under_plan import train_under

__all__ = [
    "PRECISIONS",
    "SHARDINGS",
    "Case",
    "Outcome",
    "Training",
    "all_cases",
    "expected",
    "judge",
    "outcomes",
    "sampled_cases",
    "table",
    "train_alone",
    "train_under",
]

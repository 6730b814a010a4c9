"""Compares a Plan with one device in training: the work of `shoal check`.

Nouns: Trial and TaskTrial (the training that runs both ways, on tokens or on a Task), Tolerance (the
one-device reference, and how far rounding can move a result from it), Comparison (compares one Plan after
another with the reference), Verdict (the result for a Plan), Departure (the first difference, and its likely
cause). The command line calls `compare_locally`, or `compare_here` on ranks that another launcher started.
"""

from shoal.testing.check.reference import Tolerance, require_precision
from shoal.testing.check.runner import (
    CheckJob,
    Comparison,
    compare_here,
    compare_locally,
    covering,
    with_axes,
)
from shoal.testing.check.task_trial import AnyTrial, TaskTrial, trial_of
from shoal.testing.check.trial import Trial
from shoal.testing.check.verdict import Departure, Deviation, StepReport, Verdict

__all__ = [
    "AnyTrial",
    "CheckJob",
    "Comparison",
    "Departure",
    "Deviation",
    "StepReport",
    "TaskTrial",
    "Tolerance",
    "Trial",
    "Verdict",
    "compare_here",
    "compare_locally",
    "covering",
    "require_precision",
    "trial_of",
    "with_axes",
]

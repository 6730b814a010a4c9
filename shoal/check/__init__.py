"""Proof that a Plan trains as one device does: what `shoal check` does.

Nouns: Trial and TaskTrial (what is trained both ways: on tokens, or a Task), Tolerance (the one-device
reference, and how far from it rounding leads), Comparison (holds one Plan after another against it), Verdict
(what became of a Plan), Departure (what differs first, and what that looks like). The command line calls
`compare_locally`, or `compare_here` on ranks that another launcher started.
"""

from shoal.check.choice import covering, with_axes
from shoal.check.runner import CheckJob, Comparison, compare_here, compare_locally
from shoal.check.task_trial import AnyTrial, TaskTrial, trial_of
from shoal.check.tolerance import Tolerance
from shoal.check.trial import Trial
from shoal.check.verdict import Departure, Deviation, StepReport, Verdict

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
    "trial_of",
    "with_axes",
]

"""Verdicts on timelines: what bounds a step, which rank is late, why, and what to do next.

Nouns: Verdict, Bottleneck, Straggler, Cause, Pattern, Policy. `verdict` judges a window of steps of a
    Timeline; the report, the pages and the live view print it. `docs/concepts/verdict.md` is its policy.
    Imports no torch.
"""

from shoal.analyze.diagnosis.compute_time import POLICY, Cause, Pattern, Policy
from shoal.analyze.diagnosis.run_follower import Told, told_by
from shoal.analyze.diagnosis.straggler import Straggler
from shoal.analyze.diagnosis.verdict import Bottleneck, Verdict, verdict

__all__ = [
    "POLICY",
    "Bottleneck",
    "Cause",
    "Pattern",
    "Policy",
    "Straggler",
    "Told",
    "Verdict",
    "told_by",
    "verdict",
]

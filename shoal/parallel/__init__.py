"""Laying a model over the ranks: one file per strategy, composed in one order by `apply.py`.

Nouns: Parallel (a model laid over the ranks), Axis (a group with its collectives), Bucket (parameters that
are gathered, reduced and sharded together), Owned (what a rank's optimizer changes). The trainer calls
`parallelize`, and so does a user with a loop of their own.
"""

from shoal.parallel.apply import parallelize, require_executable, require_trainable
from shoal.parallel.bucket import Owned
from shoal.parallel.communication import Axes, Axis, Pending
from shoal.parallel.parallel import Parallel

__all__ = [
    "Axes",
    "Axis",
    "Owned",
    "Parallel",
    "Pending",
    "parallelize",
    "require_executable",
    "require_trainable",
]

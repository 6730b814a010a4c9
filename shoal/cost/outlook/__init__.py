"""Long runs: failures, goodput and days. Also corrects a Cluster by measurements of runs."""

from shoal.cost.outlook.goodput import goodput
from shoal.cost.outlook.long_run import RESTART, STORAGE, LongRun, long_run
from shoal.cost.outlook.observation import Observation

__all__ = [
    "RESTART",
    "STORAGE",
    "LongRun",
    "Observation",
    "goodput",
    "long_run",
]

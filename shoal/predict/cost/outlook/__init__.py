"""Long runs: failures, goodput and days. Also the bands of predictions, and a Cluster corrected by runs."""

from shoal.predict.cost.outlook.band import Band, band_between, band_of
from shoal.predict.cost.outlook.long_run import (
    RESTART,
    STORAGE,
    LongRun,
    account_summary,
    best_interval,
    goodput,
    long_run,
    seconds_between_failures,
)
from shoal.predict.cost.outlook.observation import Observation

__all__ = [
    "RESTART",
    "STORAGE",
    "Band",
    "LongRun",
    "Observation",
    "account_summary",
    "band_between",
    "band_of",
    "best_interval",
    "goodput",
    "long_run",
    "seconds_between_failures",
]

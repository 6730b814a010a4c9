"""Compare runs: two with one another, and several over their number of ranks. Imports no torch.

`RunValues` are the values of a run step by step. `differences` tests them value by value against those of
another run (`Difference`, `Verdict`). `scaling` fits a law to the speed of runs on different numbers of ranks
(`Scaling`). Called by `shoal compare`.
"""

from shoal.analyze.compare.differences import Difference, RunValues, Verdict, differences
from shoal.analyze.compare.significance import BLOCKS, DRIFT, FEWEST, LEAST, LEVEL, Test

__all__ = [
    "BLOCKS",
    "DRIFT",
    "FEWEST",
    "LEAST",
    "LEVEL",
    "Difference",
    "RunValues",
    "Test",
    "Verdict",
    "differences",
]

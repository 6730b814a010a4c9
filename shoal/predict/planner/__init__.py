"""Choose a Plan and explain the choice. Imports no torch.

`choose` ranks all legal Plans of a Workload on a Cluster (`Candidate`, `Choice`) and explains the best
(`Explanation`). `scale` draws the curve over numbers of devices (`Scaling`). Both use a `Search` through a
`Space`. Called by `shoal plan`, `shoal scale` and `shoal train --plan auto`.
"""

from shoal.predict.planner.candidate import Candidate
from shoal.predict.planner.choose import OBJECTIVES, Choice, choose, configuration
from shoal.predict.planner.exchange import (
    DENSE,
    CodecMeasure,
    Conditions,
    Expected,
    Tried,
    candidates,
    exchange_of,
    expected,
)
from shoal.predict.planner.explain import Explanation
from shoal.predict.planner.heterogeneous import Slower, Unequal, in_proportion
from shoal.predict.planner.refine import changed
from shoal.predict.planner.scale import Point, Scaling, scale
from shoal.predict.planner.search import Ranking, Search
from shoal.predict.planner.space import ALL_SIZES, Degrees, Space

__all__ = [
    "ALL_SIZES",
    "DENSE",
    "OBJECTIVES",
    "Candidate",
    "Choice",
    "CodecMeasure",
    "Conditions",
    "Degrees",
    "Expected",
    "Explanation",
    "Point",
    "Ranking",
    "Scaling",
    "Search",
    "Slower",
    "Space",
    "Tried",
    "Unequal",
    "candidates",
    "changed",
    "choose",
    "configuration",
    "exchange_of",
    "expected",
    "in_proportion",
    "scale",
]

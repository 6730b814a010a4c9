"""What things cost, as pure functions: no state, no torch, no measurement.

Nouns: Costs (seconds of a Workload on a Cluster under any Plan), Memories (its bytes per rank), Layout (the
settings of a Plan that a block's cost depends on), Algorithm (one way to do a collective on one level, with
its steps and bytes), AlphaBeta (seconds per step and per byte), Offload (the effect of keeping state outside
of the device). The packages below are `collectives`, `time`, `memory` and `outlook`; each exports its own
names. The choice of algorithm in shoal/collectives, the simulator, the planner and the docs call this
package.
"""

from shoal.predict.cost.collectives.algorithms import (
    ALGORITHMS,
    COLLECTIVES,
    LEVELS,
    Algorithm,
    AlphaBeta,
    algorithms_of,
    find_algorithm,
    fit_alpha_beta,
    require_name,
)
from shoal.predict.cost.device_kinds import Alike, Kinds, views_of
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.memory.memory import Memories, RankMemory, memory_of
from shoal.predict.cost.outlook.calibrate import Calibration, calibrate
from shoal.predict.cost.stage_split import settle_split
from shoal.predict.cost.time.offload import Offload
from shoal.predict.cost.time.step import Costs

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "LEVELS",
    "Algorithm",
    "Alike",
    "AlphaBeta",
    "Calibration",
    "Costs",
    "Kinds",
    "Layout",
    "Memories",
    "Offload",
    "RankMemory",
    "algorithms_of",
    "calibrate",
    "find_algorithm",
    "fit_alpha_beta",
    "memory_of",
    "require_name",
    "settle_split",
    "views_of",
]

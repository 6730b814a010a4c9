"""What things cost, as pure functions: no state, no torch, no measurement.

Nouns: Costs (seconds of any Plan of a Workload on a Cluster), Memories (bytes, as well), Layout (what of a
Plan a block's cost depends on), Algorithm (one way to do a collective on one level, with its steps and
bytes), AlphaBeta (what a step and a byte cost), Offload (what keeping state outside of the device does to a
step). Below are `collectives`, `time`, `memory` and `outlook`, each with a face of its own. Called by the
choice of algorithm in shoal/collectives, by the simulator, the planner and the docs.
"""

from shoal.cost.collectives.algorithm import Algorithm, AlphaBeta
from shoal.cost.collectives.algorithms import (
    ALGORITHMS,
    COLLECTIVES,
    LEVELS,
    algorithms_of,
    find_algorithm,
    require_name,
)
from shoal.cost.collectives.fit import fit_alpha_beta
from shoal.cost.layout import Layout
from shoal.cost.memory.memory import Memories, RankMemory, memory_of
from shoal.cost.memory.offload import Offload
from shoal.cost.outlook.calibrate import Calibration, calibrate
from shoal.cost.time.step import Costs, StepCost

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "LEVELS",
    "Algorithm",
    "AlphaBeta",
    "Calibration",
    "Costs",
    "Layout",
    "Memories",
    "Offload",
    "RankMemory",
    "StepCost",
    "algorithms_of",
    "calibrate",
    "find_algorithm",
    "fit_alpha_beta",
    "memory_of",
    "require_name",
]

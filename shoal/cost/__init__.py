"""What things cost, as pure functions: no state, no torch, no measurement.

Nouns: Algorithm (one way to do a collective on one level, with its steps and bytes), AlphaBeta (what a step
and a byte cost), Offload (what keeping state outside of the device does to a step). Called by the choice of
algorithm in shoal/collectives, by the simulator, the planner and the docs.
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
from shoal.cost.memory.offload import Offload

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "LEVELS",
    "Algorithm",
    "AlphaBeta",
    "Offload",
    "algorithms_of",
    "find_algorithm",
    "fit_alpha_beta",
    "require_name",
]

"""What things cost, as pure functions: no state, no torch, no measurement.

Nouns: Algorithm (one way to do a collective on one level, with its steps and bytes), AlphaBeta (what a step
and a byte cost). Called by the choice of algorithm in shoal/collectives, by the simulator and by the docs.
"""

from shoal.cost.algorithm import Algorithm, AlphaBeta
from shoal.cost.collectives import (
    ALGORITHMS,
    COLLECTIVES,
    LEVELS,
    algorithms_of,
    find_algorithm,
    require_name,
)
from shoal.cost.fit import fit_alpha_beta

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "LEVELS",
    "Algorithm",
    "AlphaBeta",
    "algorithms_of",
    "find_algorithm",
    "fit_alpha_beta",
    "require_name",
]

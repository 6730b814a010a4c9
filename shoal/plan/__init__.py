"""The Plan, and what follows from it alone.

Nouns: Plan (how a step is laid over the devices), Mesh (which rank stands where). Made by the user or the
planner, executed by `shoal.parallel`, timed by the simulator. Imports no torch.
"""

from shoal.plan.legal import VARIED, legal_plans
from shoal.plan.mesh import AXES, Mesh
from shoal.plan.plan import CHOICES, DEGREES, Plan, divisors, parse_settings

__all__ = [
    "AXES",
    "CHOICES",
    "DEGREES",
    "VARIED",
    "Mesh",
    "Plan",
    "divisors",
    "legal_plans",
    "parse_settings",
]

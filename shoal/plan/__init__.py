"""The Plan, and all that follows from a Plan alone.

Nouns: Plan (how a step is laid over the devices), SettledPlan (a Plan with a fixed micro-batch), Mesh (the
    place of each rank), Groups (which ranks communicate), Sharding (which states data parallelism cuts). Made
    by the user or the planner, executed by `shoal.parallel`, timed by the simulator. Imports no torch.
"""

from shoal.plan.groups import FamilyGroups, Group, Groups
from shoal.plan.legal import VARIED, legal_plans
from shoal.plan.mesh import AXES, Mesh
from shoal.plan.plan import CHOICES, DEGREES, Plan, divisors, element_bytes, parse_settings
from shoal.plan.settled import SettledPlan
from shoal.plan.sharding import FULLY_SHARDED, SHARDINGS, UNSHARDED, Sharding

__all__ = [
    "AXES",
    "CHOICES",
    "DEGREES",
    "FULLY_SHARDED",
    "SHARDINGS",
    "UNSHARDED",
    "VARIED",
    "FamilyGroups",
    "Group",
    "Groups",
    "Mesh",
    "Plan",
    "SettledPlan",
    "Sharding",
    "divisors",
    "element_bytes",
    "legal_plans",
    "parse_settings",
]

"""The Plan, and all that follows from a Plan alone.

Nouns: Plan (how a step is laid over the devices), SettledPlan (a Plan with a fixed micro-batch), Mesh (the
    place of each rank), Groups (which ranks communicate), Boundary (which ranks send to those of another
    stage), Sharding (which states data parallelism cuts), Shares (micro-batches of each data-parallel rank),
    Exchange (how workers exchange what they learn), Compression (what they send in place of a vector), Tiers
    (which state is kept outside of the device, and where). Made by the user or the planner, executed by
    `shoal.parallel`, timed by the simulator. Imports no torch.
"""

from shoal.spec.plan.allowed_values import AXES, CHOICES, DEFAULT_ORDER, DEGREES, element_bytes
from shoal.spec.plan.enumerate import VARIED, legal_plans
from shoal.spec.plan.exchange import BLOCK, CHUNK, SYNCHRONOUS, Compression, Exchange
from shoal.spec.plan.group import Group
from shoal.spec.plan.groups import Boundary, FamilyGroups, Groups, Mesh
from shoal.spec.plan.offload import BLOCK_ELEMENTS, BUFFERS, DEVICE, GRANULE, OFFLOADED, Tiers
from shoal.spec.plan.plan import Plan, parse_settings
from shoal.spec.plan.resolved import BlockChoices, ByFields, SettledPlan, block_choices
from shoal.spec.plan.sharding import FULLY_SHARDED, SHARDINGS, UNSHARDED, Sharding, divisors
from shoal.spec.plan.uneven_micro_batches import EQUAL, Shares

__all__ = [
    "AXES",
    "BLOCK",
    "BLOCK_ELEMENTS",
    "BUFFERS",
    "CHOICES",
    "CHUNK",
    "DEFAULT_ORDER",
    "DEGREES",
    "DEVICE",
    "EQUAL",
    "FULLY_SHARDED",
    "GRANULE",
    "OFFLOADED",
    "SHARDINGS",
    "SYNCHRONOUS",
    "UNSHARDED",
    "VARIED",
    "BlockChoices",
    "Boundary",
    "ByFields",
    "Compression",
    "Exchange",
    "FamilyGroups",
    "Group",
    "Groups",
    "Mesh",
    "Plan",
    "SettledPlan",
    "Sharding",
    "Shares",
    "Tiers",
    "block_choices",
    "divisors",
    "element_bytes",
    "legal_plans",
    "parse_settings",
]

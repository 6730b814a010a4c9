"""The Plan, and all that follows from a Plan alone.

Nouns: Plan (how a step is laid over the devices), SettledPlan (a Plan with a fixed micro-batch), Mesh (the
    place of each rank), Groups (which ranks communicate), Boundary (which ranks send to those of another
    stage), Sharding (which states data parallelism cuts), Shares (micro-batches of each data-parallel rank),
    Exchange (how workers exchange what they learn), Compression (what they send in place of a vector), Tiers
    (which state is kept outside of the device, and where). Made by the user or the planner, executed by
    `shoal.parallel`, timed by the simulator. Imports no torch.
"""

from shoal.plan.block_choices import BlockChoices, block_choices
from shoal.plan.boundary import Boundary
from shoal.plan.by_fields import ByFields
from shoal.plan.choices import CHOICES, DEGREES, element_bytes
from shoal.plan.compression import BLOCK, CHUNK, Compression
from shoal.plan.degrees import divisors
from shoal.plan.exchange import SYNCHRONOUS, Exchange
from shoal.plan.group import Group
from shoal.plan.groups import FamilyGroups, Groups
from shoal.plan.legal import VARIED, legal_plans
from shoal.plan.mesh import Mesh
from shoal.plan.offload import BLOCK_ELEMENTS, BUFFERS, DEVICE, GRANULE, OFFLOADED, Tiers
from shoal.plan.order import AXES, DEFAULT_ORDER
from shoal.plan.plan import Plan, parse_settings
from shoal.plan.settled import SettledPlan
from shoal.plan.sharding import FULLY_SHARDED, SHARDINGS, UNSHARDED, Sharding
from shoal.plan.shares import EQUAL, Shares

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

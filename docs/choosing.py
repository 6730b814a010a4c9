"""The tables of docs/guides/choosing.md: what the planner and the cost model say, asked anew each time.

Each function gives a head and rows. A test asks the same functions for the values behind the page's claims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from shoal.predict.cost import Costs, Memories
from shoal.predict.planner.candidate import Candidate
from shoal.predict.planner.search import Search
from shoal.predict.planner.space import Degrees
from shoal.predict.simulate import played_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan import CHOICES, Plan, SettledPlan, divisors
from shoal.spec.workload import Workload, shape, workload_of
from shoal.units import format_bytes, format_count, format_seconds

__all__ = ["CHOOSING", "best", "least_network", "quickest_sharded", "with_network"]

TOKENS = 4 << 20
"""Of a step."""

SHARDS = CHOICES["shard"]
DENSE = ("gpt3-1.3b", "llama3-8b", "llama2-13b", "llama2-70b")
TOKENS_PER_DEVICE = (8192, 32768, 131072)
DEVICES = (64, 256, 1024)
TENSORS = (1, 2, 4, 8, 16)
PIPELINES = (1, 8, 16)
NETWORKS = (400, 100, 50, 25)
LENGTHS = (8192, 32768, 131072, 524288)
EXPERTS = (1, 4, 8, 16, 32, 64)

_SLOWER = 1.1  # than with a network that takes no time
_GBIT = 1e9 / 8


def with_network(cluster: Cluster, gbits: float) -> Cluster:
    """The same machines with so many Gbit/s of network for each device."""
    *inner, network = cluster.levels
    return cluster.replace(levels=(*inner, replace(network, bandwidth=gbits * _GBIT)))


@cache
def work(model: str, length: int | None = None) -> Workload:
    """A preset's work, on samples of another length if one is given."""
    found = shape(model)
    return workload_of(found if length is None else found.replace(seq=length))


def best(workload: Workload, cluster: Cluster, accept: Callable[[Degrees], bool]) -> Candidate | None:
    """The planner's choice for a step of TOKENS, of the degrees that are accepted; None if there is none."""
    return Search(workload, cluster, TOKENS // workload.length).best(1, accept).best


def quickest_sharded(workload: Workload, cluster: Cluster, shard: str) -> tuple[float | None, float]:
    """Of plain data parallelism: seconds of the quickest step that fits, and bytes of the most frugal one."""
    costs = Costs(workload, cluster)
    memories = Memories(workload, cluster, costs)
    batch = TOKENS // workload.length
    quickest, frugal = None, float("inf")
    for microbatch in divisors(batch // cluster.devices):
        for recompute in CHOICES["recompute"]:
            plan = SettledPlan(
                dp=cluster.devices,
                shard=shard,
                microbatch=microbatch,
                recompute=recompute,
                precision="bf16",
            )
            memory = memories.fullest(plan, batch)
            frugal = min(frugal, memory.peak)
            if memory.fits(cluster, margin=0.1):
                seconds = played_seconds(costs, plan, batch)
                quickest = seconds if quickest is None else min(quickest, seconds)
    return quickest, frugal


def least_network(shard: str, tokens_per_device: int) -> float:
    """Gbit/s for each device with which a step takes at most a tenth longer than with any more."""
    workload, cluster = work("llama3-8b"), Cluster.preset("dgx-h100", 64)
    plan = SettledPlan(dp=64, shard=shard, microbatch=1, precision="bf16", recompute="selective")
    batch = tokens_per_device * cluster.devices // workload.length

    def seconds(gbits: float) -> float:
        return played_seconds(Costs(workload, with_network(cluster, gbits)), plan, batch)

    allowed = _SLOWER * seconds(1e6)
    low, high = 1.0, 1e6
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if seconds(middle) <= allowed else (middle, high)
    return high


def _sharding() -> tuple[list[str], list[list[str]]]:
    cluster = Cluster.preset("dgx-h100", 64)
    rows = []
    for model in DENSE:
        cells = []
        for shard in SHARDS:
            seconds, memory = quickest_sharded(work(model), cluster, shard)
            cells.append(
                f"needs {format_bytes(round(memory))}" if seconds is None else format_seconds(seconds)
            )
        rows.append([f"`{model}`", format_count(work(model).parameters), *cells])
    return ["model", "parameters", *(f"`shard={shard}`" for shard in SHARDS)], rows


def _network() -> tuple[list[str], list[list[str]]]:
    return ["tokens of a device in a step", *(f"`{shard}`" for shard in SHARDS)], [
        [f"{tokens:,}", *(f"{least_network(shard, tokens):.3g}" for shard in SHARDS)]
        for tokens in TOKENS_PER_DEVICE
    ]


def only_data(degrees: Degrees) -> bool:
    """Data parallelism alone."""
    return degrees.tp == degrees.pp == degrees.cp == 1


def data_and_tensor(degrees: Degrees) -> bool:
    """Tensor parallelism within a node of eight."""
    return degrees.pp == degrees.cp == 1 and degrees.tp <= 8


def _devices() -> tuple[list[str], list[list[str]]]:
    rows = []
    for devices in DEVICES:
        cluster = Cluster.preset("dgx-h100", devices)
        found = [best(work("llama3-70b"), cluster, accept) for accept in (only_data, data_and_tensor)]
        rows.append([f"{devices:,}", *map(_step, found), _plan(found[-1])])
    return ["devices", "data alone", "data and tensor", "the Plan of these"], rows


def _tensor() -> tuple[list[str], list[list[str]]]:
    rows = []
    for tp in TENSORS:
        found = [
            best(
                work("llama3-70b"),
                Cluster.preset(machine, 64),
                lambda degrees, tp=tp: (degrees.tp, degrees.pp, degrees.cp) == (tp, 1, 1),
            )
            for machine in ("dgx-h100", "gb200-nvl72")
        ]
        rows.append([f"{tp}", *(cell for each in found for cell in (_step(each), _within_layers(each)))])
    head = ["`tp`"]
    for machine in ("`dgx-h100:64`, 8 to a node", "`gb200-nvl72:64`, all in one"):
        head += [machine, "within layers"]
    return head, rows


def data_and_pipeline(degrees: Degrees) -> bool:
    """Pipelines beside data parallelism."""
    return degrees.tp == degrees.cp == 1 and degrees.pp in PIPELINES


def _pipeline() -> tuple[list[str], list[list[str]]]:
    rows = []
    for gbits in NETWORKS:
        cluster = with_network(Cluster.preset("dgx-h100", 64), gbits)
        found = [best(work("llama2-70b"), cluster, accept) for accept in (only_data, data_and_pipeline)]
        rows.append([f"{gbits}", *map(_step, found), _plan(found[-1])])
    return ["Gbit/s for each device", "data alone", "data and pipeline", "the Plan of these"], rows


def data_and_context(degrees: Degrees) -> bool:
    """Context parallelism beside data parallelism."""
    return degrees.tp == degrees.pp == 1


def _context() -> tuple[list[str], list[list[str]]]:
    rows = []
    for length in LENGTHS:
        cluster = Cluster.preset("dgx-h100", 64)
        found = [best(work("llama3-8b", length), cluster, accept) for accept in (only_data, data_and_context)]
        rows.append([f"{length:,}", *map(_step, found), _plan(found[-1])])
    return ["tokens of a sequence", "data alone", "data and context", "the Plan of these"], rows


def _experts() -> tuple[list[str], list[list[str]]]:
    rows = []
    for ep in EXPERTS:
        found = best(
            work("deepseek-v3"),
            Cluster.preset("dgx-h100", 1024),
            lambda degrees, ep=ep: only_data(degrees) and degrees.ep == ep,
        )
        rows.append([f"{ep}", _step(found), _plan(found)])
    return ["`ep`", "step", "the Plan of these"], rows


def _step(found: Candidate | None) -> str:
    return "none" if found is None else f"{format_seconds(found.seconds)}, {found.mfu:.0%} MFU"


def _within_layers(found: Candidate | None) -> str:
    """Of the step, what tensor parallelism communicates and nothing hides."""
    if found is None or found.plan.tp == 1:
        return "-"
    return format_seconds(found.parts.get("tensor", 0.0))


def _plan(found: Candidate | None) -> str:
    if found is None:
        return "-"
    defaults = Plan()  # which are not written
    told = found.plan.replace(precision=defaults.precision, split=defaults.split, bucket=defaults.bucket)
    return f"`{told}`"


CHOOSING: dict[str, Callable[[], tuple[list[str], list[list[str]]]]] = {
    "sharding": _sharding,
    "network": _network,
    "devices": _devices,
    "tensor": _tensor,
    "pipeline": _pipeline,
    "context": _context,
    "experts": _experts,
}
"""By name, the tables of the page."""

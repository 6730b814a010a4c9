"""Time and memory when the optimizer's state or the weights are kept in the host's memory, or in files.

The trainer does not offload, and no Plan asks for it. This file says whether offloading would be worth
having, and gives a bound for programs that do it (Ren et al., "ZeRO-Offload", arXiv:2101.06840; Rajbhandari
et al., "ZeRO-Infinity", arXiv:2104.07857). A rank's optimizer owns N parameters. A weight has w bytes where
it computes, and its state has s = 12: Adam's moments and the fp32 weight. L is the rate of the device's link
to the host in one direction. H and D are one device's share of the rates of the host's memory and of its
files. The seconds of one step are:

    gradients   4 N bytes go down the link, block by block, while the last backward (B seconds) runs:
                max(0, 4 N / L - B). In a pipeline stages reduce after their last backward, so B counts as 0
    update      30 N bytes pass the host's memory; at the same time, chunk by chunk, w N go up the link and
                s N go out of files and into them: the longest of 30 N / H, w N / L and 2 s N / D

They replace the optimizer's passes on the device. The weights can be in the host's memory too, with zero3
and zero3-once alone, because other shardings need them whole all the time. Then the update sends no weights
up the link. Instead each device fetches its shards before they are gathered, in the forward (F seconds) and
again in the backward of each of m micro-batches:

    weights     m (max(0, w N / L - F) + max(0, w N / L - B)); from files, at the lesser of L and D

The gradients stay on the device, and so do shards of w N bytes for weights that are not in the host's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.cost.layout import Layout
from shoal.cost.memory.memory import FRAGMENTS, RankMemory
from shoal.cost.time.buckets import owned_by_rank
from shoal.cost.time.step import Costs, StageCost
from shoal.cost.time.update import UPDATE_BYTES
from shoal.errors import ClusterError, ConfigError, PlanError, nearest
from shoal.plan import SettledPlan
from shoal.units import format_bytes

__all__ = ["PLACES", "WHAT", "Offload"]

WHAT = ("optimizer", "parameters")
"""What can be offloaded: the optimizer's state, or the weights as well."""

PLACES = ("host", "file")
"""Places to offload to: the host's memory, or its files."""

_FP32 = 4.0  # bytes
_STATE = 3 * _FP32


@dataclass(frozen=True, slots=True)
class Offload:
    """The effect on a step of keeping state outside of the device.

    Attributes:
        what: One of WHAT.
        to: One of PLACES.
        parts: Exposed seconds of a step, by name: gradients, update, weights.
        replaced: Seconds that the step saves: the optimizer's passes on the device.
        link_bytes: Bytes in a step over the link of the device that moves most, in both directions.
        file_bytes: Bytes in a step to and from files, for that device.
        host_bytes: Bytes that all devices of a host together keep in the host's memory or files.
        weights: Share of the bytes between two steps that weights keep on the device.
    """

    what: str
    to: str
    parts: Mapping[str, float]
    replaced: float
    link_bytes: float
    file_bytes: float
    host_bytes: float
    weights: float

    @property
    def extra(self) -> float:
        """Seconds that offloading adds to a step."""
        return sum(self.parts.values()) - self.replaced

    def freed(self, memory: RankMemory) -> float:
        """Return the bytes of a rank's peak that offloading takes off the device."""
        moved = memory.parts["optimizer"] + (1 - self.weights) * memory.parts["weights"]
        return moved * (1 + FRAGMENTS if "fragments" in memory.parts else 1)

    @classmethod
    def of(
        cls, costs: Costs, plan: SettledPlan, batch: int, what: str = "optimizer", to: str = "host"
    ) -> Offload:
        """Return the effect of offloading on a step of `batch` samples under a Plan.

        Args:
            costs: Costs of the model on the cluster.
            plan: The Plan, with its micro-batch settled.
            batch: Samples of a step.
            what: One of WHAT.
            to: One of PLACES.

        Raises:
            ConfigError: `what` or `to` is not one of these.
            PlanError: The weights are to be offloaded, but the Plan keeps them whole.
            ClusterError: A rate of the host is not known, or its memory is too small.
        """
        _require("offload", what, WHAT)
        _require("to", to, PLACES)
        if what == "parameters" and not plan.sharding.cuts_weights:
            raise PlanError(
                f"offload=parameters was given with shard={plan.shard}, where every rank keeps whole weights",
                possible="offload=parameters with shard=zero3, or offload=optimizer",
                change="add shard=zero3 to the Plan, or offload the optimizer alone",
            )
        count = plan.microbatches_of(batch)
        rates = _Rates.of(costs, to)
        ranks = dict.fromkeys(costs.stages(plan, count))
        found = [_of_rank(costs, plan, stage, count, what, rates) for stage in ranks]
        worst = max(found, key=lambda each: each.extra)
        host = costs.cluster.host
        if to == "host" and worst.host_bytes > host.memory:
            raise ClusterError(
                f"the offloaded state takes {format_bytes(round(worst.host_bytes))} on each host, which has "
                f"{format_bytes(round(host.memory))}",
                possible="more sharding, more hosts, or to=file",
                change="shard the state over more ranks, or offload to files",
            )
        return worst


@dataclass(frozen=True, slots=True)
class _Rates:
    """Rates that one device gets, in bytes/s.

    Attributes:
        to: Where the state is kept: one of PLACES.
        link: Rate to the host, and as much from it.
        memory: Rate of the host's memory.
        file: Rate of the host's files; infinite where there are none.
        sharing: Number of devices that share a host.
    """

    to: str
    link: float
    memory: float
    file: float
    sharing: int

    @classmethod
    def of(cls, costs: Costs, to: str) -> _Rates:
        cluster = costs.cluster
        host, link = cluster.host, cluster.device.host_bandwidth
        needed = {"device.host_bandwidth": link, "host.memory": host.memory, "host.bandwidth": host.bandwidth}
        if to == "file":
            needed["host.file_bandwidth"] = host.file_bandwidth
        for name, value in needed.items():
            if not value:
                raise ClusterError(
                    f"{cluster.name} has no {name}, which offloading needs",
                    possible="bytes or bytes/s above 0, for devices with their own memory",
                    change=f"write {name} into the cluster's .toml file, or choose another cluster",
                )
        sharing = min(host.devices, cluster.devices_per_node)
        file = host.file_bandwidth / sharing if to == "file" else float("inf")
        return cls(to, link, host.bandwidth * host.share / sharing, file, sharing)


def _of_rank(
    costs: Costs, plan: SettledPlan, stage: StageCost, count: int, what: str, rates: _Rates
) -> Offload:
    owned = owned_by_rank(stage.parameters, plan)
    width = Layout.of(plan).width
    forward, backward = stage.forward, stage.input + stage.weight
    keeps_weights = what == "parameters"
    gradients, weights = _FP32 * owned, width * owned
    up = 0.0 if keeps_weights else weights
    files = 2 * _STATE * owned if rates.to == "file" else 0.0
    parts = {
        "gradients": max(0.0, gradients / rates.link - (backward if plan.pp == 1 else 0.0)),
        "update": max(UPDATE_BYTES * owned / rates.memory, up / rates.link, files / rates.file),
    }
    link = gradients + up
    if keeps_weights:
        fetch = weights / min(rates.link, rates.file)
        parts["weights"] = count * (max(0.0, fetch - forward) + max(0.0, fetch - backward))
        link += 2 * count * weights
        files += 2 * count * weights if rates.to == "file" else 0.0
    stays = 0.0 if keeps_weights else 1.0 if not plan.sharding.cuts_weights else width / _FP32
    kept = (_STATE + (width if keeps_weights else 0.0)) * owned
    return Offload(
        what=what,
        to=rates.to,
        parts=parts,
        replaced=costs.update(plan, stage.parameters),
        link_bytes=link,
        file_bytes=files,
        host_bytes=kept * rates.sharing,
        weights=stays,
    )


def _require(name: str, given: str, offered: tuple[str, ...]) -> None:
    if given not in offered:
        raise ConfigError(
            f"{name}={given} does not exist{nearest(given, offered)}",
            possible=f"{name} is one of {', '.join(offered)}",
            change=f"write {name}={offered[0]}, or another of these",
        )

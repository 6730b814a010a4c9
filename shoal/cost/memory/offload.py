"""What it takes, and frees, to keep the optimizer's state or the weights in the host's memory, or in files.

The trainer does not do it: no Plan says it. This tells whether it would be worth having, and is a bound for
programs that do (Ren et al., "ZeRO-Offload", arXiv:2101.06840; Rajbhandari et al., "ZeRO-Infinity",
arXiv:2104.07857). A rank's optimizer owns N parameters, whose weights have w bytes where they compute and
whose state has s = 12: Adam's moments and the fp32 weight. L is the rate of the device's link to the host in
one direction, H and D what a device gets of the host's memory and of its files, which devices share. Of one
step:

    gradients   4 N down the link beside the last backward B, block by block; with a pipeline, whose stages
                reduce after their last backward, beside nothing: max(0, 4 N / L - B)
    update      30 N through the host's memory, and chunk by chunk beside it w N up the link, and s N out of
                files and into them: the longest of 30 N / H, w N / L and 2 s N / D

in place of the optimizer's passes on the device. With weights in the host's memory too (zero3 alone, as other
shardings need them whole all the time) none goes up then; in every micro-batch each device fetches its shards
before they are gathered, in forward and again in backward, beside these:

    weights     m (max(0, w N / L - F) + max(0, w N / L - B)), of files at the lesser of L and D

On the device stay the gradients, and shards of w N for weights that are not in the host's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.cost.layout import Layout
from shoal.cost.memory.memory import FRAGMENTS, RankMemory
from shoal.cost.time.buckets import owned_by_rank
from shoal.cost.time.step import UPDATE_BYTES, Costs, StageCost
from shoal.errors import ClusterError, ConfigError, PlanError, nearest
from shoal.plan import SettledPlan
from shoal.units import format_bytes

__all__ = ["PLACES", "WHAT", "Offload"]

WHAT = ("optimizer", "parameters")
"""What can be kept elsewhere: the optimizer's state, or the weights as well."""

PLACES = ("host", "file")
"""Where: in the host's memory, or in its files."""

_FP32 = 4.0  # bytes
_STATE = 3 * _FP32


@dataclass(frozen=True, slots=True)
class Offload:
    """What keeping state outside of the device does to a step.

    Attributes:
        what: One of WHAT.
        to: One of PLACES.
        parts: Seconds of a step that nothing hides: gradients, update, weights.
        replaced: Seconds of the optimizer's passes on the device, which are then not made.
        link_bytes: Over the link of the device that moves most, both directions, in a step.
        file_bytes: To and from files for that device, in a step.
        host_bytes: That all devices of a host together keep there.
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
        """Seconds by which a step is longer."""
        return sum(self.parts.values()) - self.replaced

    def freed(self, memory: RankMemory) -> float:
        """Bytes of a rank's peak that are not on the device then."""
        moved = memory.parts["optimizer"] + (1 - self.weights) * memory.parts["weights"]
        return moved * (1 + FRAGMENTS if "fragments" in memory.parts else 1)

    @classmethod
    def of(
        cls, costs: Costs, plan: SettledPlan, batch: int, what: str = "optimizer", to: str = "host"
    ) -> Offload:
        """What it does to a step of `batch` samples under a Plan.

        Args:
            costs: Of the model on the cluster.
            plan: With its micro-batch.
            batch: Samples of a step.
            what: One of WHAT.
            to: One of PLACES.

        Raises:
            ConfigError: `what` or `to` is not one of these.
            PlanError: Weights are to be offloaded which the Plan keeps whole.
            ClusterError: A rate of the host is not known, or its memory is too small.
        """
        _require("offload", what, WHAT)
        _require("to", to, PLACES)
        if what == "parameters" and not plan.sharding.cuts_weights:
            raise PlanError(
                f"offload=parameters was given with shard={plan.shard}, where every rank has whole weights",
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
                f"what is offloaded takes {format_bytes(round(worst.host_bytes))} of each host, which has "
                f"{format_bytes(round(host.memory))}",
                possible="more sharding, more hosts, or to=file",
                change="shard the state over more ranks, or offload to files",
            )
        return worst


@dataclass(frozen=True, slots=True)
class _Rates:
    """Bytes/s that one device gets; files' are infinite where there are none.

    Attributes:
        to: Where state is kept.
        link: To and from the host, each.
        memory: Of the host.
        file: Of its files.
        sharing: Devices that share a host.
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
                    f"{cluster.name} does not say {name}, which offloading goes by",
                    possible="bytes or bytes/s above 0; of devices that have memory of their own",
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

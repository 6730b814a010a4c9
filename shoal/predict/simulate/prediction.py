"""A prediction of a run: its model, Plan and batch, on machines that a Cluster describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from shoal.errors import RunError
from shoal.predict.cost import Costs, Layout, settle_split
from shoal.predict.cost.time import compute_parts, workload_on
from shoal.predict.simulate.simulation import Simulation, simulate
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.run import Run
from shoal.spec.timeline import Kind, Purpose, Timeline
from shoal.spec.timeline.series import seconds_by_kind
from shoal.spec.workload import Workload, shape, with_adapters

_RENAMED = {"vocab_size": "vocab", "tie_embeddings": "tied"}
_NOT_OF_THE_SHAPE = ("norm_eps", "rope_base")


@dataclass(frozen=True)
class Prediction:
    """The work of a run, and its machines.

    Attributes:
        workload: The work of the model that it trains.
        plan: Its Plan, with the micro-batch settled.
        batch: Samples of a step.
        cluster: The machines, with as many devices as the run has ranks.
    """

    workload: Workload
    plan: SettledPlan
    batch: int
    cluster: Cluster

    @classmethod
    def of(cls, run: Run, cluster: Cluster) -> Prediction:
        """Return the prediction of a run on machines with as many devices as the run has ranks.

        Raises:
            RunError: The run does not say what it trained, or did not train a preset.
            ModelError: Its model is not known.
            ClusterError: The Cluster has no such number of devices.
        """
        config, text = run.description.get("config"), run.description.get("plan")
        if config is None or text is None or ":" in config["model"]:
            what = config["model"] if config else "something that it does not tell"
            raise RunError(
                f"{run.path} trained {what}, whose costs are not known",
                possible="a run of one of Shoal's presets",
                change="name another run",
            )
        plan = SettledPlan.of(Plan.parse(text), config["batch"])
        if cluster.devices != plan.ranks:
            cluster = cluster.with_devices(plan.ranks)
        options = _shape_fields(config.get("model_options") or {})
        model = shape(config["model"]).replace(**options | {"seq": config["sequence"]})
        workload = workload_on(cluster, model)
        lora = config.get("lora") or {}
        if lora.get("rank"):
            workload = with_adapters(workload, lora["rank"], lora["targets"], lora["dropout"])
        plan = settle_split(plan, workload, cluster, config["batch"])
        return cls(workload, plan, config["batch"], cluster)

    @cached_property
    def simulation(self) -> Simulation:
        """The predicted steps."""
        return simulate(self.workload, self.cluster, self.plan, self.batch)

    @cached_property
    def memory_share(self) -> float:
        """The share of compute that passes over memory take: there the memory's rate is the bound."""
        parts: dict[str, float] = {}
        for costs, plan, batch, *_ in Costs(self.workload, self.cluster).alike(self.plan, self.batch):
            stages = costs.blocks_of(plan, plan.microbatches_of(batch))
            placement = plan.placement if plan.pp > 1 else (0,)
            for place, blocks in zip(placement, stages, strict=True):
                for name, seconds in compute_parts(costs.at(plan, place), blocks, Layout.of(plan)).items():
                    parts[name] = parts.get(name, 0.0) + seconds
        whole = sum(parts.values())
        return parts.get("passes", 0.0) / whole if whole > 0 else 0.0

    @cached_property
    def transfer_seconds(self) -> dict[str, float]:
        """The seconds of each collective by the name of its spans, for verdicts on links.

        Messages between stages are left out, since their spans hold the wait for their sender. So are
        collectives of CPUs within a node: they go through memory, and their cores may have other work.
        """
        size = self.cluster.devices_per_node
        is_cpu = bool(self.cluster.cores) or self.cluster.device.name == "cpu"
        return {
            span.name: span.duration
            for span in self.simulation.timeline
            if span.kind == Kind.COLLECTIVE and span.purpose != Purpose.PIPELINE
            if not is_cpu or len({rank // size for rank in span.group}) > 1
        }

    def seconds_by_kind(self) -> dict[str, float]:
        """Return the seconds of a step by kind, as `shoal.spec.timeline.series` names them.

        One rank stands for all equal ranks, so the spans do not have the waits between those: the simulation
        adds them.
        """
        simulation = self.simulation
        breakdown = simulation.breakdown
        exposed = [simulation.exposed(rank.rank) for rank in breakdown.ranks]
        return {
            **seconds_by_kind(simulation.timeline),
            **breakdown.parts.disjoint(),
            **{purpose: fmean(each.get(purpose, 0.0) for each in exposed) for purpose in Purpose},
        }


def kinds_compared(before: Mapping[str, float], measured: Timeline) -> list[dict[str, Any]]:
    """Return, by kind of span, predicted and measured seconds of a step, and the error as a share."""
    after = seconds_by_kind(measured)
    return [
        {
            "kind": kind,
            "predicted": before[kind],
            "measured": after[kind],
            "error": before[kind] / after[kind] - 1 if after[kind] > 0 else None,
        }
        for kind in after
        if before[kind] > 0 or after[kind] > 0
    ]


def _shape_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of the built-in transformer as fields of a ModelShape."""
    fields = {
        _RENAMED.get(name, name): value for name, value in options.items() if name not in _NOT_OF_THE_SHAPE
    }
    return fields | ({"dropout": fields["dropout"] > 0} if "dropout" in fields else {})

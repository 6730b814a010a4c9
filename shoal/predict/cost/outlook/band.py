"""The band of a predicted step: where nine in ten measurements of its kind were.

A kind is a path of words, from the widest kind to the narrowest:

    dense or experts > family of the device > program and precision > one device, one node or several nodes
    "probe on" or "runs on" a family of devices        for a Cluster that was measured (`Cluster.calibrated`)

`bands.toml` has a band for each kind with held-out rows: the 5 % and 95 % quantiles of
log(measured / predicted). `benchmarks/fit_bands.py` writes it, and mixes kinds with few rows with the wider
kind. A kind without rows has the band of the wider kind that has some. A prediction outside of all
that was compared with measurements has the widest band of its model's kinds.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from shoal.spec.cluster import Cluster, devices_of
from shoal.spec.plan import Plan
from shoal.spec.workload import Workload

SIZES = ("one device", "one node", "several nodes")
"""Sizes of a run, the smallest first."""

_FAMILIES: Mapping[str, str] = {
    "A100 and A800": r"\bA[18]00",
    "Hopper": r"H[128]00|\bH20\b",
    "Blackwell": r"\bG?B[23]00",
    "AMD Instinct": r"MI\d{3}",
    "cards and older": r"",
}
_CORES = "cores"
_FAR = 2  # times the most devices of any row: with more, a prediction is outside


@dataclass(frozen=True, slots=True)
class Band:
    """Where nine in ten measured steps are, beside the predicted one.

    Attributes:
        low, high: Measured over predicted seconds: 5 % of the measurements are below `low`, and 5 % above
            `high`.
        kind: The kind whose rows the band comes from, from wide to narrow.
        rows: Number of held-out rows of that kind.
        outside: What was never compared with a measurement; empty if all was.
    """

    low: float
    high: float
    kind: tuple[str, ...]
    rows: int
    outside: tuple[str, ...] = ()

    @property
    def validated(self) -> str:
        """Say on which measurements the band stands."""
        if self.outside:
            return f"outside of what was validated: {'; '.join(self.outside)}"
        beside = ", and wider kinds" if len(self.kind) > 1 else ""
        return f"by {self.rows} held-out rows of {', '.join(self.kind)}{beside}"

    def around(self, seconds: float) -> tuple[float, float]:
        """Return the least and the most seconds of a step with these predicted seconds."""
        return seconds * self.low, seconds * self.high


def band_of(workload: Workload, cluster: Cluster, plan: Plan) -> Band:
    """Return the band of the step of a Plan.

    Args:
        workload: The training.
        cluster: The machines, with as many devices as the Plan has ranks or more.
        plan: The Plan.
    """
    kind = kind_of(workload, cluster, plan)
    measured = cluster.calibrated
    is_alike = kind[0] == "dense" or family_of(cluster) == _CORES  # rows of measured GPUs have no experts
    if measured.by and is_alike and SIZES.index(kind[-1]) <= _size(measured.devices, cluster):
        band = _bands().get((measured_kind(measured.by, cluster),))
        outside = tuple(_unseen_layouts(plan))
        if band is not None and not outside:
            left = 1 + measured.error
            return Band(min(band.low, 1 / left), max(band.high, left), band.kind, band.rows)
        if band is None:
            outside = (f"{family_of(cluster)} with figures of {measured.by}", *outside)
    else:
        outside = tuple(_unseen(kind, cluster, plan))
    if outside:
        return _widest(kind[0], outside)
    found = _narrowest(kind)
    assert found is not None, "a family with rows has a band"
    return found


def band_between(cluster: Cluster) -> Band | None:
    """Return the band of one step beside another one on these machines; None if none were compared.

    An error that both predictions share cancels: measured runs that one run of their model, machines and
    program corrected lie in it.
    """
    return _bands().get((measured_kind("runs", cluster),))


def kind_of(
    workload: Workload, cluster: Cluster, plan: Plan, precision: str | None = None
) -> tuple[str, str, str, str]:
    """Return the narrowest kind of a prediction.

    Args:
        workload: The training.
        cluster: The machines.
        plan: The Plan.
        precision: Type of products, if it is not the Plan's.
    """
    layers = workload.layers
    model = "experts" if any(layer.routed for layer in layers) else "dense"
    if layers[0].eager is None:
        program = "fused kernels"
    else:
        program = "operator by operator" if plan.compile == "none" else "compiled"
    size = SIZES[_size(plan.ranks, cluster)]
    return model, family_of(cluster), f"{program} in {precision or plan.precision}", size


def family_of(cluster: Cluster) -> str:
    """Return the family of the Cluster's device."""
    if cluster.cores or cluster.device.name == "cpu":
        return _CORES
    return next(name for name, words in _FAMILIES.items() if re.search(words, cluster.device.name))


def measured_kind(by: str, cluster: Cluster) -> str:
    """Return the kind of predictions for a Cluster that was measured by "probe" or "runs"."""
    return f"{by} on {family_of(cluster)}"


def layouts_of(plan: Plan) -> list[str]:
    """Return the ways in which a Plan divides a step: its degrees above 1, and its sharding."""
    degrees = [name for name in ("dp", "tp", "pp", "cp", "ep") if getattr(plan, name) > 1]
    return [*degrees, *([f"shard={plan.shard}"] if plan.shard != "none" else [])]


def _size(devices: int, cluster: Cluster) -> int:
    """Return the index of a number of devices in SIZES."""
    return 0 if devices <= 1 else 1 if devices <= cluster.devices_per_node else 2


def _unseen(kind: tuple[str, str, str, str], cluster: Cluster, plan: Plan) -> Iterator[str]:
    """Yield what no row has of a prediction."""
    seen, (_, family, how, _) = _table()["seen"], kind
    precision = how.rpartition(" ")[2]
    if family not in seen["precisions"]:
        yield family
    else:
        if cluster.device.name not in seen["devices"]:
            yield cluster.device.name
        if precision not in seen["precisions"][family]:
            yield f"{precision} on {family}"
    if kind[:2] not in _bands() and kind[0] == "experts" and family in seen["precisions"]:
        yield f"experts on {family}"
    if len(devices_of(cluster)) > 1:
        yield "devices that differ"
    if plan.ranks > _FAR * seen["most"]:
        yield f"{plan.ranks} devices, where the most were {seen['most']}"
    yield from _unseen_layouts(plan)


def _unseen_layouts(plan: Plan) -> Iterator[str]:
    yield from (each for each in layouts_of(plan) if each not in _table()["seen"]["layouts"])


def _narrowest(kind: tuple[str, ...]) -> Band | None:
    """Return the band of the narrowest kind with rows that has this one; None if there is none."""
    known = _bands()
    paths = (kind[:length] for length in range(len(kind), 0, -1))
    return next((known[path] for path in paths if path in known), None)


def _widest(model: str, outside: tuple[str, ...]) -> Band:
    """Return a band from the lowest to the highest of all kinds of these models."""
    bands = [band for kind, band in _bands().items() if kind[0] == model]
    low, high = min(band.low for band in bands), max(band.high for band in bands)
    return Band(low, high, (model,), _bands()[(model,)].rows, outside)


@cache
def _bands() -> dict[tuple[str, ...], Band]:
    found = {}
    for each in _table()["bands"]:
        kind = tuple(each["kind"])
        found[kind] = Band(math.exp(each["low"]), math.exp(each["high"]), kind, each["rows"])
    return found


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("bands.toml").read_text("utf-8"))

"""The scaling curve: the best Plan for each number of devices, and the number at which more stop paying.

From n devices to 2 n, tokens/s can at most double. Doubling pays if it brings at least half of that: 1.5
times the tokens/s. The communication wall is the number of devices beyond which a step gets no shorter (with
a fixed batch) or tokens/s do not grow (with a batch that grows).

Amdahl's law: let s be the part of a step on the fewest devices n0 that is not compute. If s did not shrink
at all, and compute and the wait for the slowest rank's compute divided evenly, n devices would take `s + (1 -
s) n0 / n` of that step; with a batch that grows with the devices, all of it. It is no bound, since Plans
differ: time above it is the cost of communication between more devices, time below it is saved by other
degrees.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cluster import Cluster
from shoal.planner.candidate import Candidate
from shoal.planner.offloaded import quicker_outside
from shoal.planner.refusal import refusal
from shoal.planner.search import Search
from shoal.workload import Workload

_PAYS = 1.5  # least factor on tokens/s from twice the devices


@dataclass(frozen=True, slots=True)
class Point:
    """The best Plan for one number of devices.

    Attributes:
        devices: Number of devices.
        batch: Samples of a step.
        best: The best Plan.
        efficiency: Tokens/s of a device, relative to those on the fewest devices.
        amdahl: Seconds of a step, by Amdahl's law.
    """

    devices: int
    batch: int
    best: Candidate
    efficiency: float
    amdahl: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """How steps scale: the best Plan for each number of devices.

    Attributes:
        points: The points, by number of devices, ascending.
        unfit: Numbers of devices for which no legal Plan fits.
        pays_to: Largest number of devices up to which each doubling paid; None if all did.
        wall: Largest number of devices up to which tokens/s grew at all; None if they always did.
    """

    points: tuple[Point, ...]
    unfit: tuple[int, ...]
    pays_to: int | None
    wall: int | None


def scale(
    workload: Workload,
    cluster: Cluster,
    counts: Sequence[int],
    *,
    batch: int | None = None,
    per_device: int | None = None,
    margin: float = 0.1,
) -> Scaling:
    """Choose a Plan for each number of devices.

    Args:
        workload: The training.
        cluster: The kind of machine; its own number of devices is ignored.
        counts: Numbers of devices.
        batch: Samples of a step, for any number of devices.
        per_device: Samples for each device; used instead of `batch`.
        margin: Share of each device's memory that must stay free.

    Raises:
        PlanError: No number of devices has a Plan that fits.
        ClusterError: A number of devices is not a multiple of whole nodes.
    """
    found, unfit = list[Candidate](), list[int]()
    for count in sorted(set(counts)):
        samples = _samples(count, batch, per_device)
        best = _best(Search(workload, cluster.with_devices(count), samples, margin=margin))
        if best is None:
            unfit.append(count)
        else:
            found.append(best)
    if not found:
        most = cluster.with_devices(max(counts))
        raise refusal(Search(workload, most, _samples(max(counts), batch, per_device), margin=margin))
    points = tuple(_point(each, found[0]) for each in found)
    return Scaling(points, tuple(unfit), _last(points, _PAYS), _last(points, 1.0))


def _best(search: Search) -> Candidate | None:
    """Return the best Plan, with `offload` if that is quicker."""
    found = search.best(1).found
    best = found[0] if found else None
    search, best = quicker_outside(search, best) or (search, best)
    return None if best is None else search.candidate(best)


def _samples(count: int, batch: int | None, per_device: int | None) -> int:
    return batch if batch is not None else (per_device or 1) * count


def _point(best: Candidate, first: Candidate) -> Point:
    each, at_first = (one.tokens_per_second / one.devices for one in (best, first))
    serial = 1 - (first.parts["compute"] + first.parts.get("control", 0.0)) / first.seconds
    work = best.batch / first.batch * first.devices / best.devices
    amdahl = first.seconds * (serial + (1 - serial) * work)
    return Point(best.devices, best.batch, best, each / at_first, amdahl)


def _last(points: Sequence[Point], gain: float) -> int | None:
    """Return the devices after which doubling them brings less than `gain` times the tokens/s."""
    for before, after in itertools.pairwise(points):
        doublings = after.devices / before.devices - 1  # 1 for twice as many
        if after.best.tokens_per_second < before.best.tokens_per_second * (1 + (gain - 1) * doublings):
            return before.devices
    return None

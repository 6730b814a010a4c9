"""The probe: measure on all ranks at once, and fit a Cluster to the measurements."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from shoal.cluster import Calibrated, Cluster, known_device
from shoal.collectives import keep_freed_memory
from shoal.probe.device import measure_attention, measure_host, measure_passes, measure_products
from shoal.probe.fit import fit
from shoal.probe.links import measure_contention, measure_hosts, measure_links
from shoal.probe.measurements import AttentionTime, Measurements, PassTime, ProductTime
from shoal.probe.place import Place
from shoal.probe.sheet import Sheet, read_sheet
from shoal.probe.suspicions import suspicions
from shoal.probe.synchronisations import measure_synchronisations
from shoal.probe.trust import FitError, errors_of, of_the_device, trusted
from shoal.probe.turns import THOROUGH, Effort

Timed = TypeVar("Timed", ProductTime, PassTime, AttentionTime)


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a probe.

    Attributes:
        cluster: The machine.
        measurements: The measurements that it was fitted to.
        sheet: Facts about the machine that were not measured.
        errors: The errors of each quantity.
        suspicions: Signs of problems, one sentence each.
    """

    cluster: Cluster
    measurements: Measurements
    sheet: Sheet
    errors: tuple[FitError, ...]
    suspicions: tuple[str, ...]


def probe(place: Place, name: str, effort: Effort = THOROUGH, say: Callable[[str], object] = print) -> Probed:
    """Measure the machine; every rank of the default group calls this, and all get equal results.

    Args:
        place: The ranks, and the backend to measure.
        name: Name of the Cluster.
        effort: Amount of measuring: THOROUGH, or QUICK.
        say: Called with a message about what is measured now.
    """
    if place.device.type == "cpu":
        keep_freed_memory()  # as training does
    measured = measure_device(place, effort, say)
    say("links")
    links = measure_links(place, effort) if place.ranks.count > 1 else ()
    measured = replace(measured, links=links, hosts=measure_hosts(place))
    found = None
    if place.ranks.rank == 0:
        sheet = read_sheet(place)
        wrong = tuple(suspicions(measured, sheet, place.backend, os.environ))
        found = fitted(measured, sheet, name, wrong)
    probed: Probed = place.gathered(found)[0]
    return probed


def fitted(measured: Measurements, sheet: Sheet, name: str, suspected: Sequence[str] = ()) -> Probed:
    """Return the machine that measurements describe, the errors of the fit, and what is doubtful about it.

    Args:
        measured: The measurements.
        sheet: Facts about the machine.
        name: Name of the Cluster.
        suspected: Signs of problems that are known already.
    """
    closest = fit(measured, sheet, name)
    errors = errors_of(of_the_device(measured, on_cores=sheet.on_cores).all, closest)
    preset = None if sheet.on_cores else known_device(sheet.device)
    cluster, doubts = trusted(closest, errors, preset)
    left = min(0.99, median(each.median for each in errors)) if errors else 0.0
    cluster = cluster.replace(calibrated=Calibrated(by="probe", devices=cluster.devices, error=left))
    return Probed(cluster, measured, sheet, errors, (*suspected, *doubts))


def measure_device(place: Place, effort: Effort, say: Callable[[str], object] = print) -> Measurements:
    """Measure devices and their host, and no links; every rank of the default group calls this.

    Args:
        place: The ranks, and the backend beside which devices compute.
        effort: Amount of measuring.
        say: Called with a message about what is measured now.
    """
    say("products")
    on_core, start = time.thread_time(), time.perf_counter()
    own = measure_products(place, effort)
    presence = (time.thread_time() - on_core) / (time.perf_counter() - start)
    products = median_of_ranks(place, own)
    paces = place.gathered(max(each.rate for each in own if each.precision == "fp32"))
    say("passes over memory, attention, launches")
    passes = median_of_ranks(place, measure_passes(place, effort))
    attention = median_of_ranks(place, measure_attention(place, effort))
    launch, dispatch, graph = zip(*place.gathered(measure_host(place, effort)), strict=True)
    say("contention, synchronisations")
    contention = place.gathered(measure_contention(place, effort))
    return Measurements(
        products=products,
        passes=passes,
        attention=attention,
        launch=median(launch),
        dispatch=median(dispatch),
        graph=median(graph),
        is_apart=place.device.type != "cpu",
        contention=median(contention),
        links=(),
        synchronisations=measure_synchronisations(place, effort),
        hosts=(),
        paces=tuple(paces),
        presence=tuple(place.gathered(presence)),
    )


def median_of_ranks(place: Place, own: Sequence[Timed]) -> tuple[Timed, ...]:
    """Return each measurement with the median of the seconds that all ranks measured at the same time.

    A backward that noise made less than nothing is left out.
    """
    seconds = place.gathered([each.seconds for each in own])
    medians = [median(values) for values in zip(*seconds, strict=True)]
    found = (replace(each, seconds=middle) for each, middle in zip(own, medians, strict=True))
    return tuple(each for each in found if each.seconds > 0)

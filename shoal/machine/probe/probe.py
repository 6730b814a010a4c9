"""The probe: measure on all ranks at once, and fit a Cluster to the measurements."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from shoal.collectives import keep_freed_memory
from shoal.machine.probe.device import measure_attention, measure_host, measure_passes, measure_products
from shoal.machine.probe.fit import FitError, errors_of, fit, of_the_device, trusted
from shoal.machine.probe.links import (
    measure_contention,
    measure_hosts,
    measure_links,
    measure_synchronisations,
)
from shoal.machine.probe.measurements import AttentionTime, HostRates, Measurements, PassTime, ProductTime
from shoal.machine.probe.place import THOROUGH, Effort, Place
from shoal.machine.probe.sheet import Sheet, read_sheet
from shoal.spec.cluster import Calibrated, Cluster, known_device

_OFF_THE_PACE = 0.10
_SLOW_LINK = 0.20  # below the median of hosts: links vary more than devices
_OVERSUBSCRIBED = 1.25
_FEWEST_HOSTS = 3


def suspicions(
    measured: Measurements, sheet: Sheet, backend: str, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield every suspicion.

    Args:
        measured: The measurements.
        sheet: Facts about the machine.
        backend: Backend that was measured.
        environment: Environment variables of the ranks.
    """
    hosts = sheet.devices // sheet.devices_per_host
    if sheet.on_cores and sheet.devices_per_host * sheet.units > sheet.cores:
        yield (
            f"{sheet.devices_per_host} ranks of {sheet.units} run on {sheet.cores} cores: ranks share cores, "
            "which lowers all rates; start fewer ranks, unless training will have the same number"
        )
    elif sheet.on_cores:
        yield from _absent_ranks(measured.presence)
    if hosts > 1 and sheet.rdma and (reason := _speaks_tcp(backend, environment)):
        yield (
            f"{reason}, and the hosts have RDMA adapters ({', '.join(sheet.rdma)}): TCP reaches only a "
            "fraction of their rate"
        )
    if hosts == 2:
        yield (
            "there are only two hosts: libraries use special algorithms for two, and oversubscription does "
            "not show; measure three or more before you plan for more"
        )
    yield from _slow_ranks(measured.paces)
    by_pairing = {each.pairing: each for each in measured.hosts}
    if hosts >= _FEWEST_HOSTS:
        yield from _slow_hosts(by_pairing["even"], by_pairing["odd"])
        yield from _oversubscription(by_pairing["far"], by_pairing["alone"])


def _speaks_tcp(backend: str, environment: Mapping[str, str]) -> str:
    """Return why the bytes go over TCP; empty if there is no sign of it."""
    if backend in ("shoal", "gloo"):
        return f"the backend {backend} uses TCP"
    if environment.get("NCCL_IB_DISABLE", "0") != "0":
        return "NCCL_IB_DISABLE is set, so NCCL uses TCP"
    if environment.get("NCCL_NET", "").lower() == "socket":
        return "NCCL_NET=Socket makes NCCL use TCP"
    return ""


def _slow_ranks(paces: tuple[float, ...]) -> Iterator[str]:
    usual = median(paces)
    for rank, pace in enumerate(paces):
        if pace < usual * (1 - _OFF_THE_PACE):
            yield (
                f"rank {rank} computes {1 - pace / usual:.0%} slower than the median rank: look at its "
                "clock, its temperature, and what else runs on it"
            )


def _absent_ranks(presence: tuple[float, ...]) -> Iterator[str]:
    for rank, share in enumerate(presence):
        if share < 1 - _OFF_THE_PACE:
            yield (
                f"rank {rank} had a core for {share:.0%} of the time of its products: other programs use the "
                "cores, and all rates are too low; end them and probe again"
            )


def _slow_hosts(even: HostRates, odd: HostRates) -> Iterator[str]:
    """Yield slow hosts: slow with both neighbours means a slow adapter, with one a slow link."""
    usual = median([*even.rates.values(), *odd.rates.values()])

    def slow(rates: HostRates) -> set[int]:
        return {host for host, rate in rates.rates.items() if rate < usual * (1 - _SLOW_LINK)}

    both = slow(even) & slow(odd)
    for host in sorted(both):
        rate = max(even.rates[host], odd.rates[host])
        yield (
            f"host {host} reaches {_gigabytes(rate)} with both neighbours, and the median host "
            f"{_gigabytes(usual)}: look at its network adapters"
        )
    once = sorted((slow(even) | slow(odd)) - both)
    if once and not both:
        hosts = ", ".join(map(str, once))
        yield (
            f"hosts {hosts} are slow with one neighbour only (the median is {_gigabytes(usual)}): look at "
            "the cables and ports between them"
        )


def _oversubscription(far: HostRates, alone: HostRates) -> Iterator[str]:
    together, single = median(far.rates.values()), median(alone.rates.values())
    if single > together * _OVERSUBSCRIBED:
        yield (
            f"far hosts reach {_gigabytes(together)} each when all send, and {_gigabytes(single)} when one "
            f"pair sends: the fabric is oversubscribed {single / together:.1f} times"
        )


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


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

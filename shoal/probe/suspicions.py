"""Signs of problems with a machine, as sentences that say what to check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from shoal.probe.measurements import HostRates, Measurements
from shoal.probe.sheet import Sheet

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

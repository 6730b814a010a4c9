"""Network interfaces: link speed, MTU, drops, and the pauses by which a switch stops a sender (PFC)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from shoal.doctor.finding import Finding, Verdict
from shoal.doctor.machine import Machine, number
from shoal.doctor.window import Window, interfaces, ports

_NET = "/sys/class/net"
_SLOW = 10_000  # Mb/s
_JUMBO = 4096  # bytes of an MTU from which RDMA packets are whole
_PAUSES = re.compile(r"^[rt]x_(?:prio\d_)?pause(?:_ctrl_phy)?$|^[rt]x_pause_frames$")
_PAUSED = re.compile(r"^[rt]x_(?:prio\d|global)_pause_duration$")  # microseconds
_LOST = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_missed_errors", "rx_crc_errors")
_MANY_PAUSES = 100.0  # per second
_LONG = 0.01  # share of time
_MANY_LOST = 1.0  # per second


def facts(machine: Machine) -> dict[str, dict[str, int]]:
    """Return the MTU and speed of the interfaces that are up, to compare hosts of a run."""
    return {each: {"mtu": _mtu(machine, each), "speed": _speed(machine, each)} for each in _up(machine)}


def check_speed(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge the link speed of the interfaces that are up, also against their own kind."""
    row = "link speed"
    speeds = {each: speed for each in _up(machine) if (speed := _speed(machine, each)) > 0}
    if not speeds:
        yield Finding(row, Verdict.UNKNOWN, "no interface tells its speed (usual in virtual machines)")
        return
    told = ", ".join(f"{each} {speed / 1000:g} Gb/s" for each, speed in speeds.items())
    by_driver = defaultdict(list)
    for each in speeds:
        by_driver[machine.resolve(f"{_NET}/{each}/device/driver").rpartition("/")[2]].append(each)
    degraded = [
        each
        for alike in by_driver.values()
        for each in alike
        if max(speeds[other] for other in alike) / 4 < speeds[each] < max(speeds[other] for other in alike)
    ]
    half = [each for each in speeds if (machine.read(f"{_NET}/{each}/duplex") or "full").strip() == "half"]
    if degraded or half:
        yield Finding(
            row,
            Verdict.BAD,
            f"{', '.join(degraded + half)} slower than interfaces of the same kind ({told})",
            "the link trained at a lower rate: seat or replace the cable, check the switch's port",
        )
    elif max(speeds.values()) < _SLOW and not ports(machine):
        yield Finding(row, Verdict.WARN, told, "ranks on several hosts will mostly wait for the network")
    else:
        yield Finding(row, Verdict.OK, told)


def check_mtu(machine: Machine, window: Window) -> Iterator[Finding]:
    """Compare the MTU of the interfaces, and with what RDMA over Ethernet needs."""
    row = "MTU"
    mtus = {each: _mtu(machine, each) for each in _up(machine)}
    if not mtus:
        return
    told = ", ".join(f"{each} {mtu}" for each, mtu in mtus.items())
    by_speed = defaultdict(set)
    for each, mtu in mtus.items():
        if (speed := _speed(machine, each)) > 0:
            by_speed[speed].add(mtu)
    small = [each for each, mtu in mtus.items() if mtu < _JUMBO and _carries_rdma(machine, each)]
    if any(len(each) > 1 for each in by_speed.values()):
        yield Finding(
            row,
            Verdict.WARN,
            f"differs between interfaces of one speed: {told}",
            "set one MTU on the interfaces of one network",
        )
    elif small:
        yield Finding(
            row,
            Verdict.WARN,
            f"{', '.join(small)} carries RDMA over Ethernet with an MTU below {_JUMBO}",
            "set the MTU to 9000 on interfaces and switches",
        )
    else:
        yield Finding(row, Verdict.OK, told)


def check_pauses(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge the pauses of `ethtool -S` between two moments."""
    row = "PFC pauses"
    if not window.owners("ethtool") or not window.seconds:
        return
    told, verdict = [], Verdict.OK
    for each in window.owners("ethtool"):
        grown = window.growths("ethtool", each)
        pauses = sum(value for name, value in grown.items() if _PAUSES.match(name)) / window.seconds
        longest = max([0, *(value for name, value in grown.items() if _PAUSED.match(name))])
        share = longest / 1e6 / window.seconds
        if not pauses and not share:
            continue
        is_bad = pauses > _MANY_PAUSES or share > _LONG
        verdict = Verdict.BAD if is_bad or verdict is Verdict.BAD else Verdict.WARN
        told.append(f"{each} {pauses:.0f} per second" + (f", {share:.1%} of the time" if share else ""))
    change = "find the receiver that cannot keep up: a slow host pauses all that send to it" if told else ""
    yield Finding(row, verdict, "; ".join(told[:4]) or "none", change)


def check_drops(machine: Machine, window: Window) -> Iterator[Finding]:
    """Look for packets that interfaces lost between two moments."""
    row = "lost packets"
    if not window.seconds or not window.owners("interface"):
        return
    told = [
        f"{each} {name} {rate:.0f} per second"
        for each in window.owners("interface")
        for name in _LOST
        if (rate := window.rate("interface", each, name)) > 0
    ]
    many = any(
        window.rate("interface", each, name) > _MANY_LOST
        for each in window.owners("interface")
        for name in _LOST
    )
    verdict = Verdict.BAD if many else Verdict.WARN if told else Verdict.OK
    change = "look at ring sizes (`ethtool -g`), cables and flow control" if told else ""
    yield Finding(row, verdict, "; ".join(told[:4]) or "none", change)


def _up(machine: Machine) -> list[str]:
    return [
        each
        for each in interfaces(machine)
        if (machine.read(f"{_NET}/{each}/operstate") or "").strip() in ("up", "unknown")
    ]


def _speed(machine: Machine, interface: str) -> int:
    return number(machine.read(f"{_NET}/{interface}/speed")) or 0


def _mtu(machine: Machine, interface: str) -> int:
    return number(machine.read(f"{_NET}/{interface}/mtu")) or 0


def _carries_rdma(machine: Machine, interface: str) -> bool:
    """Return whether an RDMA device whose link is Ethernet stands on this interface."""
    device = machine.resolve(f"{_NET}/{interface}/device")
    return any(
        machine.resolve(f"/sys/class/infiniband/{each}/device") == device
        and (machine.read(f"/sys/class/infiniband/{each}/ports/{port}/link_layer") or "").strip()
        == "Ethernet"
        for each, port in ports(machine)
    )

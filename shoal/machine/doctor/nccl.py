"""Does NCCL use RDMA, or did it fall back to TCP? From its own log, its settings and the bytes that moved.

NCCL logs this with NCCL_DEBUG=INFO: "Using network IB" (or a plugin's name) or "Using network Socket", and
for each channel the way, such as "via NET/IB/0/GDRDMA" or "via NET/Socket/0". GDRDMA: the network reads the
memory of the GPU itself.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median

from shoal.machine.doctor.machine import Finding, Machine, Verdict, Window, interfaces, number, ports

_ROOT = "/sys/class/infiniband"

_ERRORS = (
    *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards"),
    *("local_link_integrity_errors", "excessive_buffer_overrun_errors", "packet_seq_err"),
    *("out_of_sequence", "local_ack_timeout_err", "rnr_nak_retry_err", "roce_slow_restart"),
)
_CONGESTION = ("np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets")

_USED = 10e6  # bytes per second from which rails count as used
_IDLE, _UNEVEN = 0.02, 0.5  # shares of the median rail
_HELD_UP = 0.1  # share of time that a port had data and no credits
_MARKS = 1000.0  # congestion notices per second


def active_ports(machine: Machine) -> list[str]:
    """Return the RDMA ports that are up, as "mlx5_0/1"."""
    return [
        f"{device}/{port}"
        for device, port in ports(machine)
        if "ACTIVE" in _text(machine, device, port, "state")
    ]


def bytes_per_second(window: Window, owner: str) -> float:
    """Return the bytes that a port sent and received per second."""
    # InfiniBand and RoCE count words of 4 bytes; Amazon's EFA counts bytes under other names.
    words = window.rate("port", owner, "port_xmit_data") + window.rate("port", owner, "port_rcv_data")
    return 4 * words or window.rate("port", owner, "tx_bytes") + window.rate("port", owner, "rx_bytes")


def check_ports(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge the state and the rate of the RDMA ports."""
    row = "RDMA ports"
    found = ports(machine)
    if not found:
        yield Finding(row, Verdict.OK, "there are none")
        return
    active = active_ports(machine)
    rates = {
        f"{device}/{port}": _gigabits(_text(machine, device, port, "rate"))
        for device, port in found
        if f"{device}/{port}" in active
    }
    down = [f"{device}/{port}" for device, port in found if f"{device}/{port}" not in active]
    fastest = max(rates.values(), default=0.0)
    # A slow management port is of another kind: it has less than a quarter of the rate.
    slow = {name: rate for name, rate in rates.items() if fastest / 4 <= rate < fastest}
    if not active:
        yield Finding(
            row, Verdict.BAD, f"none of {len(found)} is active", "check cables and the subnet manager"
        )
    elif down:
        yield Finding(
            row,
            Verdict.WARN,
            f"{', '.join(down)} not active, {len(active)} active",
            "check the cable and the switch's port, or leave the port out with NCCL_IB_HCA",
        )
    if slow:
        told = ", ".join(f"{name} at {rate:g} Gb/s" for name, rate in slow.items())
        yield Finding(
            row,
            Verdict.BAD,
            f"{told}, where others have {fastest:g} Gb/s",
            "the link trained at a lower rate: seat or replace the cable",
        )
    if active and not down and not slow:
        yield Finding(row, Verdict.OK, f"{len(active)} active, the fastest at {fastest:g} Gb/s")


def check_rails(machine: Machine, window: Window) -> Iterator[Finding]:
    """Compare the bytes that the RDMA ports moved between two moments."""
    row = "RDMA rails"
    moved = {owner: bytes_per_second(window, owner) for owner in active_ports(machine)}
    if len(moved) < 2 or not window.seconds:
        return
    if max(moved.values()) < _USED:
        yield Finding(row, Verdict.UNKNOWN, "nothing moved", "run this while ranks communicate")
        return
    usual = median(rate for rate in moved.values() if rate >= _USED)
    idle = [owner for owner, rate in moved.items() if rate < _IDLE * usual]
    uneven = [owner for owner, rate in moved.items() if _IDLE * usual <= rate < _UNEVEN * usual]
    if idle:
        yield Finding(
            row,
            Verdict.BAD,
            f"{', '.join(idle)} idle, the others move {usual / 1e9:.2f} GB/s each",
            "check NCCL_IB_HCA and the pairing of GPUs and ports; compare `nvidia-smi topo -m`",
        )
    if uneven:
        told = ", ".join(f"{owner} {moved[owner] / 1e9:.2f} GB/s" for owner in uneven)
        yield Finding(row, Verdict.WARN, f"{told}; usual {usual / 1e9:.2f} GB/s", "look for a slower link")
    if not idle and not uneven:
        yield Finding(row, Verdict.OK, f"{len(moved)} rails move {usual / 1e9:.2f} GB/s each")


def check_errors(machine: Machine, window: Window) -> Iterator[Finding]:
    """Look for errors of RDMA ports, and whether they grow."""
    row = "RDMA errors"
    if not window.owners("port"):
        return
    growing, old = [], []
    for owner in window.owners("port"):
        for name in _ERRORS:
            if grown := window.growth("port", owner, name):
                growing.append(f"{owner} {name} +{grown}")
            elif total := window.before.get(("port", owner, name), 0):
                old.append(f"{owner} {name} {total}")
    if growing:
        yield Finding(
            row, Verdict.BAD, "; ".join(growing[:4]), "replace the cable or the transceiver of that port"
        )
    elif old:
        yield Finding(
            row, Verdict.WARN, f"since the start of the host: {'; '.join(old[:4])}", "look whether they grow"
        )
    else:
        yield Finding(row, Verdict.OK, "none")


def check_congestion(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge ECN marks, congestion notices and waits for credits."""
    row = "ECN and credits"
    if not window.owners("port") or not window.seconds:
        return
    told, verdict = [], Verdict.OK
    for owner in window.owners("port"):
        marks = max(window.rate("port", owner, name) for name in _CONGESTION)
        waits = window.rate("port", owner, "port_xmit_wait") * 4e-9  # ticks of about 4 ns
        if marks:
            verdict = Verdict.BAD if marks > _MARKS else max(verdict, Verdict.WARN, key=list(Verdict).index)
            told.append(f"{owner} {marks:.0f} congestion notices per second")
        if waits > _HELD_UP:
            verdict = max(verdict, Verdict.WARN, key=list(Verdict).index)
            told.append(f"{owner} waited for credits {min(waits, 1.0):.0%} of the time")
    change = "the fabric is congested: look at the switches' queues, routing and other jobs" if told else ""
    yield Finding(row, verdict, "; ".join(told[:4]) or "no congestion notices", change)


def _text(machine: Machine, device: str, port: str, name: str) -> str:
    return machine.read(f"{_ROOT}/{device}/ports/{port}/{name}") or ""


def _gigabits(text: str) -> float:
    """Return the number of a rate such as "400 Gb/sec (4X NDR)"; 0 if there is none."""
    match = re.match(r"([\d.]+) Gb/sec", text)
    return float(match[1]) if match else 0.0


_NETWORK = re.compile(r"NCCL INFO (?:\S+: )?Using network (.+?)\s*$", re.MULTILINE)
_WAY = re.compile(r"via NET/([^/\n]+)/(\S*)")
_REASONS = (
    (r"NET/IB : No device found", "NCCL found no RDMA device"),
    (r"NCCL_IB_DISABLE set by environment to 1", "NCCL_IB_DISABLE=1 forbids RDMA"),
    (r"NCCL_NET set by environment to Socket", "NCCL_NET=Socket asks for TCP"),
    (r"libibverbs\S* .*(?:cannot open|No such file)", "libibverbs is not installed in the container"),
    (r"OFI.*(?:tcp|sockets) provider|Selected [Pp]rovider is (?:tcp|sockets)", "libfabric chose TCP"),
)
_SLOW = re.compile(r"\b(?:Socket|tcp|sockets)\b")

_MOVED = 10e6  # bytes per second from which an interface counts as used


def check_log(machine: Machine, log: str) -> Iterator[Finding]:
    """Say which network NCCL's log names.

    Args:
        machine: The machine, whose ports say whether RDMA was possible.
        log: What NCCL printed with NCCL_DEBUG=INFO; logs of several ranks may be joined.
    """
    row = "NCCL network"
    networks = Counter(_NETWORK.findall(log))
    ways = Counter((way, "GDRDMA" in rest) for way, rest in _WAY.findall(log))
    used = [*networks, *(way for way, _ in ways)]
    if not used:
        yield Finding(
            row, Verdict.UNKNOWN, "the log names no network", "run with NCCL_DEBUG=INFO and give that log"
        )
        return
    slow = [name for name in used if _SLOW.search(name)]
    reasons = "; ".join(text for pattern, text in _REASONS if re.search(pattern, log))
    told = ", ".join(f"{name} ({count} times)" for name, count in networks.items()) or ", ".join(used)
    if not slow:
        yield Finding(row, Verdict.OK, f"RDMA: {told}")
    elif active_ports(machine):
        yield Finding(
            row,
            Verdict.BAD,
            f"TCP: {told}, although {len(active_ports(machine))} RDMA ports are active"
            + (f"; {reasons}" if reasons else ""),
            "unset NCCL_IB_DISABLE and NCCL_NET, show the container /dev/infiniband, install libibverbs",
        )
    else:
        yield Finding(
            row,
            Verdict.WARN,
            f"TCP: {told}" + (f"; {reasons}" if reasons else ""),
            "without RDMA ports this is all there is; between nodes expect a fraction of the speed",
        )
    staged = sum(count for (way, direct), count in ways.items() if not _SLOW.search(way) and not direct)
    direct = sum(count for (way, direct), count in ways.items() if direct)
    if staged:
        yield Finding(
            "GPUDirect RDMA",
            Verdict.WARN,
            f"{staged} of {staged + direct} RDMA channels go by way of host memory",
            "load nvidia-peermem, or use a kernel and driver with DMA-BUF; check ACS and IOMMU settings",
        )
    elif direct:
        yield Finding("GPUDirect RDMA", Verdict.OK, f"all {direct} channels have it")


def check_settings(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge the NCCL_ variables of the environment."""
    row = "NCCL settings"
    settings = {key: text for key, text in machine.environment.items() if key.startswith("NCCL_")}
    problems = []
    if settings.get("NCCL_IB_DISABLE", "0") not in ("", "0") and active_ports(machine):
        problems.append((Verdict.BAD, "NCCL_IB_DISABLE forbids RDMA, and RDMA ports are active"))
    if settings.get("NCCL_NET", "").lower() == "socket" and active_ports(machine):
        problems.append((Verdict.BAD, "NCCL_NET=Socket asks for TCP, and RDMA ports are active"))
    absent = _absent(settings.get("NCCL_SOCKET_IFNAME", ""), list(machine.names("/sys/class/net")))
    if absent:
        problems.append((Verdict.BAD, f"NCCL_SOCKET_IFNAME names {absent}, which is not an interface here"))
    absent = _absent(settings.get("NCCL_IB_HCA", ""), [device for device, _ in ports(machine)])
    if absent:
        problems.append((Verdict.BAD, f"NCCL_IB_HCA names {absent}, which is not an RDMA device here"))
    for name, lost in (
        ("NCCL_P2P_DISABLE", "GPUs of a node do not read each other's memory"),
        ("NCCL_SHM_DISABLE", "ranks of a node do not share memory"),
        ("NCCL_NVLS_DISABLE", "NVLink switches do not reduce"),
    ):
        if settings.get(name, "0") not in ("", "0"):
            problems.append((Verdict.WARN, f"{name} is set: {lost}"))
    if not problems:
        told = ", ".join(f"{key}={text}" for key, text in settings.items())
        yield Finding(row, Verdict.OK, told or "none is set: NCCL chooses by itself")
    for verdict, text in problems:
        yield Finding(row, verdict, text, "unset the variable, or correct it")


def check_traffic(machine: Machine, window: Window) -> Iterator[Finding]:
    """Compare the bytes on RDMA ports and on Ethernet interfaces between two moments."""
    row = "RDMA or TCP"
    if not window.seconds:
        return
    over_rdma = sum(bytes_per_second(window, owner) for owner in window.owners("port"))
    over_tcp = sum(
        window.rate("interface", each, name)
        for each in interfaces(machine)
        for name in ("rx_bytes", "tx_bytes")
    )
    told = f"{over_rdma / 1e9:.2f} GB/s over RDMA, {over_tcp / 1e9:.2f} GB/s over TCP and UDP"
    if max(over_rdma, over_tcp) < _MOVED:
        yield Finding(row, Verdict.UNKNOWN, f"{told}: too little to tell", "run this while ranks communicate")
    elif over_tcp > over_rdma and active_ports(machine):
        yield Finding(
            row,
            Verdict.BAD,
            f"{told}, although RDMA ports are active",
            "give NCCL's log with --nccl-log FILE: it names the reason",
        )
    else:
        yield Finding(row, Verdict.OK, told)


def _absent(setting: str, there: list[str]) -> str:
    """Return the first name of a setting such as "^lo,=eth0,mlx5_1:1" that nothing here begins with."""
    if setting.startswith("^"):
        return ""
    exact = setting.startswith("=")
    for name in filter(None, setting.removeprefix("=").split(",")):
        wanted = name.partition(":")[0]
        if not any(each == wanted if exact else each.startswith(wanted) for each in there):
            return wanted
    return ""


_NET = "/sys/class/net"
_SLOW_RATE = 10_000  # Mb/s
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
    elif max(speeds.values()) < _SLOW_RATE and not ports(machine):
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

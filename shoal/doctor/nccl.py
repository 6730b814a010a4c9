"""Does NCCL use RDMA, or did it fall back to TCP? From its own log, its settings and the bytes that moved.

NCCL logs this with NCCL_DEBUG=INFO: "Using network IB" (or a plugin's name) or "Using network Socket", and
for each channel the way, such as "via NET/IB/0/GDRDMA" or "via NET/Socket/0". GDRDMA: the network reads the
memory of the GPU itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from shoal.doctor.finding import Finding, Verdict
from shoal.doctor.infiniband import active_ports, bytes_per_second
from shoal.doctor.machine import Machine
from shoal.doctor.window import Window, interfaces, ports

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

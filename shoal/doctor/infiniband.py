"""RDMA ports: state, rate, errors, congestion and rails that carry nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median

from shoal.doctor.finding import Finding, Verdict
from shoal.doctor.machine import Machine
from shoal.doctor.window import Window, ports

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

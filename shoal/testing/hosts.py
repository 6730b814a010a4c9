"""Hosts of a small network, emulated by network namespaces of this machine.

Every host has one interface, eth0, on a cable to a switch. Each direction of a cable carries a given rate, as
an Ethernet adapter does; the machine's cores are the other limit.

The namespaces have no names: each lives as long as a process in it. One such process per host only waits for
the end of its input, so that all hosts end with the process that made them, however that ended.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError

_TOOLS = ("ip", "tc", "nsenter", "unshare")  # from iproute2 and util-linux
_CLONE_NEWNET = 0x40000000
_FRAME_HEADERS = 14 + 20 + 32  # bytes: Ethernet, IPv4, TCP with its time stamps
_BURST_SECONDS = (
    400e-6  # seconds that a link may run ahead of its rate, so that the sender wakes up in time for more
)
_LARGEST_PACKET = 128 * 1024  # bytes that the system hands to an interface at once
_QUEUE_SECONDS = "50ms"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that an interface has sent and received, by its own counters, with headers."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes - before.sent_bytes,
            self.sent_packets - before.sent_packets,
            self.received_bytes - before.received_bytes,
            self.received_packets - before.received_packets,
        )

    @property
    def sent_payload(self) -> int:
        """Bytes sent within TCP. Packets are counted before they are cut into frames: one header each."""
        return self.sent_bytes - _FRAME_HEADERS * self.sent_packets

    @property
    def received_payload(self) -> int:
        """Bytes received within TCP."""
        return self.received_bytes - _FRAME_HEADERS * self.received_packets


def why_no_hosts() -> str:
    """Return why there can be no `Hosts` here; empty if there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} (of iproute2 and util-linux) not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


class Hosts:
    """A number of hosts at one switch. A context manager.

    A process in the switch itself (`switch`, for `enter_host`) has the address `switch_address`, and sends
    and receives over all cables at once.

    Args:
        count: Number of hosts.
        rate: Bits/s of every cable, each way; None for as fast as the machine can.

    Raises:
        ConfigError: Hosts cannot be emulated here.
    """

    interface = "eth0"
    switch_address = "10.77.0.254"

    def __init__(self, count: int, rate: float | None = None) -> None:
        reason = why_no_hosts()
        if reason:
            raise ConfigError(
                f"hosts cannot be emulated here: {reason}",
                possible="root on Linux, with iproute2 and util-linux",
                change="run as root, or on real hosts",
            )
        self._processes: list[subprocess.Popen[bytes]] = []
        self.addresses = tuple(f"10.77.0.{index + 1}" for index in range(count))
        try:
            self._lay_cables(rate)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def payload_rate(rate: float) -> float:
        """Return the bytes/s that TCP carries over a cable of `rate` bits/s, in frames of 1500 bytes."""
        return rate / 8 * (1500 + 14 - _FRAME_HEADERS) / (1500 + 14)

    def process(self, index: int) -> int:
        """Return the process that keeps a host, for `enter_host`."""
        return self._processes[index].pid

    def traffic(self, index: int) -> Traffic:
        """Return what the host's interface has counted so far."""
        for line in Path(f"/proc/{self.process(index)}/net/dev").read_text(encoding="ascii").splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                received, packets, *_, sent, sent_packets = (int(number) for number in numbers.split()[:10])
                return Traffic(sent, sent_packets, received, packets)
        raise AssertionError("the host has no interface")

    def limit(self, index: int, rate: float, *, sends: bool = True, receives: bool = True) -> None:
        """Set the rate of a host's cable, in bits/s, one way or both."""
        ways = (sends, self.process(index), self.interface), (receives, self.switch, f"port{index}")
        for is_meant, process, interface in ways:
            if is_meant:
                _run_in(process, _limit(interface, rate))

    def cut(self, index: int) -> None:
        """Cut a host's cable: nothing goes either way."""
        _run_in(self.switch, f"ip link set port{index} down".split())

    def heal(self, index: int) -> None:
        """Mend a cable that was cut."""
        _run_in(self.switch, f"ip link set port{index} up".split())

    def part(self, one: int, other: int) -> None:
        """Lose all that two hosts send to each other; both still reach the others."""
        for host, address in ((one, self.addresses[other]), (other, self.addresses[one])):
            _run_in(self.process(host), f"ip route add blackhole {address}/32".split())

    def mute(self, index: int) -> None:
        """Lose all that a host sends from now on; it still receives."""
        _run_in(
            self.process(index),
            f"tc qdisc replace dev {self.interface} root tbf rate 8bit burst 1 latency 1ms".split(),
        )

    def close(self) -> None:
        """End the hosts; processes that are still in one are cut off."""
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait()
            process.stdout.close()
        self._processes.clear()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _lay_cables(self, rate: float | None) -> None:
        for _ in self.addresses:
            self._start()
        self.switch = switch = self._start()
        _run_in(switch, ["ip", "link", "add", "switch", "type", "bridge"])
        _run_in(switch, ["ip", "link", "set", "switch", "up"])
        _run_in(switch, f"ip address add {self.switch_address}/24 dev switch".split())
        for index, address in enumerate(self.addresses):
            host, port = self.process(index), f"port{index}"
            peer = ["type", "veth", "peer", "name", self.interface, "netns", str(host)]
            _run_in(switch, ["ip", "link", "add", port, *peer])
            _run_in(switch, f"ip link set {port} master switch up".split())
            _run_in(host, f"ip address add {address}/24 dev {self.interface}".split())
            _run_in(host, f"ip link set {self.interface} up".split())
            _run_in(host, ["ip", "link", "set", "lo", "up"])
            if rate is not None:
                self.limit(index, rate)

    def _start(self) -> int:
        process = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._processes.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")  # comes back once it is in its namespace
        process.stdin.flush()
        process.stdout.readline()
        return process.pid


def enter_host(process: int) -> None:
    """Move the calling process to a host.

    Args:
        process: A process from `Hosts.process`.

    Raises:
        OSError: The host does not exist any more, or the caller is not root.
    """
    assert threading.active_count() == 1, "other threads would stay behind"
    namespace = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(namespace, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "a host cannot be entered")
    finally:
        os.close(namespace)


def _run_in(process: int, command: Sequence[str]) -> None:
    subprocess.run(["nsenter", f"--net=/proc/{process}/ns/net", *command], check=True)


def _limit(interface: str, rate: float) -> list[str]:
    burst = max(_LARGEST_PACKET, round(rate / 8 * _BURST_SECONDS))
    shape = ["tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "latency", _QUEUE_SECONDS]
    return ["tc", "qdisc", "replace", "dev", interface, "root", *shape]

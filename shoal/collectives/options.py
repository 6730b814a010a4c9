"""Options of a group: forced algorithms, and how ranks communicate."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.collectives.table import Table, built_in_table, load_table
from shoal.errors import CollectiveError, ConfigError, nearest
from shoal.predict.cost import ALGORITHMS, COLLECTIVES, require_name

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_LARGEST_PORT = 65535


def address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`; nothing is sent.

    Raises:
        ConfigError: The name has no address, or there is no route.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no interface of this machine reaches {host!r}: {error}",
            possible="a name or an address that this machine can reach",
            change="set MASTER_ADDR to one, or SHOAL_INTERFACE to the interface to use",
        ) from None


def find_interface_address(name: str) -> str:
    """Return the address of an interface, such as "eth0"; an address is returned as it is.

    Raises:
        ConfigError: There is no such interface, or it has no address.
    """
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    names = [interface for _, interface in socket.if_nameindex()]
    if name not in names:
        raise ConfigError(
            f"SHOAL_INTERFACE={name!r} is not an interface of this machine{nearest(name, names)}",
            possible=", ".join(names),
            change="use one of these names, or one of this machine's addresses",
        )
    address = _ipv4_address(name) or _ipv6_address(name)
    if address is None:
        raise ConfigError(
            f"the interface {name!r} has no address",
            possible="an interface that is up",
            change="set SHOAL_INTERFACE to another one",
        )
    return address


def interface_with(address: str) -> str | None:
    """Return the interface that has an address; None if none has."""
    names = [interface for _, interface in socket.if_nameindex()]
    return next((name for name in names if address in (_ipv4_address(name), _ipv6_address(name))), None)


def split_address(address: str, name: str) -> tuple[str, int]:
    """Return the host and the port of "HOST:PORT", or of "[HOST]:PORT" with an address of IPv6.

    Args:
        address: The text.
        name: The setting that holds it, for the error.

    Raises:
        ConfigError: It has no host, or no port.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > _LARGEST_PORT:
        raise ConfigError(
            f"{name}={address!r} is no address with a port",
            possible="HOST:PORT, such as 192.0.2.1:4100 or [2001:db8::1]:4100",
            change=f"set {name} to one",
        )
    return host, int(port)


def numeric_address(address: str, name: str) -> str:
    """Return "HOST:PORT" with the host's name looked up; the arguments are those of `split_address`.

    Raises:
        ConfigError: It is no address with a port, or the host's name has no address.
    """
    host, port = split_address(address, name)
    try:
        found = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"{name}={address!r} has no address: {error}",
            possible="a name that this machine can look up, or a numeric address",
            change=f"correct {name}",
        ) from None
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def _ipv4_address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_address(name: str) -> str | None:
    file = Path("/proc/net/if_inet6")
    for line in file.read_text(encoding="ascii").splitlines() if file.exists() else ():
        digits, _, _, scope, _, interface = line.split()
        if interface == name and scope == "00":  # reachable from other networks, not only on one link
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The `pg_options` of the backend "shoal", for `init_process_group` and `new_group`.

    Attributes:
        algorithms: For a collective, the algorithm that it always uses, such as {"all_reduce": "ring"}. An
            algorithm that works only within a host is ignored where there are several hosts.
        table: The cost of each algorithm on this machine, by which other algorithms are chosen.
        streams: Number of TCP connections between two ranks of different hosts.
        heartbeat: Seconds without a sign of life after which a peer counts as stopped.
        direct_reads: Whether ranks of a host read each other's memory where the system allows it. Otherwise
            they copy tensors that are not in shared buffers, and tensors on a GPU go by way of the host.
        aggregator: HOST:PORT of a running `shoal aggregate`, which adds up what hosts send, for the algorithm
            in-network; empty if there is none.
        debug: Whether ranks compare their calls first, so that a mismatch raises an error and does not hang.
    """

    algorithms: Mapping[str, str] = field(default_factory=dict)
    table: Table = field(default_factory=built_in_table)
    streams: int = 2
    heartbeat: float = 5.0
    direct_reads: bool = True
    aggregator: str = ""
    debug: bool = False

    def __post_init__(self) -> None:
        for collective, name in self.algorithms.items():
            require_name("a collective", collective, COLLECTIVES)
            offered = sorted({key[1] for key in ALGORITHMS if key[0] == collective})
            require_name(f"an algorithm of {collective}", name, offered)
        for name, value in (("streams", self.streams), ("heartbeat", self.heartbeat)):
            if value <= 0:
                raise ConfigError(
                    f"{name}={value} cannot work", possible="more than 0", change=f"set another {name}"
                )
        if self.aggregator:
            split_address(self.aggregator, "aggregator")
        elif self.algorithms.get("all_reduce") == "in-network":
            raise ConfigError(
                "all_reduce=in-network has no aggregator",
                possible="the address of a running `shoal aggregate`, as HOST:PORT",
                change="set SHOAL_AGGREGATOR (or Options.aggregator) to it, or choose another algorithm",
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Options:
        """Return the options that the environment sets.

        SHOAL_ALGORITHMS (all_reduce=ring,broadcast=chain), SHOAL_TABLE (a file that `shoal bench --calibrate`
        wrote), SHOAL_STREAMS, SHOAL_HEARTBEAT (seconds), SHOAL_DIRECT_READS (0), SHOAL_AGGREGATOR
        (HOST:PORT) and SHOAL_DEBUG (1).

        Raises:
            ConfigError: One of these cannot be used.
        """
        algorithms = {}
        for pair in filter(None, environment.get("SHOAL_ALGORITHMS", "").split(",")):
            collective, _, name = pair.partition("=")
            algorithms[collective.strip()] = name.strip()
        return cls(
            algorithms=algorithms,
            table=load_table(Path(file)) if (file := environment.get("SHOAL_TABLE")) else built_in_table(),
            streams=int(_number(environment, "SHOAL_STREAMS", cls.streams)),
            heartbeat=_number(environment, "SHOAL_HEARTBEAT", cls.heartbeat),
            direct_reads=environment.get("SHOAL_DIRECT_READS", "1") != "0",
            aggregator=environment.get("SHOAL_AGGREGATOR", ""),
            debug=environment.get("SHOAL_DEBUG", "0") not in ("", "0"),
        )

    def fingerprint(self, build: str) -> str:
        """Return, as a short text without spaces, what has to be equal on all ranks of a group.

        Args:
            build: Hash of the native core's sources, `Core.build`.
        """
        shared = (
            sorted(self.algorithms.items()),
            sorted(self.table.entries.items()),
            self.streams,
            bool(self.aggregator),  # hosts may know it by different addresses
            self.debug,
        )
        return f"{build}/{hashlib.sha256(repr(shared).encode()).hexdigest()[:16]}"


def require_same(fingerprints: Sequence[str], rank: int) -> None:
    """Check that the ranks of a group have one build of the core, and the same options.

    Args:
        fingerprints: The result of `Options.fingerprint` on each rank.
        rank: This rank.

    Raises:
        CollectiveError: A rank has another build or other options.
    """
    own, _, _ = fingerprints[rank].partition("/")
    for other, fingerprint in enumerate(fingerprints):
        build, _, _ = fingerprint.partition("/")
        if build != own:
            raise CollectiveError(
                f"the group did not form: rank {other} has another build of the core than rank {rank} "
                f"({build}, {own})\n  possible: cores built from the same sources on all ranks\n"
                "  change: install the same Shoal on all hosts, or build it there from the same sources",
                rank=other,
                fault="mismatch",
            )
        if fingerprint != fingerprints[rank]:
            raise CollectiveError(
                f"the group did not form: rank {other} has other options than rank {rank} "
                "(SHOAL_ALGORITHMS, SHOAL_TABLE, SHOAL_STREAMS, SHOAL_AGGREGATOR, SHOAL_DEBUG, or Options)",
                rank=other,
                fault="mismatch",
            )


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environment.get(name) or default)
    except ValueError:
        raise ConfigError(
            f"{name}={environment[name]!r} is not a number",
            possible="a number above 0",
            change=f"set {name} to one",
        ) from None

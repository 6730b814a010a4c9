"""Network interfaces and their addresses."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from shoal.errors import ConfigError, nearest

__all__ = ["address_towards", "find_interface_address"]

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


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

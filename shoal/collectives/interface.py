"""Network interfaces and their addresses."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from shoal.errors import ConfigError, nearest

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

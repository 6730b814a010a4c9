"""Serve the pages to browsers of this machine, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError, MissingExtraError
from shoal.listener import Listener, head_of_request, listen
from shoal.web.folder import Folder

if TYPE_CHECKING:
    import uvicorn

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_LONGEST_GOODBYE = 1  # seconds; streams of pages never end by themselves


def serve(
    path: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    names: tuple[str, ...] = (),
    token: str | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Serve until a signal ends it.

    Args:
        path: A run, or a folder of runs.
        host: Address to listen on.
        port: Port to listen on; with 0 the system chooses one.
        names: Further names by which browsers reach this server, with or without a port.
        token: The token that readers need; by default a new one.
        say: Called with the address, once the server listens.

    Raises:
        RunError: The path is neither a run nor a folder.
        ConfigError: It cannot listen there.
        MissingExtraError: The packages of the extra `web` are not installed.
    """
    try:
        import uvicorn

        from shoal.web.app import make_app
    except ImportError as error:
        package = error.name or "starlette"
        raise MissingExtraError("serving pages", package=package, extra="web") from error
    folder = Folder(path)
    token = token or secrets.token_urlsafe(24)
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    hosts = {f"{name}:{port}" for name in _LOOPBACK} | {f"{shown}:{port}".lower()}
    hosts |= {name.lower() for name in names} | {f"{name}:{port}".lower() for name in names}
    app = make_app(folder, token, frozenset(hosts), cookie=f"shoal-{port}")
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # addresses hold the token
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_LONGEST_GOODBYE,
    )
    say(f"http://{shown}:{port}/?token={token}")
    with contextlib.closing(listener):
        asyncio.run(_serve(uvicorn.Server(config), listener))


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    """Let the server have connections that have asked for something: strangers that do not are kept out."""
    config, loop = server.config, asyncio.get_running_loop()
    config.load()

    def protocol(head: bytes) -> asyncio.Protocol:
        made = config.http_protocol_class(config=config, server_state=server.server_state, app_state={})  # type: ignore[call-arg]
        return _Begun(made, head)

    async def take(connected: socket.socket, head: bytes) -> None:
        await loop.connect_accepted_socket(lambda: protocol(head), connected)

    def admit(connected: socket.socket, head: bytes) -> None:
        asyncio.run_coroutine_threadsafe(take(connected, head), loop)

    with Listener(listener, head_of_request, admit):
        await server.serve(sockets=[])


class _Begun(asyncio.Protocol):
    """A protocol whose connection has sent something already."""

    def __init__(self, protocol: asyncio.Protocol, received: bytes) -> None:
        self._protocol, self._received = protocol, received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hand the connection over, and what was received."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_protocol(self._protocol)
        self._protocol.connection_made(transport)
        self._protocol.data_received(self._received)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"it cannot listen on {host}:{port}: {error}",
            possible="an address of this machine and a free port; with port 0 the system chooses one",
            change="give another --host or --port",
        ) from error

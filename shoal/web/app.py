"""The server: a page, its data, its scripts, and the stream of a run that is written.

Who may read the pages: a browser that was given the token, and that came to this server by its own name.

A page of another site can make a browser send requests here, and a name of another site can point to this
machine. So each request needs the token, as a cookie or in a header; its Host must be one of this server's;
and an Origin, where the browser sends one, must be this server. Answers forbid other sites to frame or read
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import itertools
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.analyze.diagnosis.run_follower import RunFollower
from shoal.errors import ConfigError, MissingExtraError, RunError, ShoalError, UserError, nearest
from shoal.listener import Listener, head_of_request, listen
from shoal.spec.run import Run
from shoal.web.html import POLICY, message_page, page_html
from shoal.web.pages import PAGES, Page
from shoal.web.query import Query, encode

if TYPE_CHECKING:
    import uvicorn


_HEADERS = {
    "content-security-policy": POLICY + "; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_METHODS = ("GET", "HEAD")
_YEAR = 365 * 24 * 3600

Inner = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Guard:
    """The server with only those requests that may pass.

    Attributes:
        inner: The server.
        token: The token.
        hosts: Values of Host that name this server, with the port.
        cookie: Name of the cookie; browsers share cookies among the ports of a machine.
    """

    inner: ASGIApp
    token: str
    hosts: frozenset[str]
    cookie: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: refuse it, take the token from its address, or pass it on."""
        if scope["type"] == "lifespan":
            await self.inner(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["method"], headers)
        given = QueryParams(scope["query_string"]).get("token")
        answer: ASGIApp = self.inner
        if refusal is not None:
            answer = _message(refusal[0], "Refused", refusal[1])
        elif given is not None:
            answer = self._taken(given, scope["path"])
        elif not self._is_known(headers):
            told = "Open the address that shoal web printed: it has a token, which this browser has not sent."
            answer = _message(403, "No token", told)
        await answer(scope, receive, _with_headers(send))

    def _refusal(self, method: str, headers: Headers) -> tuple[int, str] | None:
        """Return status and reason for a request that no token helps; None if there is none."""
        if method not in _METHODS:
            return 405, "Pages are only read: use GET."
        host = headers.get("host", "").lower()
        if host not in self.hosts:
            return 421, "This server does not answer to that name: use the address that shoal web printed."
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}", f"https://{host}"}:
            return 403, "A page of another site asked."
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return 403, "A page of another site asked."
        return None

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return True
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        return self.cookie in cookies and self._is_token(cookies[self.cookie].value)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _taken(self, given: str, path: str) -> Response:
        """Answer an address with a token: keep it as a cookie, and go on to the address without it."""
        if not self._is_token(given):
            return _message(403, "Wrong token", "Open the address that shoal web printed last.")
        # A page in between: browsers send no cookie of SameSite=Strict along a redirection from elsewhere.
        beyond = "/" + path.lstrip("/\\")
        answer = HTMLResponse(message_page("Shoal", "One moment.", refresh=beyond))
        answer.set_cookie(self.cookie, self.token, max_age=_YEAR, httponly=True, samesite="strict")
        return answer


def _message(status: int, title: str, text: str) -> Response:
    # It ends the connection: only who has the token keeps one.
    return HTMLResponse(message_page(title, text), status_code=status, headers={"connection": "close"})


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending


_KEPT = 8
"""Runs whose columns stay in memory."""
_MOST_LISTED = 500


class Folder:
    """A run, or a folder of runs. A run is named by its directory, and only names that are there open one.

    Args:
        path: The run or the folder.

    Raises:
        RunError: The path does not exist, or is a file.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise RunError(
                f"{path} {'is a file' if path.exists() else 'does not exist'}",
                possible="a run, or a folder of runs such as runs/",
                change="give such a path; without runs there are the pages that need none: shoal web .",
            )
        self.path = path
        self._is_run = (path / "run.json").is_file()
        self._watched: OrderedDict[str, RunFollower] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of the runs, the newest first."""
        return [path.name for path in self._paths()]

    def open(self, name: str = "") -> RunFollower | None:
        """Return the run with a name; without a name the newest, or None if there is none.

        Raises:
            RunError: No run has this name.
        """
        paths = {path.name: path for path in self._paths()}
        if not name:
            name = next(iter(paths), "")
        if not name:
            return None
        if name not in paths:
            raise RunError(
                f"there is no run {name[:80]!r} here{nearest(name, paths)}",
                possible=", ".join(itertools.islice(paths, 5)) or "none: the folder holds no run",
                change="choose one of these",
            )
        with self._lock:
            watched = self._watched.pop(name, None) or RunFollower(Run.open(paths[name]))
            self._watched[name] = watched
            while len(self._watched) > _KEPT:
                self._watched.popitem(last=False)
        return watched

    def _paths(self) -> list[Path]:
        if self._is_run:
            return [self.path.resolve()]
        described = []
        for path in self.path.glob("*/run.json"):
            try:
                described.append((path.stat().st_mtime_ns, path.parent))
            except OSError:
                continue
        return [path for _, path in sorted(described, reverse=True)[:_MOST_LISTED]]


STATIC: Traversable = files("shoal.web").joinpath("static")
"""Folder of the scripts and the style."""

_TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
_SCRIPTS = """<link rel="icon" href="/static/fish.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/style.css">
<script type="module" src="/static/{page}.js"></script>"""
_POLL = 0.25  # seconds between looks at the files of a run
_HEARTBEAT = 10.0  # seconds after which a stream says that it is there
_MOST_STREAMS = 64
_LONGEST_ERROR = 500


def make_app(folder: Folder, token: str, hosts: frozenset[str], cookie: str = "shoal") -> Guard:
    """Return the server.

    Args:
        folder: The runs to show.
        token: The token that readers need.
        hosts: Names of this server, with the port.
        cookie: Name of the cookie that keeps the token.
    """
    answers = _Answers(folder)
    app = Starlette(
        routes=[
            Route("/", answers.home),
            Route("/runs", answers.runs),
            Route("/data/{page}", answers.data),
            Route("/events", answers.events),
            Route("/static/{file}", answers.static),
            Route("/{page}", answers.page),
        ]
    )
    return Guard(app, token, hosts, cookie)


@dataclass
class _Answers:
    folder: Folder
    streams: int = 0

    async def home(self, request: Request) -> Response:
        """Go to the newest run, or to a page that needs none."""
        names = await run_in_threadpool(self.folder.names)
        return RedirectResponse("/live" if names else "/plans", status_code=303)

    async def page(self, request: Request) -> Response:
        """Return a page without its data."""
        page = PAGES.get(request.path_params["page"])
        if page is None:
            return _json({"error": "there is no such page", "possible": ", ".join(PAGES)}, 404)
        scripts = _SCRIPTS.format(page=page.name)
        return HTMLResponse(page_html(page, address=lambda name: f"/{name}", scripts=scripts))

    async def runs(self, request: Request) -> Response:
        """Return the names of the runs, the newest first."""
        return _json({"runs": await run_in_threadpool(self.folder.names)})

    async def static(self, request: Request) -> Response:
        """Return a script, the style or the icon."""
        name: str = request.path_params["file"]
        suffix = name.rpartition(".")[2]
        if suffix not in _TYPES or name not in {each.name for each in STATIC.iterdir()}:
            return _json({"error": "there is no such file"}, 404)
        return Response(STATIC.joinpath(name).read_bytes(), media_type=_TYPES[suffix])

    async def data(self, request: Request) -> Response:
        """Return the data of a page."""
        page = PAGES.get(request.path_params["page"])
        if page is None:
            return _json({"error": "there is no such page", "possible": ", ".join(PAGES)}, 404)
        values = dict(request.query_params)
        return await run_in_threadpool(self._answered, page, values)

    def _answered(self, page: Page, values: dict[str, str]) -> Response:
        try:
            run = self.folder.open(values.pop("run", "")) if page.needs_run else None
        except UserError as error:
            return _json(_refused(error), 400)
        if page.needs_run and run is None:
            return _json({"error": "there is no run in this folder yet"}, 404)
        status, text = _answer(page, run, Query(values))
        return Response(text, status_code=status, media_type="application/json")

    async def events(self, request: Request) -> Response:
        """Return a stream with the data of the page `live`, each time that the run has grown."""
        if self.streams >= _MOST_STREAMS:
            return _json({"error": f"{_MOST_STREAMS} pages are watching already"}, 503)
        try:
            run = await run_in_threadpool(self.folder.open, request.query_params.get("run", ""))
        except UserError as error:
            return _json(_refused(error), 400)
        if run is None:
            return _json({"error": "there is no run in this folder yet"}, 404)
        query = Query({"measure": request.query_params.get("measure", "")})
        return StreamingResponse(self._stream(request, run, query), media_type="text/event-stream")

    async def _stream(self, request: Request, run: RunFollower, query: Query) -> AsyncIterator[str]:
        self.streams += 1
        seen: tuple[Any, ...] | None = None
        quiet = 0.0
        try:
            while not await request.is_disconnected():
                grown = await run_in_threadpool(_sizes, run)
                if grown != seen or run.is_behind:
                    seen, quiet = grown, 0.0
                    _, text = await run_in_threadpool(_answer, PAGES["live"], run, query)
                    yield f"data: {text}\n\n"
                elif quiet >= _HEARTBEAT:
                    quiet = 0.0
                    yield ": still there\n\n"
                await asyncio.sleep(_POLL)
                quiet += _POLL
        finally:
            self.streams -= 1


def _answer(page: Page, run: RunFollower | None, query: Query) -> tuple[int, str]:
    """Return the status and the data of a page as JSON, or its error; one reader of a run at a time."""
    try:
        if run is None:
            return 200, encode(page.data(None, query))
        with run.lock:
            return 200, encode(page.data(run, query))
    except UserError as error:
        return 400, encode(_refused(error))
    except ShoalError as error:
        return 422, encode({"error": str(error)})
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # The files of a run may hold anything, and a page must not end with what one of them holds.
        told = f"the files of the run hold what this page cannot show: {type(error).__name__}: {error}"
        return 422, encode({"error": told[:_LONGEST_ERROR]})


def _refused(error: UserError) -> dict[str, Any]:
    return {"error": error.given, "possible": error.possible, "change": error.change}


def _sizes(run: RunFollower) -> tuple[Any, ...]:
    """Return what changes when a run is written."""
    paths = [run.run.metrics_file, run.run.path / "run.json", *sorted(run.run.timeline.glob("rank-*.jsonl"))]
    found = []
    for path in paths:
        try:
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns))
        except OSError:
            continue
    return tuple(found)


def _json(data: dict[str, Any], status: int = 200) -> Response:
    return Response(encode(data), status_code=status, media_type="application/json")


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

"""The server: a page, its data, its scripts, and the stream of a run that is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from shoal.diagnosis.run_follower import RunFollower
from shoal.errors import ShoalError, UserError
from shoal.web.encode import encode
from shoal.web.folder import Folder
from shoal.web.guard import Guard
from shoal.web.html import page_html
from shoal.web.pages import PAGES, Page
from shoal.web.query import Query

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

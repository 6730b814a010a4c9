"""Who may read the pages: a browser that was given the token, and that came to this server by its own name.

A page of another site can make a browser send requests here, and a name of another site can point to this
machine. So each request needs the token, as a cookie or in a header; its Host must be one of this server's;
and an Origin, where the browser sends one, must be this server. Answers forbid other sites to frame or read
them.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.web.html import POLICY, message_page

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

"""An endpoint for Prometheus, in its text format: https://prometheus.io/docs/instrumenting/exposition_formats.

It needs no package. `examples/grafana/dashboard.json` is a dashboard of its values.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from typing import final

from shoal.errors import ConfigError
from shoal.listener import Handshake, Listener, head_of_request, listen, loopback
from shoal.record.logger import Logger

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


@final
class PrometheusLogger(Logger):
    """Serve the newest value of each name as a gauge, `shoal_NAME{run="..."}`.

    Args:
        run: Name of the run.
        address: Host and port to listen on.

    Attributes:
        port: The port that it listens on.
    """

    def __init__(self, run: str, address: tuple[str, int]) -> None:
        self._label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()
        self._listener = Listener(listen(*address), self._answer, lambda asked, _: asked.close())
        self.port: int = self._listener.port

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        with self._lock:
            self._values |= {**values, "step": step}

    def close(self) -> None:
        """See `Logger.close`: the endpoint is gone afterwards."""
        self._listener.close()

    def _answer(self) -> Handshake[None]:
        """Answer a request; a client that sends or takes it slowly is sent away in time."""
        method, _, rest = (yield from head_of_request()).partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        status, body = "200 OK", b""
        if method != b"GET":
            status = "405 Method Not Allowed"
        elif path != b"/metrics":
            status, body = "404 Not Found", b"see /metrics\n"
        else:
            body = self._page()
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        yield head.encode() + body

    def _page(self) -> bytes:
        with self._lock:
            values = dict(self._values)
        lines = []
        for name, value in sorted(values.items()):
            full = f"shoal_{_NOT_IN_NAMES.sub('_', name)}"
            lines.append(f'# TYPE {full} gauge\n{full}{{run="{self._label}"}} {_number(float(value))}\n')
        return "".join(lines).encode()


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of "9400", which is on loopback, or of "0.0.0.0:9400" or "[::]:9400".

    Raises:
        ConfigError: The text is neither.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(
            f"record.prometheus={text!r} was given",
            possible="a port, which other hosts cannot reach, or HOST:PORT",
            change="give, for instance, 9400 or 0.0.0.0:9400",
        )
    return host.removeprefix("[").removesuffix("]") or loopback(), int(port)

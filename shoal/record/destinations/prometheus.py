"""An endpoint for Prometheus, in its text format: https://prometheus.io/docs/instrumenting/exposition_formats.

It needs no package. `examples/grafana/dashboard.json` is a dashboard of its values.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import final

from shoal.errors import ConfigError
from shoal.record.logger import Logger

__all__ = ["PrometheusLogger", "parse_address"]

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
        page = self._page

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # a client that sends nothing does not keep a thread

            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == "/metrics"
                body = page() if is_known else b"see /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: the run's output is for the run."""

        self._server = ThreadingHTTPServer(address, Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="shoal prometheus", daemon=True
        )
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        with self._lock:
            self._values |= {**values, "step": step}

    def close(self) -> None:
        """See `Logger.close`: the endpoint is gone afterwards."""
        self._server.shutdown()
        self._server.server_close()

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
    """Return the host and port of "9400", which is on loopback, or of "0.0.0.0:9400".

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
    return host or "127.0.0.1", int(port)

"""The receivers that a run asks for; what cannot work is refused before ranks start.

An endpoint for Prometheus, in its text format: https://prometheus.io/docs/instrumenting/exposition_formats.

It needs no package. `examples/grafana/dashboard.json` is a dashboard of its values.

A logger in a thread of its own: a receiver that is slow, or gone, holds up no step.

Steps put their values into a queue and go on. If the queue is full, the values are dropped and counted. The
thread makes the receiver, gives it the values, and closes it. The first error is reported, and the number of
values that were lost is reported at the end. The thread looks into the queue four times a second: a thread
that woke at every step would cost short steps more than the values themselves.
"""

from __future__ import annotations

import math
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from shoal.collectives.thread_device import on_callers_device, take_device
from shoal.errors import ConfigError, MissingExtraError
from shoal.listener import Handshake, Listener, head_of_request, listen, loopback
from shoal.record.metrics import Logger
from shoal.spec.run import Run

_LONGEST = 500  # signs of a parameter: MLflow refuses longer ones


@final
class MlflowLogger(Logger):
    """Log to a run of MLflow, with the configuration as its parameters.

    Args:
        run: The run.
        uri: The tracking server, or a folder as file:PATH; the experiment is named "shoal".
    """

    def __init__(self, run: Run, uri: str) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name("shoal")
        experiment = self._client.create_experiment("shoal") if found is None else found.experiment_id
        made = self._client.create_run(experiment, run_name=run.path.name)
        self._id: str = made.info.run_id
        for key, value in _flat(run.description).items():
            self._client.log_param(self._id, key, value[:_LONGEST])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        from mlflow.entities import Metric

        now = _milliseconds()
        metrics = [Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """See `Logger.close`."""
        self._client.set_terminated(self._id)


def _milliseconds() -> int:
    import time

    return time.time_ns() // 1_000_000


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values by keys with dots between their parts."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)
    return flat


@final
class OpenTelemetryLogger(Logger):
    """Send the newest value of each name every few seconds, as the gauge `shoal.NAME` of the service `shoal`.

    Args:
        run: Name of the run, the attribute `shoal.spec.run` of the resource.
        endpoint: Address of a collector, such as http://127.0.0.1:4318.
        seconds: Time between two messages.
    """

    def __init__(self, run: str, endpoint: str, seconds: float = 5.0) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        exporter = OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics", timeout=5)
        reader = PeriodicExportingMetricReader(
            exporter, export_interval_millis=1000 * seconds, export_timeout_millis=5000
        )
        resource = Resource.create({"service.name": "shoal", "shoal.run": run})
        self._provider = MeterProvider(metric_readers=[reader], resource=resource)
        self._meter = self._provider.get_meter("shoal")
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        for name, value in {**values, "step": step}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"shoal.{name}")
            self._gauges[name].set(float(value))

    def close(self) -> None:
        """See `Logger.close`."""
        self._provider.shutdown()


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


_QUEUED = 1_000
"""Steps that may wait."""
_LOOK = 0.25
"""Seconds between two looks into the queue."""
_CLOSING = 10.0
"""Seconds for which the end of a run waits for a receiver."""
_FAILURES = 20
"""Failures in a row after which a receiver gets nothing more."""


@final
class QueuedLogger(Logger):
    """Give values to a logger in a thread.

    Args:
        name: Name of the receiver, for reports.
        make: Makes the logger; called in the thread.
        say: Called with reports, one line each, from any thread.
        closing: Seconds for which `close` waits; None for 10.
        newest: Whether only the newest value of each name counts: values that wait are given as one.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Logger],
        say: Callable[[str], object],
        closing: float | None = None,
        newest: bool = False,
    ) -> None:
        self._name = name
        self._make = make
        self._say = say
        self._closing = _CLOSING if closing is None else closing
        self._newest = newest
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque()
        self._lost = 0
        self._failures = 0  # in a row
        self._is_ending = threading.Event()
        work = on_callers_device(self._work)  # a user's logger may look at the GPU
        self._thread = threading.Thread(target=work, name=f"shoal {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`; it never waits."""
        if len(self._waiting) < _QUEUED:
            self._waiting.append((step, dict(values)))
        else:
            self._lost += 1

    def close(self) -> None:
        """See `Logger.close`; it waits for some seconds until all is given."""
        self._is_ending.set()
        self._thread.join(self._closing)
        if self._thread.is_alive():
            self._lost += len(self._waiting)
            self._say(f"{self._name} did not take all values within {self._closing:g} s")
        if self._lost:
            self._say(f"{self._name} lacks the values of {self._lost} steps")
            self._lost = 0

    def _work(self) -> None:
        try:
            logger = self._make()
        except Exception as error:
            self._report(error)
            self._lose_all()
            return
        while (taken := self._next()) is not None:
            step, values, count = taken
            if self._failures >= _FAILURES:
                self._lost += count
                continue
            take_device()
            try:
                logger.log(step, values)
                self._failures = 0
            except Exception as error:  # the code of others: training survives any error of it
                self._lost += count
                self._report(error)
        take_device()
        try:
            logger.close()
        except Exception as error:
            self._report(error)

    def _next(self) -> tuple[int, Mapping[str, float], int] | None:
        """Return the next step, its values and how many steps they stand for; None after the last."""
        while not self._waiting:
            # What was put before the end must not be left.
            if self._is_ending.wait(_LOOK) and not self._waiting:
                return None
        step, values = self._waiting.popleft()
        merged, count = dict(values), 1
        while self._newest and self._waiting:
            step, values = self._waiting.popleft()
            merged |= values
            count += 1
        return step, merged, count

    def _lose_all(self) -> None:
        while (taken := self._next()) is not None:
            self._lost += taken[2]

    def _report(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            self._say(f"{self._name} failed: {type(error).__name__}: {error}")
        elif self._failures == _FAILURES:
            self._say(f"{self._name} failed {_FAILURES} times in a row, and gets nothing more")


_FLUSH_SECONDS = 1.0


@final
class TensorBoardLogger(Logger):
    """Write scalars for TensorBoard. Raises TensorBoard's errors; `QueuedLogger` keeps these from the run.

    The values of a step are one event, and no other thread writes it: `SummaryWriter.add_scalar` makes an
    event of each value, and takes more than six times the processor time.

    Args:
        directory: Directory of the event files; made at the first value.

    Raises:
        MissingExtraError: The package tensorboard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise MissingExtraError(
                "writing TensorBoard scalars", package="tensorboard", extra="tensorboard"
            ) from error
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._record_writer: Any = RecordWriter
        self._directory = Path(directory)
        self._writer: Any = None
        self._flushed = 0.0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        if self._writer is None:
            self._open()
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """See `Logger.close`."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> None:
        """Open a new event file, whose name is of the form that TensorBoard looks for."""
        self._directory.mkdir(parents=True, exist_ok=True)
        now, host = time.time(), socket.gethostname()
        path = self._directory / f"events.out.tfevents.{now:.6f}.{host}.{os.getpid()}"
        self._writer = self._record_writer(path.open("xb"))
        self._write(file_version="brain.Event:2")

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())


@final
class WandbLogger(Logger):
    """Log to a project of Weights & Biases; its own environment variables apply, such as WANDB_MODE=offline.

    A run that is resumed goes on under the name that the Run's directory has.

    Args:
        run: The run, whose description becomes the configuration.
        project: The project, or ENTITY/PROJECT.
    """

    def __init__(self, run: Run, project: str) -> None:
        import wandb

        entity, _, name = project.rpartition("/")
        self._run: Any = wandb.init(
            project=name,
            entity=entity or None,
            name=run.path.name,
            id=run.path.name,
            resume="allow",
            dir=str(run.log),
            config=run.description,
            settings=wandb.Settings(silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `Logger.close`."""
        self._run.finish()


_PACKAGES: Mapping[str, tuple[str, str, str]] = {
    "tensorboard": ("tensorboard", "tensorboard", "writing TensorBoard scalars"),
    "wandb": ("wandb", "wandb", "logging to Weights & Biases"),
    "mlflow": ("mlflow", "mlflow", "logging to MLflow"),
    "opentelemetry": ("opentelemetry.sdk", "otel", "sending to OpenTelemetry"),
}
"""The package of each receiver, the extra that installs it, and its purpose."""
_GAUGES = ("Prometheus", "OpenTelemetry")
"""Receivers that have one value of each name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """The receivers of the values of steps beside the run's own file.

    Attributes:
        tensorboard: Whether event files for TensorBoard are written into the run's `log/`.
        wandb: Project of Weights & Biases; "" for none.
        mlflow: Address of MLflow's tracking server.
        prometheus: Port, or HOST:PORT, of an endpoint for Prometheus.
        opentelemetry: Address of a collector.
    """

    tensorboard: bool = False
    wandb: str = ""
    mlflow: str = ""
    prometheus: str = ""
    opentelemetry: str = ""

    def check(self) -> None:
        """Refuse what cannot work, without loading any package.

        Raises:
            MissingExtraError: A package is not installed.
            ConfigError: The address for Prometheus cannot be read.
        """
        for name, (package, extra, purpose) in _PACKAGES.items():
            if getattr(self, name) and not _is_installed(package):
                raise MissingExtraError(purpose, package=package, extra=extra)
        if self.prometheus:
            parse_address(self.prometheus)

    def open(self, run: Run, say: Callable[[str], object]) -> list[Logger]:
        """Return a logger for each receiver; each works in a thread of its own.

        Args:
            run: The run.
            say: Called with reports, one line each, from any thread.
        """
        name = run.path.name
        makers: list[tuple[object, str, Callable[[], Logger]]] = [
            (self.tensorboard, "TensorBoard", lambda: TensorBoardLogger(run.log / "tensorboard")),
            (self.wandb, "Weights & Biases", lambda: WandbLogger(run, self.wandb)),
            (self.mlflow, "MLflow", lambda: MlflowLogger(run, self.mlflow)),
            (self.prometheus, "Prometheus", lambda: PrometheusLogger(name, parse_address(self.prometheus))),
            (self.opentelemetry, "OpenTelemetry", lambda: OpenTelemetryLogger(name, self.opentelemetry)),
        ]
        return [
            QueuedLogger(receiver, make, say, newest=receiver in _GAUGES)
            for is_asked, receiver, make in makers
            if is_asked
        ]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False

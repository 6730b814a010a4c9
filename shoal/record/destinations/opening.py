"""The receivers that a run asks for; what cannot work is refused before ranks start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from shoal.errors import MissingExtraError
from shoal.record.destinations.mlflow import MlflowLogger
from shoal.record.destinations.opentelemetry import OpenTelemetryLogger
from shoal.record.destinations.prometheus import PrometheusLogger, parse_address
from shoal.record.destinations.queued import QueuedLogger
from shoal.record.destinations.tensorboard import TensorBoardLogger
from shoal.record.destinations.wandb import WandbLogger
from shoal.record.logger import Logger
from shoal.run import Run

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

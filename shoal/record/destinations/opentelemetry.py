"""Values as gauges of OpenTelemetry, sent by OTLP over HTTP (extra `otel`): https://opentelemetry.io."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from shoal.record.logger import Logger


@final
class OpenTelemetryLogger(Logger):
    """Send the newest value of each name every few seconds, as the gauge `shoal.NAME` of the service `shoal`.

    Args:
        run: Name of the run, the attribute `shoal.run` of the resource.
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

"""Values for MLflow (extra `mlflow`): https://mlflow.org/docs/latest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from shoal.record.logger import Logger
from shoal.run import Run

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

"""The configuration of what a run records about itself, and to whom it tells it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from shoal.record import Destinations
from shoal.train.section import Section
from shoal.units import parse_steps

_Text = Annotated[str, BeforeValidator(lambda given: str(given) if isinstance(given, int) else given)]


class RecordConfig(Section):
    """The files that a run writes about itself."""

    timeline: bool = True
    """Whether spans are recorded."""
    memory: bool = True
    """Whether the memory of the second step is measured, which makes that step slower."""
    tensorboard: bool = False
    """Whether scalars are written for TensorBoard too (extra `tensorboard`)."""
    wandb: str = ""
    """Project of Weights & Biases that values are logged to too (extra `wandb`)."""
    mlflow: str = ""
    """Tracking server of MLflow, or file:FOLDER, that values are logged to too (extra `mlflow`)."""
    prometheus: _Text = ""
    """Port of an endpoint for Prometheus, which only this host reaches; or HOST:PORT."""
    opentelemetry: str = ""
    """Collector that values are sent to too, such as http://127.0.0.1:4318 (extra `otel`)."""
    profile: _Text = ""
    """Steps whose trace torch.profiler writes into the run's profile/, such as 100:105."""
    profile_memory: bool = False
    """Whether the history of a GPU's memory is kept in these steps too."""
    nvtx: bool = False
    """Whether spans are NVTX ranges too, for Nsight Systems; on GPUs."""
    live: int = Field(default=20, gt=0)
    """Steps between two lines of progress, if there is no terminal."""

    @field_validator("profile")
    @classmethod
    def _names_steps(cls, profile: str) -> str:
        if profile:
            parse_steps(profile)
        return profile

    def destinations(self) -> Destinations:
        """Return the receivers of values beside the run's own file."""
        return Destinations(
            tensorboard=self.tensorboard,
            wandb=self.wandb,
            mlflow=self.mlflow,
            prometheus=self.prometheus,
            opentelemetry=self.opentelemetry,
        )

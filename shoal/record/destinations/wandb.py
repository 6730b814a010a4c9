"""Values for Weights & Biases (extra `wandb`): https://docs.wandb.ai."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from shoal.record.logger import Logger
from shoal.run import Run


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

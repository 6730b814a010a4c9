"""The Run that a Trainer of the library writes, for `shoal report` to explain."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from shoal.checkpoint import Coordinator
from shoal.cluster import peak_flops
from shoal.errors import RunError, ShoalError
from shoal.models import Transformer
from shoal.parallel import Parallel
from shoal.plan import Plan
from shoal.record import ClockExchange, MetricsWriter, Recorder, exchange_clocks, open_recorder
from shoal.release import release
from shoal.run import Decision, Run, absolute, shown, write_decision
from shoal.train.claim_together import claim_together
from shoal.train.step_memory import MemoryRecord
from shoal.train.time_account import TimeAccount

__all__ = ["RunRecord", "describe_device", "describe_versions"]


def describe_device(device: torch.device, plan: Plan) -> dict[str, Any]:
    """Return the description in run.json of the ranks' devices."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    peak = peak_flops(name, plan.precision) if device.type == "cuda" else None
    return {"type": device.type, "name": name, "peak_flops": peak}


def describe_versions() -> dict[str, str]:
    """Return the versions in run.json that a run was made with."""
    return {"shoal": release(), "torch": torch.__version__, "python": platform.python_version()}


@final
class RunRecord:
    """The Run of a Trainer: rank 0 describes it and writes metrics, each rank its Timeline.

    Args:
        path: A directory that is absent or empty, or the directory of a Run of which a checkpoint will be
            loaded.
        coordinator: The ranks, which make the Run together.
        model: The model, before it is laid over ranks.
        device: Device on which this rank computes.
        settings: Further settings for the description.
        recorder: Recorder of spans, if they do not go into the Run.

    Attributes:
        run: The Run.
        recorder: Recorder of spans.

    Raises:
        RunError: On all ranks: the directory holds something else, cannot be made, or another process writes
            it.
    """

    def __init__(
        self,
        path: Path,
        coordinator: Coordinator,
        model: nn.Module,
        device: torch.device,
        settings: Mapping[str, Any],
        recorder: Recorder | None,
    ) -> None:
        self._launched = time.time()
        self._time: TimeAccount | None = None  # from the first step on: then the Run may be written
        self._coordinator = coordinator
        self._device = device
        self._described = _describe(path, coordinator, model) | dict(settings)
        self.run = Run(absolute(path))  # the model's code may change the working directory
        self._goes_on = self._open_together()
        say = print if coordinator.rank == 0 else lambda text: None
        self._writer = claim_together(coordinator, self.run, say, acts=coordinator.rank == 0)
        self._owns_recorder = recorder is None
        self.recorder: Recorder = recorder or open_recorder(
            self.run.timeline_file(coordinator.rank), coordinator.rank, device, say=say
        )
        folder, rank = self.run.timeline, coordinator.rank
        self._clocks = (
            exchange_clocks(coordinator, folder, rank, say) if recorder is None else ClockExchange()
        )
        self._memory = MemoryRecord(self.run.memory_file(coordinator.rank), coordinator.rank, say)
        self._metrics = MetricsWriter(self.run.metrics_file, say=say) if coordinator.rank == 0 else None

    def settle(self, plan: Plan) -> None:
        """Note the final Plan, once the model is laid out by it."""
        self._described |= {"plan": str(plan)}
        self._described["device"] = describe_device(self._device, plan)
        if self._coordinator.rank == 0 and not self._goes_on:
            self.run.describe(self._described)

    def loaded(self, step: int) -> None:
        """Note that the Run goes on from a checkpoint, made after step number `step`."""
        if self._goes_on and self._coordinator.rank == 0:
            before = self.run.description
            is_same = all(
                before.get(name) == self._described[name] for name in ("plan", "world_size", "device")
            )
            since = before.get("since_step") if is_same else step + 1
            self.run.describe({**self._described, "created": before["created"], "since_step": since})
        self._goes_on = False

    def require_loaded(self) -> None:
        """Refuse to begin anew if there is a Run already.

        Raises:
            RunError: The directory held a Run, and no checkpoint was loaded.
        """
        if self._goes_on:
            raise RunError(
                f"{shown(self.run.path)} holds a run, and a new run would overwrite it",
                possible="a new directory, or the run's own Trainer with one of its checkpoints loaded",
                change="give another run=, or load one of its checkpoints before the first step",
            )

    @contextmanager
    def step(self, parallel: Parallel, optimizer: torch.optim.Optimizer, step: int) -> Iterator[None]:
        """Return a context for a step, whose time is noted, and whose memory may be measured."""
        if self._time is None:
            ranks, is_writer = self._coordinator.size, self._coordinator.rank == 0
            self._time = TimeAccount(self.run, self._launched, ranks, is_writer)
            self._time.loaded(step - 1)
        with self._time.part("steps"), self._memory.step(parallel, optimizer, step):
            yield
        self._time.stepped(step, compiling=0.0)

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time goes to a part of the Run's account, after its first step."""
        return nullcontext() if self._time is None else self._time.part(name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write values of a step.

        Raises:
            RunError: Another process has begun to write the Run.
        """
        if self._writer is not None:
            self._writer.require()
        if self._metrics is not None:
            self._metrics.log(step, values)

    def decided(self, decision: Decision) -> None:
        """Write a decision about the exchange."""
        if self._coordinator.rank == 0:
            write_decision(self.run.decisions_file, decision)

    def close(self) -> None:
        """Write what is still buffered, and how the Run has ended."""
        if self._time is not None:
            if (error := sys.exc_info()[1]) is not None:
                self._time.failed(error)
            self._time.close("the Trainer was closed")
        self._clocks.close()
        if self._owns_recorder:
            self.recorder.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._writer is not None:
            self._writer.close()

    def _open_together(self) -> bool:
        """Return whether the Run existed before; if not, rank 0 makes it."""
        outcome: bool | ShoalError = False
        if self._coordinator.rank == 0:
            try:
                if (self.run.path / "run.json").is_file():
                    outcome = True
                else:
                    Run.create(self.run.path, self._described)
            except ShoalError as error:
                outcome = error
        told: bool | ShoalError = self._coordinator.all_gather_object(outcome)[0]
        if isinstance(told, ShoalError):
            raise told
        return told


def _describe(path: Path, coordinator: Coordinator, model: nn.Module) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = model.config.flops_per_token(model.config.seq) if isinstance(model, Transformer) else None
    return {
        "name": path.name,
        "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "world_size": coordinator.size,
        "model": {"name": type(model).__name__, "parameters": parameters, "flops_per_token": flops},
        "versions": describe_versions(),
    }

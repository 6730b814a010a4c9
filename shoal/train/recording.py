"""What a run records beside its checkpoints, as its configuration asks: spans, profiles, values of steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.errors import ConfigError
from shoal.record import (
    Loggers,
    Marks,
    MetricsWriter,
    NullRecorder,
    Recorder,
    ShiftedRecorder,
    open_recorder,
)
from shoal.run import Run
from shoal.train.profiling import Profiling
from shoal.train.record_config import RecordConfig
from shoal.units import parse_steps

__all__ = ["open_destinations", "open_loggers", "open_profiling", "open_run_recorder"]

Say = Callable[[str], object]


def open_run_recorder(
    config: RecordConfig, run: Run, rank: int, first: int, device: torch.device, marks: Marks, say: Say
) -> Recorder:
    """Return the recorder of a rank's spans.

    Args:
        config: The configuration.
        run: The run.
        rank: Number of the rank among those of all workers.
        first: Number of the first rank of this worker.
        device: Device on which the rank computes.
        marks: Marks to make with each span.
        say: Called with the report of a failure, one line.

    Raises:
        ConfigError: NVTX ranges were asked for where there is no GPU.
    """
    if config.nvtx:
        if device.type != "cuda":
            raise ConfigError(
                f"record.nvtx=true was given, and the ranks compute on {device.type}",
                possible="GPUs of NVIDIA",
                change="leave out record.nvtx",
            )
        marks.new = torch.cuda.nvtx.range
    if not config.timeline:
        return NullRecorder()
    recorder = open_recorder(run.timeline_file(rank), rank, device, say=say, marks=marks)
    return ShiftedRecorder(recorder, first) if first else recorder


def open_profiling(
    config: RecordConfig, run: Run, rank: int, device: torch.device, marks: Marks, say: Say
) -> Profiling:
    """Return what profiles the steps of a rank that were asked for."""
    steps = parse_steps(config.profile) if config.profile else None
    memory = config.profile_memory
    return Profiling(steps, run.path / "profile", rank, device, marks, memory=memory, say=say)


def open_destinations(config: RecordConfig, run: Run, is_writer: bool, say: Say) -> Loggers:
    """Return the receivers of values beside the run's own files that were asked for."""
    return Loggers(config.destinations().open(run, say) if is_writer else [], say=say)


def open_loggers(run: Run, destinations: Loggers, is_writer: bool, say: Say) -> Loggers:
    """Return the receivers of the values of steps: the metrics file, and the destinations."""
    return Loggers([MetricsWriter(run.metrics_file, say=say), destinations] if is_writer else [], say=say)

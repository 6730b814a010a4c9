"""The run directory on disk: the files of one training run.

Nouns: Run, Decision, MeasuredMemory. The trainer creates a Run, or opens one to resume; the report, the pages
    and the checkpoint commands open one. `record` and `checkpoint` write spans, metrics and tensors in it.
"""

from shoal.run.decisions import Decision, read_decisions, write_decision
from shoal.run.directory import Run, default_path
from shoal.run.memory import OUTSIDE, MeasuredMemory, UnitMemory, write_memory
from shoal.run.metrics import json_number, metrics_line, read_metrics
from shoal.run.speed import Speed, speed_of, tokens_per_second

__all__ = [
    "OUTSIDE",
    "Decision",
    "MeasuredMemory",
    "Run",
    "Speed",
    "UnitMemory",
    "default_path",
    "json_number",
    "metrics_line",
    "read_decisions",
    "read_metrics",
    "speed_of",
    "tokens_per_second",
    "write_decision",
    "write_memory",
]

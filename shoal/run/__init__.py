"""The run directory on disk: what one training run leaves behind.

Nouns: Run. The trainer creates one, or opens one to resume; the report, the pages and the checkpoint
commands open one. The spans, metrics and tensors in it are written by `record` and `checkpoint`.
"""

from shoal.run.directory import Run, default_path
from shoal.run.metrics import json_number, metrics_line, read_metrics
from shoal.run.speed import tokens_per_second

__all__ = ["Run", "default_path", "json_number", "metrics_line", "read_metrics", "tokens_per_second"]

"""Records that a run writes about itself while it runs: its Timeline and its metrics.

Nouns: Recorder (spans, one file a rank), Logger (values of a step, one rank). The trainer and the parallel
    strategies call them. Neither ever stops training: a full disk costs only the record.
"""

from shoal.record.metrics import Logger, Loggers, MetricsWriter, TensorBoardLogger
from shoal.record.recorder import NullRecorder, OpenSpan, Recorder, SpanRecorder

__all__ = [
    "Logger",
    "Loggers",
    "MetricsWriter",
    "NullRecorder",
    "OpenSpan",
    "Recorder",
    "SpanRecorder",
    "TensorBoardLogger",
]

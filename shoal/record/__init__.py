"""Records that a run writes about itself while it runs: its Timeline and its metrics.

Nouns: Recorder (spans, one file a rank), Logger (values of a step, one rank). The trainer and the parallel
    strategies call them. Neither ever stops training: a full disk costs only the record. `open_recorder`
    chooses the recorder of a device: by the host's clock, or by events on the device's streams.
    `LiveStorages` and `spanned` count the bytes of tensors, without those in `MappedFiles`.
"""

from shoal.record.clock_exchange import ClockExchange, exchange_clocks
from shoal.record.cuda import open_recorder
from shoal.record.destinations import Destinations, QueuedLogger
from shoal.record.device_recorder import DeviceEvents, DeviceRecorder, SpanBeside
from shoal.record.live_storages import LiveStorages, MappedFiles, spanned
from shoal.record.metrics import AppendFile, Logger, Loggers, MetricsWriter
from shoal.record.recorder import Marks, NullRecorder, OpenSpan, Recorder, SpanRecorder

__all__ = [
    "AppendFile",
    "ClockExchange",
    "Destinations",
    "DeviceEvents",
    "DeviceRecorder",
    "LiveStorages",
    "Logger",
    "Loggers",
    "MappedFiles",
    "Marks",
    "MetricsWriter",
    "NullRecorder",
    "OpenSpan",
    "QueuedLogger",
    "Recorder",
    "SpanBeside",
    "SpanRecorder",
    "exchange_clocks",
    "open_recorder",
    "spanned",
]

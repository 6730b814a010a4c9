"""The run directory on disk: the files of one training run.

Nouns: Run, Decision, MeasuredMemory, Account (where the wall clock went), Ledger (keeps one).
    The trainer creates a Run, or opens one to resume; the report, the pages and the checkpoint commands open
    one. `record` and `checkpoint` write spans, metrics and tensors in it. MetricsTail and TimelineFiles read
    what was appended to them.
"""

from shoal.spec.run.account import (
    CAUSES,
    Account,
    Event,
    Ledger,
    Speed,
    account,
    read_events,
    speed_of,
    tokens_per_second,
    write_event,
)
from shoal.spec.run.directory import (
    OUTSIDE,
    Decision,
    MeasuredMemory,
    Run,
    UnitMemory,
    absolute,
    default_path,
    is_free,
    json_number,
    metrics_line,
    read_decisions,
    read_metrics,
    shown,
    write_decision,
    write_memory,
)
from shoal.spec.run.metrics_tail import FollowedAccount

__all__ = [
    "CAUSES",
    "OUTSIDE",
    "Account",
    "Decision",
    "Event",
    "FollowedAccount",
    "Ledger",
    "MeasuredMemory",
    "Run",
    "Speed",
    "UnitMemory",
    "absolute",
    "account",
    "default_path",
    "is_free",
    "json_number",
    "metrics_line",
    "read_decisions",
    "read_events",
    "read_metrics",
    "shown",
    "speed_of",
    "tokens_per_second",
    "write_decision",
    "write_event",
    "write_memory",
]

"""Trace a module of any author into a Workload, by running it on fake tensors.

`trace` returns the Workload. `EXPENSIVE` names the operators whose results selective recompute keeps.
"""

from shoal.trace.operator_trace import EXPENSIVE
from shoal.trace.tracer import trace

__all__ = ["EXPENSIVE", "trace"]

"""Timelines of other programs: traces of PyTorch's profiler, and tables of operations.

`read_foreign` makes a Timeline of a folder of Chrome traces, one a rank, or of a CSV or Parquet table; the
report and `shoal what-if` take them like a Run. `is_foreign` says whether a path is one. Imports no torch.
"""

from shoal.analyze.foreign.read import is_foreign, read_foreign

__all__ = ["is_foreign", "read_foreign"]

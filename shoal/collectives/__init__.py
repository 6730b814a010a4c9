"""The process-group backend "shoal": collectives in shared memory and over TCP, between CPUs or GPUs.

Importing this registers the backend; `torch.distributed.init_process_group("shoal")` then serves everything
that PyTorch builds on process groups. The native core (csrc/) does the work, and `ProcessGroup` gives it the
interface of c10d. `Options` say how a group communicates. A `Table` holds the cost of each algorithm on this
machine, by which one is chosen. `empty` makes tensors that ranks of one host read from each other without a
copy; `share_buffers` makes FSDP2 use such tensors. Tensors on GPUs go by way of the host, or stay in a GPU
that all ranks share.
A `Codec` encodes a vector in fewer bytes. `elastic`, `parallel` and the benchmarks call it.
"""

import torch  # noqa: F401  # comes first: torch imports its backends, and so the modules below

from shoal.collectives.aggregator import Aggregator
from shoal.collectives.checks import Stripes
from shoal.collectives.codecs import Codec, codec_of
from shoal.collectives.ctypes_core import is_built
from shoal.collectives.group import ProcessGroup
from shoal.collectives.hang_watch import HangWatch, watch_hangs
from shoal.collectives.options import Options
from shoal.collectives.registration import register
from shoal.collectives.sharded_buffers import (
    empty,
    keep_freed_memory,
    return_freed_memory,
    share_buffers,
    trim,
    use_huge_pages,
)
from shoal.collectives.staging import StagedWork
from shoal.collectives.table import Table, built_in_table, load_table, save_table
from shoal.collectives.work import Done, Work

__all__ = [
    "Aggregator",
    "Codec",
    "Done",
    "HangWatch",
    "Options",
    "ProcessGroup",
    "StagedWork",
    "Stripes",
    "Table",
    "Work",
    "built_in_table",
    "codec_of",
    "empty",
    "is_built",
    "keep_freed_memory",
    "load_table",
    "register",
    "return_freed_memory",
    "save_table",
    "share_buffers",
    "trim",
    "use_huge_pages",
    "watch_hangs",
]

register()

"""The contestants of the bench: one file per kind, and `enter`, which makes a contestant from its name.

shoal          the backend, on ordinary tensors
shoal-shared   the same backend, on tensors in memory that the ranks share
gloo, nccl     torch's own backends
mpi            the MPI library under mpi4py
oneccl         Intel's oneCCL, through its C interface
memory         no communication: the least reads and writes that a collective needs, on private memory
"""

from shoal.machine.bench.contestants.availability import enter, require_available
from shoal.machine.bench.contestants.contestant import Buffers, Contestant, Operation, UnsupportedError

__all__ = ["Buffers", "Contestant", "Operation", "UnsupportedError", "enter", "require_available"]

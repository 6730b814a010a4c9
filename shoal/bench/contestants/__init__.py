"""What the bench compares: one file per kind of contestant, and `enter`, which makes one from its name.

shoal          the backend, on ordinary tensors
shoal-shared   the same, on tensors that lie in memory shared by the ranks
gloo, nccl     torch's own backends
mpi            the MPI library under mpi4py
oneccl         Intel's oneCCL, through its C interface
memory         no communication: the least reads and writes that a collective needs, on private memory
"""

from shoal.bench.contestants.availability import require_available
from shoal.bench.contestants.contestant import Buffers, Contestant, Operation, UnsupportedError
from shoal.bench.contestants.enter import enter

__all__ = ["Buffers", "Contestant", "Operation", "UnsupportedError", "enter", "require_available"]

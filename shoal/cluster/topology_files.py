"""Reads a node's topology from a file of either tool."""

from __future__ import annotations

from pathlib import Path

from shoal.cluster.matrix_topology import is_matrix, read_matrix
from shoal.cluster.nccl_topology import read_nccl
from shoal.cluster.topology import Topology
from shoal.errors import ClusterError

_POSSIBLE = "XML that NCCL_TOPO_DUMP_FILE names, or the output of: nvidia-smi topo -m"


def read_topology(path: Path, device: str | None = None) -> Topology:
    """Return the node that a file shows.

    Args:
        path: The file.
        device: The device, by key or driver's name, if it is known.

    Raises:
        ClusterError: The file cannot be read, or is of no known tool, torn, or contradicts itself.
    """
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise ClusterError(
            f"the topology {path} cannot be read: {error.strerror}",
            possible=_POSSIBLE,
            change="correct the path",
        ) from None
    except ValueError:
        raise ClusterError(
            f"{path} is not text", possible=_POSSIBLE, change="import a file of one of these"
        ) from None
    if text.lstrip().startswith("<"):
        return read_nccl(text, str(path))
    if is_matrix(text):
        return read_matrix(text, str(path), device)
    raise ClusterError(
        f"{path} is not a topology: it is no XML, and has no line of columns that begins with GPU0",
        possible=_POSSIBLE,
        change="import a file of one of these",
    )

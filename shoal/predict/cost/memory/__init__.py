"""Bytes of states and activations on each rank, when they are most, and what fits."""

from shoal.predict.cost.memory.activations import block_memory, every_second_product, kept_bytes, stream_bytes
from shoal.predict.cost.memory.memory import (
    FRAGMENTS,
    WORKSPACES,
    PieceMemory,
    activation_peaks,
    by_piece,
    state_bytes,
)
from shoal.predict.cost.memory.smallest_fit import smallest_fit, too_large

__all__ = [
    "FRAGMENTS",
    "WORKSPACES",
    "PieceMemory",
    "activation_peaks",
    "block_memory",
    "by_piece",
    "every_second_product",
    "kept_bytes",
    "smallest_fit",
    "state_bytes",
    "stream_bytes",
    "too_large",
]

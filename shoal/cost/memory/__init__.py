"""Bytes of states and activations on each rank, when they are most, and what fits."""

from shoal.cost.memory.activation_peaks import activation_peaks
from shoal.cost.memory.activations import block_memory, kept_bytes, stream_bytes
from shoal.cost.memory.by_piece import PieceMemory, by_piece
from shoal.cost.memory.memory import FRAGMENTS, WORKSPACES
from shoal.cost.memory.smallest_fit import smallest_fit, too_large
from shoal.cost.memory.states import state_bytes
from shoal.cost.memory.torchtitan_recompute import every_second_product

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

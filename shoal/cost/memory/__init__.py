"""Bytes of states and activations on each rank, when they are most, and what fits."""

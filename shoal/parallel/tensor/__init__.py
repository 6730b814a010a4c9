"""Tensor parallelism: which layers are split over ranks, their products, and the split vocabulary."""

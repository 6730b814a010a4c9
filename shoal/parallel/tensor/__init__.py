"""Tensor parallelism: the split of layers over ranks, their products, and the split vocabulary."""

"""Data parallelism: buckets of parameters, when gradients are reduced, and a file for each sharding."""

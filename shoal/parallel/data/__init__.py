"""Data parallelism: buckets of parameters, the reduction of gradients, and a file for each sharding."""

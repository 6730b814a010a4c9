"""Seconds of operations, blocks, buckets and steps, in closed form."""

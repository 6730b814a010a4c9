"""Pipeline parallelism: the cut of a model into stages, and the loop that runs a schedule's table."""

"""Pipeline parallelism: how a model is cut into stages, and the loop that runs a schedule's table."""

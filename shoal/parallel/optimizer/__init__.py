"""Optimizers over the parameters of a model that is laid over ranks, and the norm of its gradient."""

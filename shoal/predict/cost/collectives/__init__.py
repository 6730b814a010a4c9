"""Collectives and their algorithms: steps, bytes, and seconds over a cluster's levels of links."""

from shoal.predict.cost.collectives.link_use import joining_level, message_bytes, message_seconds
from shoal.predict.cost.collectives.network import (
    algorithm_seconds,
    collective_load,
    collective_seconds,
)
from shoal.predict.cost.collectives.reference_execution import MOVED, Played, motion

__all__ = [
    "MOVED",
    "Played",
    "algorithm_seconds",
    "collective_load",
    "collective_seconds",
    "joining_level",
    "message_bytes",
    "message_seconds",
    "motion",
]

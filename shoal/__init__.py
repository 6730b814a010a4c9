"""Shoal: distributed training for PyTorch that accounts for every millisecond of communication.

`parallelize` lays a model over the ranks as a `Plan` says; `Trainer` trains one, `save` and `load` keep the
training of a loop of one's own; `choose` finds the best Plan for the machines of a `Cluster`. Names load when
they are used, so that what needs no torch does not import it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.cluster import Cluster
    from shoal.diagnosis import verdict
    from shoal.parallel import parallelize
    from shoal.plan import Plan
    from shoal.planner import choose
    from shoal.run import account
    from shoal.train import Trainer, load, save

__all__ = ["Cluster", "Plan", "Trainer", "account", "choose", "load", "parallelize", "save", "verdict"]

if "torch" in sys.modules:  # otherwise torch registers the backend "shoal" itself, when it is imported
    importlib.import_module("shoal.collectives")

_HOMES = {
    "Cluster": "shoal.cluster",
    "Plan": "shoal.plan",
    "Trainer": "shoal.train",
    "account": "shoal.run",
    "choose": "shoal.planner",
    "load": "shoal.train",
    "parallelize": "shoal.parallel",
    "save": "shoal.train",
    "verdict": "shoal.diagnosis",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("shoal")
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

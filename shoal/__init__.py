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
    from shoal.analyze.diagnosis import verdict
    from shoal.parallel import parallelize
    from shoal.predict.planner import choose
    from shoal.spec.cluster import Cluster
    from shoal.spec.plan import Plan
    from shoal.spec.run import account
    from shoal.train import Trainer, load, save

__all__ = ["Cluster", "Plan", "Trainer", "account", "choose", "load", "parallelize", "save", "verdict"]

if "torch" in sys.modules:  # otherwise torch registers the backend "shoal" itself, when it is imported
    importlib.import_module("shoal.collectives")

_HOMES = {
    "Cluster": "shoal.spec.cluster",
    "Plan": "shoal.spec.plan",
    "Trainer": "shoal.train",
    "account": "shoal.spec.run",
    "choose": "shoal.predict.planner",
    "load": "shoal.train",
    "parallelize": "shoal.parallel",
    "save": "shoal.train",
    "verdict": "shoal.analyze.diagnosis",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("shoal")
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

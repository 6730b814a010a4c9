"""Shoal: distributed training for PyTorch that accounts for every millisecond of communication.

`parallelize` lays a model over the ranks as a `Plan` says; `Trainer` trains one. Names load when they are
used, so that what needs no torch does not import it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.parallel import parallelize
    from shoal.plan import Plan
    from shoal.train import Trainer

__all__ = ["Plan", "Trainer", "parallelize"]

if "torch" in sys.modules:  # otherwise torch registers the backend "shoal" itself, when it is imported
    importlib.import_module("shoal.collectives")

_HOMES = {"Plan": "shoal.plan", "Trainer": "shoal.train", "parallelize": "shoal.parallel"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

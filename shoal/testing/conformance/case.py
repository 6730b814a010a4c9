"""A Case: an entry of the zoo under a sharding, in a precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shoal.plan import Plan

__all__ = ["PRECISIONS", "SHARDINGS", "Case"]

SHARDINGS: Mapping[str, Plan] = {
    "none": Plan(dp=2),
    "zero1": Plan(dp=2, shard="zero1"),
    "zero2": Plan(dp=2, shard="zero2"),
    "zero3": Plan(dp=2, shard="zero3"),
    "hybrid": Plan(dp=4, replicate=2, shard="zero3"),
}
"""The Plans that every entry is trained under, without their precision."""

PRECISIONS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The types that compute."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training to compare.

    Attributes:
        entry: Name of an entry of the zoo.
        sharding: One of `SHARDINGS`.
        precision: One of `PRECISIONS`.
    """

    entry: str
    sharding: str
    precision: str

    @property
    def plan(self) -> Plan:
        """Return the Plan that it is trained under."""
        return SHARDINGS[self.sharding].replace(precision=self.precision)

    def __str__(self) -> str:
        return f"{self.entry} under {self.sharding} in {self.precision}"

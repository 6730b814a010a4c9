"""Caches of functions of a Plan, with keys that cannot lack a field: they are the fields that were read.

A function that is cached gets a Plan that notes which of its fields are read. Their values, with the other
arguments, are the key. If a call reads a field that none read before, the keys get it too, and the cache
begins anew. The function has to depend on its arguments alone, and on what never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Generic, TypeVar, TypeVarTuple

from shoal.plan.plan import Plan
from shoal.plan.settled import SettledPlan

R = TypeVar("R")
Others = TypeVarTuple("Others")


class ByFields(Generic[*Others, R]):
    """Caches a function of a Plan by the fields that it reads, and by its other arguments.

    A cached function may call another one with its Plan: what that one has read is then read by both.

    Args:
        function: The function; its other arguments are hashable.
    """

    def __init__(self, function: Callable[[SettledPlan, *Others], R]) -> None:
        self._function = function
        self._fields: tuple[str, ...] = ()
        self._values: Callable[[Plan], object] = bool  # of no field: equal for all Plans
        self._known: dict[object, R] = {}

    def __call__(self, plan: Plan, *others: *Others) -> R:
        """Return what the function returns for these arguments."""
        found = self._known.get((self._values(plan), others))
        if found is None:
            noting = _Noting.having(self._fields, plan)
            found = self._function(noting, *others)
            if noting.read:
                self._fields += tuple(noting.read)
                self._values = attrgetter(*self._fields)
                self._known.clear()
            self._known[self._values(plan), others] = found
        return found


class _Noting(SettledPlan):
    """A Plan that has some fields of another one; `read` are those that it got because they were read."""

    __slots__ = ("_whole", "read")
    _whole: Plan
    read: list[str]

    @classmethod
    def having(cls, fields: tuple[str, ...], whole: Plan) -> _Noting:
        """Return a Plan that has these fields of a whole one."""
        made, give = cls.__new__(cls), object.__setattr__
        give(made, "_whole", whole)
        give(made, "read", [])
        for name in fields:
            give(made, name, getattr(whole, name))
        return made

    def __getattr__(self, name: str) -> Any:
        """Return a field that it does not have yet: called where the slot is empty."""
        value = getattr(self._whole, name)
        object.__setattr__(self, name, value)
        self.read.append(name)
        return value

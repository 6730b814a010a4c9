"""The Boundary: which ranks at one place along the pipeline send to which ranks at another place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from shoal.plan.group import Group
from shoal.plan.groups import Groups
from shoal.plan.plan import Plan


@lru_cache(maxsize=1 << 10)
def _places(group: Group) -> tuple[int, ...]:
    """Return the first rank at each place along the pipeline."""
    return group.ranks(0)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Pairs of ranks with equal coordinates on all axes but `pp`: the first of each pair sends to the second.

    The k-th rank of `pattern` from `sender` sends to the k-th rank of `pattern` from `receiver`, so all pairs
    are equally far apart in rank numbers. Where they sit on links differs.

    Attributes:
        sender: The first rank that sends.
        receiver: The first rank that receives.
        pattern: The ranks of one stage.
    """

    sender: int
    receiver: int
    pattern: Group

    @classmethod
    def of(cls, plan: Plan, sender: int, receiver: int) -> Self:
        """Return the pairs between two places along `pp`.

        Args:
            plan: The Plan, which says the degrees and their order.
            sender: Place of the ranks that send, from 0 to pp - 1.
            receiver: Place of the ranks that receive.
        """
        groups = Groups.of_pipeline(plan)
        return cls.between(groups.pp, groups.stage, sender, receiver)

    @classmethod
    def between(cls, pp: Group, stage: Group, sender: int, receiver: int) -> Self:
        """Return the pairs between two places along a pipeline, from its ranks and those of a stage."""
        places = _places(pp)
        return cls(places[sender], places[receiver], stage)

    @property
    def distance(self) -> int:
        """Number of ranks from a sender to its receiver, in either direction."""
        return abs(self.receiver - self.sender)

    def pairs(self) -> list[tuple[int, int]]:
        """Return all pairs of a sender and a receiver, as global ranks."""
        return list(zip(self.pattern.ranks(self.sender), self.pattern.ranks(self.receiver), strict=True))

    def crosses(self, devices: int) -> bool:
        """Return whether the ranks of some pair sit in different groups of `devices` neighbouring ranks.

        The links that join such groups are then used: for the farthest pair, those of the outermost level
        for which this holds of the level inside it. It takes no time that grows with the number of pairs
        where the Plan's distances and `devices` divide each other.
        """
        if self.distance == 0 or self.distance >= devices:
            return self.distance > 0
        *outer, (run, stride) = self.pattern.dims or ((1, 1),)
        if stride > 1:
            outer, run = [*outer, (run, stride)], 1
        # Places of the first rank of each run in its group of devices.
        places = {min(self.sender, self.receiver) % devices}
        for number, apart in outer:
            different = min(number, devices // math.gcd(apart, devices))
            places = {(place + index * apart) % devices for place in places for index in range(different)}
        return any(place + run - 1 + self.distance >= devices for place in places)

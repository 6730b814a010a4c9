"""The Crossing: how one instance of a group pattern uses one level of links, as counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Crossing:
    """How one instance of a pattern uses one level.

    A part is the members in one group of the level inside (or one device).

    Attributes:
        level: Index of the level.
        parts: The most parts that one group of the level joins.
        inside: Members in the smallest part.
        members: Members in the smallest group of the level that joins two parts or more.
        hops: Steps over these links on the way through all members in order of rank.
        others: The most other members that a member reaches over these links.
        steps: Other members that the member reaches over these links which has most of them outside.
        displaced: The most of the `others` that have another place in their node, for one member.
    """

    level: int
    parts: int
    inside: int
    members: int
    hops: int
    others: int
    steps: int
    displaced: int

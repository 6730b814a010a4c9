"""A machine's place among those that train together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """The place of a machine among several, each with some ranks of one training.

    Attributes:
        name: What stands before the lines of its ranks.
        number: Its number, from 0.
        nodes: Number of machines.
        first_rank: The first of its ranks.
        ranks: Number of ranks on all machines.
        master: Host and port of the store in which all ranks meet.
    """

    name: str
    number: int
    nodes: int
    first_rank: int
    ranks: int
    master: tuple[str, int]

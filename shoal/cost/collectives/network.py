"""Seconds of collectives over a cluster's levels of links, by algorithm.

A group is n ranks that lie `stride` apart in the order of the mesh, or runs of neighbours that do. One group
of links at a level joins some members of the group; k such parts, of g members each, communicate over the
next level. S is the bytes of the whole buffer, a the seconds of a step and B the rate of one device at the
level that joins all members; a_i and B_i are the same inside a part, b is a device's rate to other parts, and
R a device's rate into switches that add up.

| collective                | algorithm | seconds besides `setup`                                         |
|---------------------------|-----------|-----------------------------------------------------------------|
| all_reduce                | ring      | 2 (n-1) a + 2 (n-1)/n S/B                                       |
|                           | tree      | 2 ceil(log2 n) a + min(2, n/2) S/B                              |
|                           | switch    | a + (n+1)/n S/R                                                 |
|                           | one-shot  | a + (n-1) S/B, in a mesh                                        |
| all_gather, reduce_scatter| ring      | (n-1) a + (n-1)/n S/B                                           |
| broadcast, reduce         | chain     | (n-1) a + S/B                                                   |
|                           | tree      | ceil(log2 n) (a + S/B)                                          |
| all_to_all                | pairwise  | (n-1) a + the longer of (g-1)/n S/B_i and (n-g)/n S/b           |
| send                      |           | a + S/B                                                         |

Over several levels:

- ring, chain: one ring goes through all ranks. Of its n-1 steps, k-1 are between parts and k(g-1) inside
  them. Every member of a part has links of its own to other parts, and g rings use all of them at once: B is
  the lesser of B_i and g b.
- tree: double binary trees at each level. The busiest of n ranks has two children in one tree, where it sends
  up and down, and is a leaf of the other: it sends 2 S. With three ranks it sends 3/2 S. With two ranks it
  sends S, because each rank is the root of one tree and the leaf of the other: so two nodes are quicker than
  any larger number. Levels pass the buffer on in c chunks, so that all are busy at once. That takes
  (c + p)(a + M/c), where p a is the seconds of all steps but the last, a those of a step of the outermost
  level, and M the slowest level's seconds for the bytes. One more chunk costs another a; one less leaves more
  of the tree idle at the beginning and end. The best number of chunks is sqrt(p M/a), or 1.
- switch: devices send to the switch, which adds up and sends to all. Trees join the levels whose switches do
  not add up, in chunks as above. Between parts each byte goes up once: S/(g R).
- all_to_all: links inside and between parts are busy at once.

Where several algorithms are possible, the quickest counts. Small buffers reach a lower rate: S/B becomes
`(S/B)(1 + sqrt(s0/S))`, where s0 is the level's `half_size` (for rings and all_to_all, that of the outermost
level). `setup` is that of the innermost links, counted once. Sources: Sanders, Speck and Träff, 2009 (double
trees, chunks); NCCL's tuning.cc (steps, and what the switches add up); docs/concepts/cost-model.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shoal.cluster import Cluster, Level
from shoal.plan import Group

__all__ = ["algorithm_seconds", "collective_load", "collective_seconds", "members_within", "send_seconds"]


@dataclass(frozen=True, slots=True)
class _Span:
    """The part of one level that a group uses.

    Attributes:
        level: The links.
        parts: Number of groups of the next inner level (or devices) that these links join.
        inside: Members in each part.
        rate: Bytes/s of all members of a part together.
        hops: Steps over these links in a ring through all ranks.
    """

    level: Level
    parts: int
    inside: int
    rate: float
    hops: int

    @property
    def steps(self) -> int:
        """Number of steps from the root of a tree over the parts to its leaves."""
        return (self.parts - 1).bit_length()


@lru_cache(maxsize=1 << 16)
def collective_seconds(collective: str, nbytes: float, group: Group, cluster: Cluster) -> float:
    """Return the seconds of a collective by the quickest algorithm.

    Args:
        collective: all_reduce, all_gather, reduce_scatter, broadcast, reduce or all_to_all.
        nbytes: S of the table: the output for all_gather, the input of one rank for the others.
        group: The ranks that take part.
        cluster: The machines and links that it runs on.
    """
    if group.size == 1 or nbytes <= 0:
        return 0.0
    return min(algorithm_seconds(collective, nbytes, group, cluster).values())


def algorithm_seconds(collective: str, nbytes: float, group: Group, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of a collective of two ranks or more, by each possible algorithm.

    The arguments are those of `collective_seconds`.
    """
    spans = _spans(group, cluster)
    setup = cluster.levels[0].setup
    return {
        name: setup + seconds(nbytes, group.size, spans)
        for name, seconds in _ALGORITHMS[collective].items()
        if (name != "switch" or any(span.level.reduces for span in spans))
        and (name != "one-shot" or (len(spans) == 1 and spans[0].level.mesh))
    }


@lru_cache(maxsize=1 << 12)
def collective_load(group: Group, cluster: Cluster) -> float:
    """Return how much a group's collectives load a device: 1 at the innermost links' rate, less if slower.

    The bytes of a collective take multiprocessors and memory bandwidth from compute that runs beside it.
    Links that move few bytes a second take little of both.
    """
    if group.size == 1:
        return 0.0
    inside = cluster.levels[0]
    return min(1.0, min(span.rate for span in _spans(group, cluster)) / inside.rate(inside.devices))


def members_within(group: Group, level: Level) -> int:
    """Return how many ranks of the group are joined by one group of a level's links."""
    if level.devices < group.stride:
        return min(group.run, level.devices)
    return min(group.size, level.devices // group.stride * group.run)


def send_seconds(nbytes: float, distance: int, cluster: Cluster) -> float:
    """Return the seconds of a message to a rank `distance` ranks away in the mesh's order."""
    level = next((level for level in cluster.levels if distance < level.devices), cluster.levels[-1])
    return cluster.levels[0].setup + level.latency + nbytes / level.rate(2)


def _spans(group: Group, cluster: Cluster) -> list[_Span]:
    """Return the levels that a group uses, innermost first."""
    spans, inside = [], 1
    for level in cluster.levels:
        members = group.size if level is cluster.levels[-1] else members_within(group, level)
        if members > inside:
            parts = math.ceil(members / inside)
            hops = (parts - 1) * math.ceil(group.size / members)
            spans.append(_Span(level, parts, inside, inside * level.rate(members), hops))
            inside = members
    return spans


def _slowed(nbytes: float, level: Level) -> float:
    """Return the bytes that would take as long at the rate of a large buffer."""
    return nbytes + math.sqrt(nbytes * level.half_size)


def _circle(passes: int, whole: bool) -> Callable[[float, int, Sequence[_Span]], float]:
    """Make the time function of a ring, or of a chain.

    Args:
        passes: How often the ring carries every rank's part to all others.
        whole: Whether the whole buffer travels, as in a chain.
    """

    def seconds(nbytes: float, size: int, spans: Sequence[_Span]) -> float:
        latency = sum(span.hops * span.level.latency for span in spans)
        share = 1.0 if whole else (size - 1) / size
        moved = share * _slowed(nbytes, spans[-1].level) / min(span.rate for span in spans)
        return passes * (latency + moved)

    return seconds


def _tree(nbytes: float, size: int, spans: Sequence[_Span]) -> float:
    latency = sum(2 * span.steps * span.level.latency for span in spans)
    return _in_chunks(latency, max(_through_tree(nbytes, span) for span in spans), spans)


def _through_tree(nbytes: float, span: _Span) -> float:
    """Return the seconds of the bytes that the busiest part of double binary trees sends."""
    return min(2.0, span.parts / 2) * _slowed(nbytes, span.level) / span.rate


def _in_chunks(latency: float, moved: float, spans: Sequence[_Span]) -> float:
    """Return the seconds of steps and bytes together; several levels use the best number of chunks."""
    last = spans[-1].level.latency
    if len(spans) == 1 or last == 0:
        return latency + moved
    before = latency / last - 1
    chunks = max(1.0, math.sqrt(before * moved / last))
    return (chunks + before) * (last + moved / chunks)


def _switch(nbytes: float, size: int, spans: Sequence[_Span]) -> float:
    latency = moved = 0.0
    for span in spans:
        level = span.level
        if level.reduces:
            latency += level.latency
            sent = (span.parts + 1) / span.parts if span.inside == 1 else 1.0
            rate = span.rate * level.reduction_share / level.share
            moved = max(moved, sent * _slowed(nbytes, level) / rate)
        else:
            latency += 2 * span.steps * level.latency
            moved = max(moved, _through_tree(nbytes, span))
    return _in_chunks(latency, moved, spans)


def _one_shot(nbytes: float, size: int, spans: Sequence[_Span]) -> float:
    return spans[0].level.latency + (size - 1) * _slowed(nbytes, spans[0].level) / spans[0].rate


def _unpipelined_tree(nbytes: float, size: int, spans: Sequence[_Span]) -> float:
    slowed = _slowed(nbytes, spans[-1].level)
    return sum(span.steps * (span.level.latency + slowed * span.inside / span.rate) for span in spans)


def _pairwise(nbytes: float, size: int, spans: Sequence[_Span]) -> float:
    slowed = _slowed(nbytes, spans[-1].level)
    others = [(span.parts - 1) * span.inside for span in spans]  # ranks that each level leads to
    latency = sum(count * span.level.latency for count, span in zip(others, spans, strict=True))
    return latency + max(
        count / size * slowed * span.inside / span.rate for count, span in zip(others, spans, strict=True)
    )


_ALGORITHMS: Mapping[str, Mapping[str, Callable[[float, int, Sequence[_Span]], float]]] = {
    "all_reduce": {
        "ring": _circle(passes=2, whole=False),
        "tree": _tree,
        "switch": _switch,
        "one-shot": _one_shot,
    },
    "all_gather": {"ring": _circle(passes=1, whole=False)},
    "reduce_scatter": {"ring": _circle(passes=1, whole=False)},
    "broadcast": {"chain": _circle(passes=1, whole=True), "tree": _unpipelined_tree},
    "reduce": {"chain": _circle(passes=1, whole=True), "tree": _unpipelined_tree},
    "all_to_all": {"pairwise": _pairwise},
}
"""By collective and name: function of bytes, ranks and spans that gives the seconds without `setup`."""

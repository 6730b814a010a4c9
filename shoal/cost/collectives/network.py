"""Seconds of collectives over a cluster's levels of links, by algorithm.

A group is n ranks, `stride` apart in the order of the mesh, or runs of neighbours that are. At each level it
has so many members inside one group of that level's links; those k parts of g members talk over the next
level. S are the bytes of the whole buffer, a the seconds of a step and B the rate of one device at the level
that all are in; a_i and B_i are those inside a part, b a device's rate to other parts, R a device's rate into
switches that add up.

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

- ring, chain: one ring through all. Of its n-1 steps k-1 are between parts, and k(g-1) inside them. Every
  member of a part has links of its own to others, and as many rings use them all at once: B is the lesser of
  B_i and g b.
- tree: double binary trees at each level. The busiest of n ranks sends up and down in one tree where it has
  two children, and is a leaf of the other: 2 S. Of three it is 3/2 S, and of two S, as each is root of one
  tree and the other's leaf: why two nodes alone look quicker than any larger number. Levels hand the buffer
  on in c chunks, so that all are busy at once: with p a the seconds of all steps but the last, a of the
  outermost level, and M the slowest level's seconds for the bytes, that is (c + p)(a + M/c). A chunk more
  costs another a, one less leaves more of the tree idle at the beginning and end; the best number is
  sqrt(p M/a), or 1.
- switch: devices send to the switch, which adds up and sends to all; levels whose switches do not are joined
  by trees, in chunks as above. Between parts each byte goes up once, S/(g R).
- all_to_all: links inside and between parts are busy at once.

Where several are possible the quickest counts. Small buffers reach less: S/B is `(S/B)(1 + sqrt(s0/S))`, with
s0 the level's `half_size`, of rings and exchanges the outermost level's. `setup` is the innermost links',
once. Sources: Sanders, Speck and Träff, 2009 (double trees, chunks); NCCL's tuning.cc (steps, and what the
switches add up); docs/concepts/cost-model.md.
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
    """What a group uses of one level.

    Attributes:
        level: The links.
        parts: How many of the level within, or devices, they join here.
        inside: Members in each of these.
        rate: Bytes/s of all members of a part together.
        hops: Steps over these links of a ring through all ranks.
    """

    level: Level
    parts: int
    inside: int
    rate: float
    hops: int

    @property
    def steps(self) -> int:
        """Steps from the root of a tree over the parts to its leaves."""
        return (self.parts - 1).bit_length()


@lru_cache(maxsize=1 << 16)
def collective_seconds(collective: str, nbytes: float, group: Group, cluster: Cluster) -> float:
    """Seconds of a collective by the quickest algorithm.

    Args:
        collective: all_reduce, all_gather, reduce_scatter, broadcast, reduce or all_to_all.
        nbytes: S of the table: of all_gather the output, of the others the input of one rank.
        group: Who takes part.
        cluster: Where.
    """
    if group.size == 1 or nbytes <= 0:
        return 0.0
    return min(algorithm_seconds(collective, nbytes, group, cluster).values())


def algorithm_seconds(collective: str, nbytes: float, group: Group, cluster: Cluster) -> dict[str, float]:
    """Seconds of a collective of two ranks or more by each algorithm that is possible; arguments as above."""
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
    """How much a group's collectives load a device: 1 at the innermost links' rate, less at slower ones'.

    Compute beside them lacks the multiprocessors and the memory's rate that their bytes take: links that move
    few bytes a second take few of these.
    """
    if group.size == 1:
        return 0.0
    inside = cluster.levels[0]
    return min(1.0, min(span.rate for span in _spans(group, cluster)) / inside.rate(inside.devices))


def members_within(group: Group, level: Level) -> int:
    """How many ranks of the group one group of a level's links joins."""
    if level.devices < group.stride:
        return min(group.run, level.devices)
    return min(group.size, level.devices // group.stride * group.run)


def send_seconds(nbytes: float, distance: int, cluster: Cluster) -> float:
    """Seconds of a message to the rank that is so far away in the mesh's order."""
    level = next((level for level in cluster.levels if distance < level.devices), cluster.levels[-1])
    return cluster.levels[0].setup + level.latency + nbytes / level.rate(2)


def _spans(group: Group, cluster: Cluster) -> list[_Span]:
    """The levels that a group uses, innermost first."""
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
    """The bytes of a large buffer that would take as long, at a large buffer's rate."""
    return nbytes + math.sqrt(nbytes * level.half_size)


def _circle(passes: int, whole: bool) -> Callable[[float, int, Sequence[_Span]], float]:
    """A ring that so often takes to each rank what the others have, or a chain of the whole buffer."""

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
    """Seconds of what the busiest part of double binary trees sends."""
    return min(2.0, span.parts / 2) * _slowed(nbytes, span.level) / span.rate


def _in_chunks(latency: float, moved: float, spans: Sequence[_Span]) -> float:
    """What steps and bytes take together: over several levels in the best number of chunks."""
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
    others = [(span.parts - 1) * span.inside for span in spans]  # whom each level leads to
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
"""By collective and name: seconds of so many bytes among so many ranks over their spans, but for `setup`."""

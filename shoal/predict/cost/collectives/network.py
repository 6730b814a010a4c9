"""Seconds of collectives over a cluster's levels of links, by algorithm.

A group is n ranks that lie `stride` apart in the order of the mesh, or runs of neighbours that do. Instances
of this pattern cover all ranks. They may lie differently on nodes and pods (`crossings`); the slowest one is
priced. One group of links at a level joins some members of an instance; k such parts, of g members in the
smallest, communicate over the next level. S is the bytes of the whole buffer, a the seconds of a step and B
the rate of one device at the level that joins all members; a_i and B_i are the same inside a part, b is a
device's rate to other parts, and R a device's rate into switches that add up.

| collective                | algorithm | seconds besides `setup`                                         |
|---------------------------|-----------|-----------------------------------------------------------------|
| all_reduce                | ring      | 2 (n-1) step(S/n) + copy(S/n)                                   |
|                           | tree      | 2 d a + min(2, n/2) S/B                                         |
|                           | switch    | r + a + (n+1)/n S/R                                             |
|                           | one-shot  | a + (n-1) S/B, in a mesh                                        |
| all_gather, reduce_scatter| ring      | (n-1) step(S/n) + copy(S/n)                                     |
| broadcast, reduce         | chain     | (n-1) a + S/B                                                   |
|                           | tree      | d (a + S/B)                                                     |
| all_to_all                | pairwise  | ceil((n-1)/q) a + (n-1)/n S/B + copy(S/n)                       |
| send                      |           | a + S/B                                                         |

- step(c): max(c/B, a + c/(2B)) with two `slices`: a device sends one slice while the other is on its way, so
  that the latency a hides where chunks are large. With one slice, a + c/B.
- copy(c): c bytes at `copy_rate`, because each device also writes its own part.
- d: ceil(log2 n); where a node is a `chain`, n-1.
- r: `reduction_start`. q: `peers`, the messages that a device has under way at once.
- packets: a ring's step is a_p + c/(sB), with `packet_latency` and `packet_share`, if that takes less; trees
  likewise. With 3 steps or fewer NCCL sends none above `packet_limit`. An all_to_all sends them if its
  messages have at most 16 KiB.

Over several levels:

- ring, chain: one ring goes through all ranks in their order. Each of its n-1 steps takes the latency of the
  links between its two ranks. Every member of a part has an interface of its own to other parts, and g rings
  use all of them at once: B is the lesser of B_i and g b, by the smallest part. Bytes between parts count
  once, at the sender. Interfaces of devices that are no members are not used: other instances use them at the
  same time, since all ranks of a mesh call the same collective.
- tree: double binary trees at each level. The busiest of n ranks has two children in one tree, where it sends
  up and down, and is a leaf of the other: it sends 2 S. With three ranks it sends 3/2 S. With two ranks it
  sends S, because each rank is the root of one tree and the leaf of the other: so two nodes are quicker than
  any larger number. Levels pass the buffer on in c chunks, so that all are busy at once. That takes
  (c + p)(a + M/c), where p a is the seconds of all steps but the last, a those of a step of the outermost
  level, and M the slowest level's seconds for the bytes. One more chunk costs another a; one less leaves more
  of the tree idle at the beginning and end. The best number of chunks is sqrt(p M/a), or 1.
- switch: devices send to the switch, which adds up and sends to all. Trees join the levels whose switches do
  not add up, in chunks as above. Over a network that adds up each byte goes up once: S/(g R).
- all_to_all: links inside and between parts are busy at once: the longest of (g-1)/n S/B_i, (n-g)/n S/b. Over
  `rails`, bytes between different places in nodes also load the links inside a node, or the level around the
  rails if that is quicker. Rings and trees cross from node to node between equal places.

An oversubscribed level slows only the bytes that its links carry, which are those between groups of the level
inside. Where several algorithms are possible, the quickest counts. Small buffers reach a lower rate: S/B
becomes `(S/B)(1 + sqrt(s0/S))`, where s0 is the level's `half_size` (for rings and all_to_all, that of the
outermost level). `setup` is that of the innermost links, counted once. Sources: Sanders, Speck and Träff,
2009 (double trees, chunks); NCCL's tuning.cc (steps, protocols, and what the switches add up);
docs/concepts/cost-model.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shoal.predict.cost.collectives.link_use import Crossing, crossings
from shoal.spec.cluster import Cluster, Level
from shoal.spec.plan import Group

_PACKET_MESSAGE = 16 * 1024
"""Bytes of the largest message of an all_to_all that goes in packets: NCCL_P2P_LL_THRESHOLD of NCCL."""


_FEW_STEPS = 3
"""Steps up to which NCCL's protocol of large buffers, Simple, takes less latency than LL128."""

_LATER_START = 1.8 / 2.8
"""Seconds that Simple begins later than LL over those that its steps take longer, by NCCL's constants."""


@dataclass(frozen=True, slots=True)
class _Span:
    """The part of one level that a group uses.

    Attributes:
        level: The links.
        crossing: How the group uses them.
        rate: Bytes/s of all members of the smallest part together.
    """

    level: Level
    crossing: Crossing
    rate: float

    @property
    def depth(self) -> int:
        """Number of steps from the root of a tree over the parts to its leaves."""
        parts = self.crossing.parts
        return parts - 1 if self.level.chain else (parts - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Route:
    """One instance of a group, as the algorithms see it.

    Attributes:
        size: Number of ranks.
        spans: The levels that it uses, innermost first.
        inside: The cluster's innermost links, whose `setup`, `packet_limit` and `copy_rate` count.
        detour: The levels' seconds per byte of an all_to_all that rails add, by index of the level.
        rate: Bytes/s of rings through all ranks.
        packet_rate: Bytes/s of rings through all ranks, in packets.
        has_packets: Whether data can go in packets all the way.
        copied: Seconds per byte in which a device copies its own part.
    """

    size: int
    spans: Sequence[_Span]
    inside: Level
    detour: Mapping[int, float]
    rate: float
    packet_rate: float
    has_packets: bool
    copied: float

    def is_in_packets(self, nbytes: float, steps: int) -> bool:
        """Return whether the library may send a ring's data in packets.

        Args:
            nbytes: Bytes of a step.
            steps: Steps that follow one another.
        """
        limit = self.inside.packet_limit * (1 + _LATER_START / steps)
        return self.has_packets and (steps > _FEW_STEPS or not limit or nbytes <= limit)


@lru_cache(maxsize=1 << 16)
def collective_seconds(collective: str, nbytes: float, group: Group, cluster: Cluster) -> float:
    """Return the seconds of a collective by the quickest algorithm, for the slowest instance of the group.

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

    They are those of the instance that is slowest by its quickest algorithm. The arguments are those of
    `collective_seconds`.
    """
    return max(
        (_by_algorithm(collective, nbytes, route) for route in _routes(group, cluster.levels)),
        key=lambda seconds: min(seconds.values()),
    )


def _by_algorithm(collective: str, nbytes: float, route: _Route) -> dict[str, float]:
    levels = [span.level for span in route.spans]
    return {
        name: route.inside.setup + seconds(nbytes, route)
        for name, seconds in _ALGORITHMS[collective].items()
        if (name != "switch" or any(level.reduces for level in levels))
        and (name != "one-shot" or (len(levels) == 1 and levels[0].mesh))
    }


@lru_cache(maxsize=1 << 12)
def collective_load(group: Group, cluster: Cluster) -> float:
    """Return how much a group's collectives load a device: 1 at the innermost links' rate, less if slower.

    The bytes of a collective take multiprocessors and memory bandwidth from compute that runs beside it.
    Links that move few bytes a second take little of both. The instance with the quickest links counts.
    """
    if group.size == 1:
        return 0.0
    inside = cluster.levels[0]
    rate = max(route.rate for route in _routes(group, cluster.levels))
    return min(1.0, rate / inside.rate(inside.devices))


@lru_cache(maxsize=1 << 10)
def _routes(group: Group, levels: tuple[Level, ...]) -> tuple[_Route, ...]:
    """Return the different ways in which instances of a group lie on the links."""
    has_rails = any(level.rails for level in levels)
    lain = crossings(group, tuple(level.devices for level in levels), has_rails)
    return tuple(_route(group, each, levels) for each in lain)


def _route(group: Group, lain: Sequence[Crossing], levels: Sequence[Level]) -> _Route:
    spans, inside = [], levels[0]
    for each in lain:
        level = levels[each.level]
        spans.append(_Span(level, each, each.inside * level.rate(each.members)))
    return _Route(
        size=group.size,
        spans=spans,
        inside=inside,
        detour=_detour(lain, levels),
        rate=min(span.rate for span in spans),
        packet_rate=min(span.rate * span.level.packet_share / span.level.share for span in spans),
        has_packets=all(span.level.packet_latency for span in spans),
        copied=1 / inside.copy_rate if inside.copy_rate else 0.0,
    )


def _detour(lain: Sequence[Crossing], levels: Sequence[Level]) -> dict[int, float]:
    """Return seconds per byte of one message that bytes between places add to levels, over rails.

    They pass the links inside a node, or the next level where that has no rails, whichever takes less.
    """
    found: dict[int, float] = {}
    for each in lain:
        if levels[each.level].rails and each.displaced:
            ways = [0]
            if each.level + 1 < len(levels) and not levels[each.level + 1].rails:
                ways.append(each.level + 1)
            way = max(ways, key=lambda index: _exchange_rate(levels[index], levels[index].devices))
            rate = _exchange_rate(levels[way], levels[way].devices)
            found[way] = found.get(way, 0.0) + each.displaced / rate
    return found


def _exchange_rate(level: Level, members: int) -> float:
    """Return the bytes/s from each device that an all_to_all of `members` devices reaches."""
    return level.rate(members) * (level.exchange_share or level.share) / level.share


def _slowed(nbytes: float, level: Level) -> float:
    """Return the bytes that would take as long at the rate of a large buffer."""
    return nbytes + math.sqrt(nbytes * level.half_size)


def _ring(passes: int) -> Callable[[float, _Route], float]:
    """Make the time function of a ring that carries every rank's part `passes` times to all others."""

    def seconds(nbytes: float, route: _Route) -> float:
        own = nbytes / route.size
        moved = (route.size - 1) * own / route.rate
        travelled = sum(
            span.crossing.hops * (span.level.latency + own / route.rate / span.level.slices)
            for span in route.spans
        )
        small = (route.size - 1) / route.size * (_slowed(nbytes, route.spans[-1].level) - nbytes) / route.rate
        whole = passes * (max(moved, travelled) + small) + own * route.copied
        if not route.is_in_packets(own, passes * (route.size - 1)):
            return whole
        latency = sum(span.crossing.hops * span.level.packet_latency for span in route.spans)
        return min(whole, passes * (latency + (route.size - 1) * own / route.packet_rate))

    return seconds


def _chain(nbytes: float, route: _Route) -> float:
    latency = sum(span.crossing.hops * span.level.latency for span in route.spans)
    return latency + _slowed(nbytes, route.spans[-1].level) / route.rate


def _tree(nbytes: float, route: _Route) -> float:
    latency = sum(2 * span.depth * span.level.latency for span in route.spans)
    moved = max(_through_tree(nbytes, span) for span in route.spans)
    whole = _in_chunks(latency, moved, route.spans)
    if not route.is_in_packets(nbytes / route.size, 2 * (route.size - 1)):
        return whole
    latency = sum(2 * span.depth * span.level.packet_latency for span in route.spans)
    return min(whole, latency + nbytes * max(map(_sent_in_tree, route.spans)) / route.packet_rate)


def _through_tree(nbytes: float, span: _Span) -> float:
    """Return the seconds of the bytes that the busiest part of double binary trees sends."""
    return _sent_in_tree(span) * _slowed(nbytes, span.level) / span.rate


def _sent_in_tree(span: _Span) -> float:
    """Return how often the busiest part of double binary trees sends the buffer."""
    return min(2.0, span.crossing.parts / 2)


def _in_chunks(latency: float, moved: float, spans: Sequence[_Span]) -> float:
    """Return the seconds of steps and bytes together; several levels use the best number of chunks."""
    last = spans[-1].level.latency
    if len(spans) == 1 or last == 0:
        return latency + moved
    before = latency / last - 1
    chunks = max(1.0, math.sqrt(before * moved / last))
    return (chunks + before) * (last + moved / chunks)


def _switch(nbytes: float, route: _Route) -> float:
    latency = moved = start = 0.0
    for span in route.spans:
        level, parts = span.level, span.crossing.parts
        if level.reduces:
            start += level.reduction_start
            latency += level.latency
            sent = (parts + 1) / parts if span.crossing.level == 0 else 1.0
            rate = span.rate * level.reduction_share / level.share
            moved = max(moved, sent * _slowed(nbytes, level) / rate)
        else:
            latency += 2 * span.depth * level.latency
            moved = max(moved, _through_tree(nbytes, span))
    return start + _in_chunks(latency, moved, route.spans)


def _one_shot(nbytes: float, route: _Route) -> float:
    (span,) = route.spans
    return span.level.latency + (route.size - 1) * _slowed(nbytes, span.level) / span.rate


def _unpipelined_tree(nbytes: float, route: _Route) -> float:
    slowed = _slowed(nbytes, route.spans[-1].level)
    return sum(
        span.depth * (span.level.latency + slowed * span.crossing.inside / span.rate) for span in route.spans
    )


def _pairwise(nbytes: float, route: _Route) -> float:
    own = nbytes / route.size
    rounds = [math.ceil(span.crossing.steps / span.level.peers) for span in route.spans]
    if route.has_packets and own <= _PACKET_MESSAGE:
        latency = sum(r * span.level.packet_latency for r, span in zip(rounds, route.spans, strict=True))
        share = min(span.level.packet_share / span.level.share for span in route.spans)
        return latency + _exchanged(own, route, share)
    latency = sum(r * span.level.latency for r, span in zip(rounds, route.spans, strict=True))
    slowed = _slowed(nbytes, route.spans[-1].level) / route.size
    return latency + _exchanged(slowed, route, None) + own * route.copied


def _exchanged(own: float, route: _Route, share: float | None) -> float:
    """Return the seconds of the bytes of an all_to_all: all levels are busy at once.

    Args:
        own: Bytes that each rank sends to each other one.
        route: The links.
        share: Share of the rate of rings that is reached; None for that of each level.
    """
    seconds = dict.fromkeys(route.detour, 0.0)
    for span in route.spans:
        rate = span.rate / span.crossing.inside
        if share is None:
            rate *= (span.level.exchange_share or span.level.share) / span.level.share
        else:
            rate *= share
        seconds[span.crossing.level] = span.crossing.others / rate
    return own * max(each + route.detour.get(level, 0.0) for level, each in seconds.items())


_ALGORITHMS: Mapping[str, Mapping[str, Callable[[float, _Route], float]]] = {
    "all_reduce": {
        "ring": _ring(passes=2),
        "tree": _tree,
        "switch": _switch,
        "one-shot": _one_shot,
    },
    "all_gather": {"ring": _ring(passes=1)},
    "reduce_scatter": {"ring": _ring(passes=1)},
    "broadcast": {"chain": _chain, "tree": _unpipelined_tree},
    "reduce": {"chain": _chain, "tree": _unpipelined_tree},
    "all_to_all": {"pairwise": _pairwise},
}
"""By collective and name: function of bytes and route that gives the seconds without `setup`."""

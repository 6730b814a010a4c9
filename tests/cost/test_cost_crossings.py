"""How instances of a group pattern lie on levels of links, held to counting the ranks of every instance."""

from collections import Counter
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.predict.cost.collectives.link_use import Crossing, crossings, joined_by
from shoal.spec.plan import Group


def naive(ranks, sizes):
    """Count how the ranks of one instance use each level: the definitions of Crossing, one by one."""
    block = [{rank: rank // size for rank in ranks} for size in sizes[:-1]]
    block = [{rank: rank for rank in ranks}, *block, dict.fromkeys(ranks, 0)]

    def level_between(one, other):
        return next(each for each in range(len(sizes)) if block[each + 1][one] == block[each + 1][other])

    reached = {
        rank: Counter(level_between(rank, other) for other in ranks if other != rank) for rank in ranks
    }
    outermost = max(ranks, key=lambda rank: [reached[rank][each] for each in reversed(range(len(sizes)))])
    found = []
    for level in range(len(sizes)):
        inner, outer = block[level], block[level + 1]
        using = [rank for rank in ranks if reached[rank][level]]
        if not using:
            continue
        members_inside, members = Counter(inner.values()), Counter(outer.values())
        parts = Counter(outer[first] for first in {inner[rank]: rank for rank in ranks}.values())
        displaced = [
            sum(
                level_between(rank, other) == level and rank % sizes[0] != other % sizes[0]
                for other in ranks
                if other != rank
            )
            for rank in ranks
        ]
        found.append(
            Crossing(
                level=level,
                parts=max(parts.values()),
                inside=min(members_inside[inner[rank]] for rank in using),
                members=min(members[outer[rank]] for rank in using),
                hops=len(set(inner.values())) - len(set(outer.values())),
                others=max(reached[rank][level] for rank in ranks),
                steps=reached[outermost][level],
                displaced=max(displaced) if level else 0,
            )
        )
    return tuple(found)


@st.composite
def patterns(draw):
    """Levels of links, the last one partly filled or not, and a pattern that tiles all ranks."""
    run = draw(st.sampled_from([1, 1, 1, 2, 3, 4, 6]))
    group = Group(run * draw(st.integers(1, 13)), run * draw(st.integers(1, 9)), run)
    assume(group.size > 1)
    span = group.size // group.run * group.stride
    devices = span * draw(st.integers(1, 9))
    assume(devices <= 500)
    node = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 9, 16]))
    pods = draw(st.sampled_from([(), (1,), (2,), (3,), (4,), (2, 2)]))
    sizes = [node]
    for each in pods:
        sizes.append(sizes[-1] * each)
    return group, (*sizes, max(devices, sizes[-1]))


@given(patterns())
def test_every_way_in_which_instances_lie_is_found_as_by_counting_their_ranks(drawn):
    group, sizes = drawn
    span = group.size // group.run * group.stride
    instances = group.tile(sizes[-1] // span * span)
    counted = {naive(ranks, sizes) for ranks in instances}
    assert set(crossings(group, sizes, has_rails=True)) == counted
    placeless = {tuple(replace(each, displaced=0) for each in lain) for lain in counted}
    assert set(crossings(group, sizes)) == placeless


@given(patterns())
def test_the_innermost_level_that_joins_every_instance_is_found(drawn):
    group, sizes = drawn
    span = group.size // group.run * group.stride
    instances = group.tile(sizes[-1] // span * span)
    joins = [
        all(len({rank // size for rank in ranks}) == 1 for ranks in instances) or size == sizes[-1]
        for size in sizes
    ]
    assert joined_by(group, sizes) == joins.index(True)


def test_six_ranks_on_nodes_of_eight_lie_within_one_node_or_as_two_and_four():
    lain = crossings(Group(6), (8, 48))
    assert [[each.level for each in one] for one in lain] == [[0, 1], [0]]
    assert lain[0][1].inside == 2
    assert lain[0][1].others == 4

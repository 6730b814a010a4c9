import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.spec.plan import AXES, Mesh, Plan

sizes = st.tuples(*[st.integers(1, 3)] * len(AXES))


@given(sizes, st.permutations(AXES), st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_are_the_rows_of_the_array_of_ranks(sizes, order, axes):
    mesh = Mesh(sizes, tuple(order))
    ordered = [axis for axis in order if axis in axes]
    ranks = np.arange(mesh.ranks).reshape([sizes[AXES.index(axis)] for axis in order])
    last = np.moveaxis(ranks, [order.index(axis) for axis in ordered], range(-len(ordered), 0))
    rows = last.reshape(-1, int(np.prod([sizes[AXES.index(axis)] for axis in ordered])))
    assert sorted(mesh.groups(*axes)) == sorted(map(tuple, rows.tolist()))
    for rank in range(mesh.ranks):
        assert mesh.group(rank, *axes)[mesh.coordinate(rank, *axes)] == rank


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dp=4", (1, 4, 1, 1, 1)),
        ("dp=4,shard=zero1", (1, 1, 4, 1, 1)),
        ("dp=4,shard=zero3,replicate=2,tp=2,pp=3", (3, 2, 2, 1, 2)),
    ],
)
def test_a_plan_lays_data_parallel_over_replicas_and_shards(text, sizes):
    assert Mesh.of(Plan.parse(text)).sizes == sizes


def test_ranks_along_dp_are_those_of_all_replicas_and_all_shards():
    mesh = Mesh.of(Plan.parse("dp=4,shard=zero3,replicate=2,tp=2"))
    assert mesh.groups("dp") == mesh.groups("replicate", "shard") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert [mesh.coordinate(rank, "dp") for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_neighbours_along_tp_are_neighbours_in_the_node():
    assert Mesh.of(Plan.parse("dp=2,tp=2")).groups("tp") == [(0, 1), (2, 3)]


def test_an_order_puts_stages_next_to_each_other_and_data_parallel_across_nodes():
    mesh = Mesh.of(Plan.parse("dp=2,pp=2,tp=2,order=dp-pp-cp-tp"))
    assert mesh.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]

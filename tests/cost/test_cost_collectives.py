"""Steps and bytes of the algorithms, against the algorithms played out."""

import math
from fractions import Fraction

import pytest
from naive_collectives import Medium, chain, play

from shoal.errors import ConfigError
from shoal.predict.cost import ALGORITHMS, COLLECTIVES, LEVELS, AlphaBeta, algorithms_of, find_algorithm

PIPELINED = {"chain", "double-tree"}
PLAYED = sorted(key for key in ALGORITHMS if key[1] not in PIPELINED | {"hierarchical", "in-network"})
RANKS = [*range(1, 10), 16, 23]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("key", PLAYED, ids="-".join)
def test_steps_and_bytes_are_those_of_the_algorithm_played_out(key, ranks):
    algorithm, medium = ALGORITHMS[key], Medium(ranks)
    play(*key, medium)
    assert algorithm.steps(ranks) == medium.steps
    assert algorithm.bytes_on_path(ranks, 1) == pytest.approx(float(medium.path))
    assert algorithm.bytes_sent(ranks, 1) == pytest.approx(float(max(medium.sent)))


@pytest.mark.parametrize("hosts", [2, 3, 5])
@pytest.mark.parametrize("per_host", [2, 3, 8])
@pytest.mark.parametrize("key", [key for key in PLAYED if key[2] == "network"], ids="-".join)
def test_ranks_of_a_host_share_its_interface(key, per_host, hosts):
    algorithm, ranks = ALGORITHMS[key], per_host * hosts
    medium = Medium(ranks, per_host)
    play(*key, medium)
    path, shared = algorithm.bytes_on_path(ranks, 1, per_host), float(medium.path)
    if algorithm.name in ("recursive", "halving-doubling"):
        # Rounds over less than a host's length cross its border too, which the formula leaves out.
        assert path <= shared * (1 + 1e-9)
        assert path >= 0.7 * shared
    elif algorithm.crowds or algorithm.name == "ring":
        assert path == pytest.approx(shared)
    else:  # what stays within a host is counted as well
        assert path >= shared * (1 - 1e-9)


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_a_chain_comes_near_its_formula_with_many_chunks(collective, ranks):
    algorithm, chunks, medium = ALGORITHMS[collective, "chain", "network"], 1000, Medium(ranks)
    chain(medium, ranks, chunks)
    filling = ranks - 2  # steps before all links are busy
    assert algorithm.steps(ranks) == medium.steps - (chunks - 1)
    assert algorithm.bytes_on_path(ranks, 1) == medium.path - Fraction(filling, chunks)
    assert algorithm.bytes_sent(ranks, 1) == max(medium.sent)


def in_order_tree(first, last):
    """(children by position, depth) of a tree in which multiples of the highest power of two are on top."""
    if first > last:
        return {}, -1
    root = max(range(first, last + 1), key=lambda position: position & -position)
    (left, left_depth), (right, right_depth) = in_order_tree(first, root - 1), in_order_tree(root + 1, last)
    tops = [max(side, key=lambda position: position & -position) for side in (left, right) if side]
    return {**left, **right, root: tops}, 1 + max(left_depth, right_depth)


@pytest.mark.parametrize("ranks", range(2, 40))
def test_a_double_tree_is_as_deep_and_sends_as_much_as_its_formula_says(ranks):
    algorithm = ALGORITHMS["all_reduce", "double-tree", "network"]
    children, depth = in_order_tree(1, ranks)
    root = set(children) - {child for each in children.values() for child in each}
    sent = [0.0] * ranks
    for shift in (0, 1):  # the second tree is the first, one position on
        for position, below in children.items():
            sent[(position - 1 - shift) % ranks] += (len(below) + (position not in root)) / 2
    assert algorithm.steps(ranks) == 2 * depth
    assert max(sent) <= algorithm.bytes_sent(ranks, 1) == algorithm.bytes_on_path(ranks, 1)
    assert max(sent) == 2 or ranks < 4


def test_hierarchical_is_a_reduce_scatter_inside_an_all_reduce_across_and_an_all_gather_inside():
    alpha, beta, hosts, per_host, nbytes = 2e-5, 1e-9, 3, 4, 1_000_000
    algorithm = find_algorithm("all_reduce", "hierarchical", "network")
    across = algorithm.time(AlphaBeta(alpha, beta), hosts * per_host, nbytes, per_host)
    # Each of the ranks of a host has its share of the interface, and carries its share of the bytes.
    share = 2 * (hosts - 1) / hosts * (nbytes / per_host) * (beta * per_host)
    assert across == pytest.approx(2 * (hosts - 1) * alpha + share)
    assert algorithm.inside == (("reduce_scatter", "direct"), ("all_gather", "direct"))
    sent = 2 * (hosts - 1) / hosts * nbytes / per_host
    assert algorithm.bytes_sent(hosts * per_host, nbytes, per_host) == pytest.approx(sent)


@pytest.mark.parametrize("hosts", [2, 3, 8, 500])
def test_in_network_takes_each_byte_over_a_hosts_link_once_each_way(hosts):
    alpha, beta, per_host, nbytes = 2e-5, 1e-9, 4, 1_000_000
    algorithm, ranks = find_algorithm("all_reduce", "in-network", "network"), hosts * per_host
    # A message up and a message down wait for each other; up and down are busy at once.
    assert algorithm.time(AlphaBeta(alpha, beta), ranks, nbytes, per_host) == 2 * alpha + nbytes * beta
    assert algorithm.bytes_sent(ranks, nbytes, per_host) == nbytes / per_host
    assert algorithm.inside == (("reduce_scatter", "direct"), ("all_gather", "direct"))
    ring = find_algorithm("all_reduce", "hierarchical", "network").bytes_on_path(ranks, nbytes, per_host)
    assert ring / algorithm.bytes_on_path(ranks, nbytes, per_host) == pytest.approx(2 * (hosts - 1) / hosts)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_a_hierarchical_half_is_one_inside_and_a_ring_across(collective):
    algorithm = find_algorithm(collective, "hierarchical", "network")
    ring_across = find_algorithm(collective, "ring", "network")
    hosts, per_host, nbytes = 3, 4, 1_200_000
    assert algorithm.inside == ((collective, "direct"),)
    assert algorithm.steps(hosts * per_host, per_host) == ring_across.steps(hosts)
    # A ring has the parts of one rank of every host; the rings of a host share its interface.
    assert algorithm.bytes_on_path(hosts * per_host, nbytes, per_host) == pytest.approx(
        per_host * ring_across.bytes_on_path(hosts, nbytes / per_host)
    )
    assert algorithm.bytes_sent(hosts * per_host, nbytes, per_host) == pytest.approx(
        ring_across.bytes_sent(hosts, nbytes / per_host)
    )


@pytest.mark.parametrize("ranks", [2, 4, 6, 64])
def test_times_are_the_published_formulas(ranks):
    n, a, b, size = ranks, 3e-6, 2e-10, 5_000_000.0
    log2, ring_bytes = math.ceil(math.log2(n)), 2 * (n - 1) / n * size * b
    published = {
        ("all_reduce", "ring", "network"): 2 * (n - 1) * a + ring_bytes,
        ("all_reduce", "halving-doubling", "network"): 2 * log2 * a + ring_bytes,
        ("all_reduce", "double-tree", "network"): 2 * math.floor(math.log2(n)) * a + 2 * size * b,
        ("all_reduce", "one-shot", "shared-memory"): a + (n - 1) * size * b,
        ("all_gather", "ring", "network"): (n - 1) * a + ring_bytes / 2,
        ("reduce_scatter", "recursive", "network"): log2 * a + ring_bytes / 2,
        ("broadcast", "chain", "network"): size * b + (n - 1) * a,
        ("reduce", "tree", "network"): log2 * (a + size * b),
        ("all_to_all", "pairwise", "network"): (n - 1) * a + ring_bytes / 2,
    }
    for key, seconds in published.items():
        assert ALGORITHMS[key].time(AlphaBeta(a, b), n, size) == pytest.approx(seconds), key


@pytest.mark.parametrize("key", sorted(ALGORITHMS), ids="-".join)
def test_a_rank_alone_costs_nothing(key):
    assert ALGORITHMS[key].time(AlphaBeta(1.0, 1.0), 1, 1000) == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_has_an_algorithm_on_every_level(collective, level):
    assert algorithms_of(collective, level)


def test_an_unknown_name_is_an_error_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'all_reduce'"):
        find_algorithm("allreduce", "ring", "network")
    with pytest.raises(ConfigError, match="did you mean 'two-shot'"):
        find_algorithm("all_reduce", "two_shot", "network")
    with pytest.raises(ConfigError, match="did you mean 'network'"):
        find_algorithm("all_reduce", "ring", "networks")
    with pytest.raises(ConfigError, match="'ring' is not a shared-memory algorithm of all_reduce"):
        find_algorithm("all_reduce", "ring", "shared-memory")

"""A collective step by step on any number of ranks, by the name of its algorithm, for pictures that move."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.cost.collectives.algorithms import require_name
from shoal.cost.collectives.played import (
    Message,
    Played,
    Step,
    chain,
    halving_doubling,
    hierarchical,
    hierarchical_all_gather,
    in_network,
    in_order_parents,
    pairwise,
    ring,
    tree,
)

_CHUNKS = 4  # of a chain; its cost is the limit for many

MOVED: Mapping[str, tuple[str, ...]] = {
    "all_reduce": (
        *("ring", "tree", "double-tree", "halving-doubling", "two-shot", "hierarchical", "in-network"),
    ),
    "all_gather": ("ring", "direct", "recursive", "hierarchical"),
    "broadcast": ("tree", "chain"),
    "all_to_all": ("pairwise",),
}
"""The collectives and algorithms over the network that `motion` plays."""


def motion(collective: str, name: str, hosts: int, ranks_per_host: int = 1) -> Played:
    """Return what each rank holds and sends, step by step.

    The all-reduce "tree" is a reduce and a broadcast along one tree. "double-tree" sends each half of the
    buffer along a tree of its own, in one piece; a real one sends many small pieces.

    Args:
        collective: One of `MOVED`.
        name: One of its algorithms.
        hosts: Number of hosts.
        ranks_per_host: Ranks of each host.

    Raises:
        ConfigError: There is no such collective or algorithm.
    """
    require_name("a collective that is played", collective, tuple(MOVED))
    require_name(f"an algorithm of {collective} that is played", name, MOVED[collective])
    ranks = hosts * ranks_per_host
    title = f"{collective.replace('_', '-')}, {name}, {ranks} ranks"
    if name == "in-network":
        everyone: list[list[set[int]]] = [[{host}] for host in range(hosts)]
        return Played(
            name=name, title=title, ranks=hosts + 1, slices=1, whole=hosts,
            start=[*everyone, [set()]], steps=in_network(hosts), has_aggregator=True,
        )  # fmt: skip
    slices, every = _STEPS[collective, name](hosts, ranks_per_host)
    steps = [step for step in every if step.messages]  # hosts of one rank do nothing inside
    if collective == "all_reduce":
        start = [[{rank} for _ in range(slices)] for rank in range(ranks)]
    elif collective == "broadcast":
        start = [[{0} if rank == 0 else set() for _ in range(slices)] for rank in range(ranks)]
    else:
        start = [[{rank} if rank == index else set() for index in range(slices)] for rank in range(ranks)]
    return Played(
        name=name, title=title, ranks=ranks, slices=slices, whole=ranks if collective == "all_reduce" else 1,
        start=start, steps=steps, ranks_per_host=ranks_per_host if ranks_per_host > 1 else 0,
    )  # fmt: skip


def double_tree(ranks: int) -> list[Step]:
    """Return the steps of two binary trees: sums go up both at once, one level a step, and come down."""
    parents = in_order_parents(ranks)
    depths = {0: -1}
    for position in sorted(parents, key=lambda each: -(each & -each)):  # the root first
        depths[position] = depths[parents[position]] + 1
    up = [
        [
            Message((position - 1 - half) % ranks, (parents[position] - 1 - half) % ranks, (half,))
            for half in (0, 1)
            for position in parents
            if depths[position] == depth
        ]
        for depth in range(max(depths.values()), 0, -1)
    ]
    down = [[Message(receiver, sender, slices) for sender, receiver, slices in level] for level in up]
    return [*(Step("up: sum", level) for level in up), *(Step("down", level) for level in reversed(down))]


def _reduced_along_a_tree(ranks: int) -> list[Step]:
    down = tree(ranks)
    up = [
        Step("up: sum", [Message(receiver, sender, slices) for sender, receiver, slices in step.messages])
        for step in reversed(down)
    ]
    return [*up, *down]


def _two_shot(ranks: int) -> list[Step]:
    """Return the steps over the network: slice i of each rank goes to rank i, then its sum to all."""
    fold = [
        Step("fold", [Message(r, (r + s) % ranks, ((r + s) % ranks,)) for r in range(ranks)])
        for s in range(1, ranks)
    ]
    share = [
        Step("share", [Message(r, (r + s) % ranks, (r,)) for r in range(ranks)]) for s in range(1, ranks)
    ]
    return [*fold, *share]


def _second_half(steps: list[Step]) -> list[Step]:
    return steps[len(steps) // 2 :]


_STEPS: Mapping[tuple[str, str], Callable[[int, int], tuple[int, list[Step]]]] = {
    ("all_reduce", "ring"): lambda k, g: (k * g, ring(k * g)),
    ("all_reduce", "tree"): lambda k, g: (1, _reduced_along_a_tree(k * g)),
    ("all_reduce", "double-tree"): lambda k, g: (2, double_tree(k * g)),
    ("all_reduce", "halving-doubling"): lambda k, g: (k * g, halving_doubling(k * g)),
    ("all_reduce", "two-shot"): lambda k, g: (k * g, _two_shot(k * g)),
    ("all_reduce", "hierarchical"): lambda k, g: (k * g, hierarchical(k, g)),
    ("all_gather", "ring"): lambda k, g: (k * g, ring(k * g)[: k * g - 1]),
    ("all_gather", "direct"): lambda k, g: (k * g, pairwise(k * g)),
    ("all_gather", "recursive"): lambda k, g: (k * g, _second_half(halving_doubling(k * g))),
    ("all_gather", "hierarchical"): lambda k, g: (k * g, hierarchical_all_gather(k, g)),
    ("broadcast", "tree"): lambda k, g: (1, tree(k * g)),
    ("broadcast", "chain"): lambda k, g: (_CHUNKS, chain(k * g, _CHUNKS)),
    ("all_to_all", "pairwise"): lambda k, g: (k * g, pairwise(k * g)),
}
"""By collective and algorithm: function of hosts and ranks per host that gives slices and steps."""

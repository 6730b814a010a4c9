"""The algorithms of collectives, played with a few ranks: docs/pictures.py and shoal.web draw these.

An algorithm is a list of steps, and a step is a list of messages between ranks, as csrc/algorithms has them.
A test holds their steps and bytes to `shoal.predict.cost.collectives.algorithms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.predict.cost.collectives.algorithms import require_name


class Message(NamedTuple):
    """Slices of a buffer, on their way; the receiver folds them with its own, or takes them as they are."""

    sender: int
    receiver: int
    slices: tuple[int, ...]


class Step(NamedTuple):
    """Messages that travel at the same time."""

    label: str
    messages: list[Message]


@dataclass(frozen=True, kw_only=True)
class Played:
    """An algorithm, played with a few ranks.

    Attributes:
        name: Name of the algorithm.
        title: Description for readers who cannot see the picture.
        ranks: Number of ranks.
        slices: Number of slices of the buffer.
        whole: Number of ranks whose data a slice holds in the end.
        start: By rank and slice, the ranks whose data it holds at first.
        steps: The steps, in order.
        ranks_per_host: Ranks of a host, if there are several hosts; else 0.
        has_aggregator: Whether the last of the ranks is an aggregator.
    """

    name: str
    title: str
    ranks: int
    slices: int
    whole: int
    start: list[list[set[int]]]
    steps: list[Step]
    ranks_per_host: int = 0
    has_aggregator: bool = False

    def states(self) -> list[list[list[set[int]]]]:
        """Return, by row, rank and slice, the ranks whose data it holds: at first, and after each step."""
        states = [self.start]
        for step in self.steps:
            before = states[-1]
            after = [[set(held) for held in slices] for slices in before]
            for sender, receiver, slices in step.messages:
                for index in slices:
                    after[receiver][index] |= before[sender][index]
            states.append(after)
        return states


def one_shot(ranks: int) -> list[Step]:
    """Return the steps of one-shot: every rank reads every buffer."""
    return [Step("fold", _everyone(ranks, lambda sender, receiver: (0,)))]


def two_shot(ranks: int) -> list[Step]:
    """Return the steps of two-shot: slice i of all goes to rank i, and its sum to all."""
    return [
        Step("fold", _everyone(ranks, lambda sender, receiver: (receiver,))),
        Step("share", _everyone(ranks, lambda sender, receiver: (sender,))),
    ]


def ring(ranks: int) -> list[Step]:
    """Return the steps of a ring: in step s, rank r passes on slice r - s."""
    return [
        Step(
            "fold" if step < ranks - 1 else "pass on",
            [Message(rank, (rank + 1) % ranks, ((rank - step) % ranks,)) for rank in range(ranks)],
        )
        for step in range(2 * (ranks - 1))
    ]


def halving_doubling(ranks: int) -> list[Step]:
    """Return the steps of halving-doubling.

    A rank answers for `held` slices, its own first. It sends all but `kept` of them; then the sums come back.
    """
    rounds = []
    held = ranks
    while held > 1:
        rounds.append((held, (held + 1) // 2))
        held = (held + 1) // 2

    def run(rank: int, first: int, last: int) -> tuple[int, ...]:
        return tuple((rank + entry) % ranks for entry in range(first, last))

    halving = [
        Step("halve", [Message(r, (r + kept) % ranks, run(r, kept, held)) for r in range(ranks)])
        for held, kept in rounds
    ]
    doubling = [
        Step("double", [Message(r, (r - kept) % ranks, run(r, 0, held - kept)) for r in range(ranks)])
        for held, kept in reversed(rounds)
    ]
    return halving + doubling


def hierarchical(hosts: int, ranks_per_host: int) -> list[Step]:
    """Return the steps of hierarchical: fold inside hosts, a ring of the hosts, share inside hosts."""
    ranks = hosts * ranks_per_host

    def part(rank: int) -> tuple[int, ...]:
        first = rank % ranks_per_host * hosts
        return tuple(range(first, first + hosts))

    def inside(slices_of: int) -> list[Message]:
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        return [
            Message(*pair, part(pair[slices_of]))
            for pair in pairs
            if pair[0] // ranks_per_host == pair[1] // ranks_per_host
        ]

    def across(messages: Iterable[Message]) -> list[Message]:
        return [
            Message(
                sender * ranks_per_host + index,
                receiver * ranks_per_host + index,
                tuple(index * hosts + each for each in slices),
            )
            for sender, receiver, slices in messages
            for index in range(ranks_per_host)
        ]

    return [
        Step("inside: fold", inside(1)),
        *(Step(f"across: {label}", across(messages)) for label, messages in ring(hosts)),
        Step("inside: share", inside(0)),
    ]


def hierarchical_all_gather(hosts: int, ranks_per_host: int) -> list[Step]:
    """Return the steps of a hierarchical all-gather: rings of the hosts, then sharing inside hosts."""
    ranks = hosts * ranks_per_host

    def at(host: int, number: int) -> int:
        return host % hosts * ranks_per_host + number

    def same_number(rank: int) -> tuple[int, ...]:
        return tuple(at(host, rank % ranks_per_host) for host in range(hosts))

    across = [
        Step(
            "across: pass on",
            [
                Message(at(host, number), at(host + 1, number), (at(host - step, number),))
                for host in range(hosts)
                for number in range(ranks_per_host)
            ],
        )
        for step in range(hosts - 1)
    ]
    inside = [
        Message(sender, receiver, same_number(sender))
        for sender in range(ranks)
        for receiver in range(ranks)
        if sender != receiver and sender // ranks_per_host == receiver // ranks_per_host
    ]
    return [*across, Step("inside: share", inside)]


def in_network(hosts: int) -> list[Step]:
    """Return the steps with an aggregator, numbered after the hosts: buffers go up, the sum down."""
    return [
        Step("up: sum", [Message(host, hosts, (0,)) for host in range(hosts)]),
        Step("down", [Message(hosts, host, (0,)) for host in range(hosts)]),
    ]


def tree(ranks: int) -> list[Step]:
    """Return the steps of a binomial tree: who has the buffer sends it half as far as in the step before."""
    distance = 1 << (ranks - 1).bit_length()
    steps = []
    while distance > 1:
        distance //= 2
        senders = range(0, ranks - distance, 2 * distance)
        steps.append(Step("send", [Message(rank, rank + distance, (0,)) for rank in senders]))
    return steps


def chain(ranks: int, chunks: int) -> list[Step]:
    """Return the steps of a chain: in step s, rank r passes on chunk s - r."""
    return [
        Step(
            "pass on",
            [Message(r, r + 1, (step - r,)) for r in range(ranks - 1) if 0 <= step - r < chunks],
        )
        for step in range(ranks - 2 + chunks)
    ]


def pairwise(ranks: int) -> list[Step]:
    """Return the steps of pairwise: in step s, rank r sends to rank r + s."""
    return [
        Step(f"to rank + {shift}", [Message(rank, (rank + shift) % ranks, (rank,)) for rank in range(ranks)])
        for shift in range(1, ranks)
    ]


def in_order_parents(ranks: int) -> dict[int, int]:
    """Return the parent of each position from 1 to `ranks` in a binary tree; the root has parent 0."""
    parents: dict[int, int] = {}

    def plant(first: int, last: int, parent: int) -> None:
        if first <= last:
            root = max(range(first, last + 1), key=lambda position: position & -position)
            parents[root] = parent
            plant(first, root - 1, root)
            plant(root + 1, last, root)

    plant(1, ranks, 0)
    return parents


def _everyone(ranks: int, slices_of: Callable[[int, int], tuple[int, ...]]) -> list[Message]:
    pairs = [(sender, receiver) for sender in range(ranks) for receiver in range(ranks) if sender != receiver]
    return [Message(*pair, slices_of(*pair)) for pair in pairs]


def _reduced(name: str, title: str, ranks: int, slices: int, steps: list[Step], per_host: int = 0) -> Played:
    start = [[{rank} for _ in range(slices)] for rank in range(ranks)]
    return Played(
        name=name, title=title, ranks=ranks, slices=slices, whole=ranks, start=start, steps=steps,
        ranks_per_host=per_host,
    )  # fmt: skip


def _moved(
    name: str,
    title: str,
    ranks: int,
    slices: int,
    steps: list[Step],
    owner: Sequence[int],
    per_host: int = 0,
) -> Played:
    start = [[{rank} & {owner[index]} for index in range(slices)] for rank in range(ranks)]
    return Played(
        name=name, title=title, ranks=ranks, slices=slices, whole=1, start=start, steps=steps,
        ranks_per_host=per_host,
    )  # fmt: skip


PLAYED = (
    _reduced("one-shot", "One-shot all-reduce, four ranks", 4, 1, one_shot(4)),
    _reduced("two-shot", "Two-shot all-reduce, three ranks", 3, 3, two_shot(3)),
    _reduced("ring", "Ring all-reduce, four ranks", 4, 4, ring(4)),
    _reduced("halving-doubling", "Halving-doubling all-reduce, five ranks", 5, 5, halving_doubling(5)),
    _reduced(
        "hierarchical",
        "Hierarchical all-reduce, two hosts of two ranks",
        4,
        4,
        hierarchical(2, 2),
        per_host=2,
    ),
    _moved(
        "hierarchical-all-gather",
        "Hierarchical all-gather, two hosts of two ranks",
        4,
        4,
        hierarchical_all_gather(2, 2),
        owner=range(4),
        per_host=2,
    ),
    Played(
        name="in-network",
        title="In-network all-reduce, three hosts and an aggregator",
        ranks=4,
        slices=1,
        whole=3,
        start=[[{0}], [{1}], [{2}], [set()]],
        steps=in_network(3),
        has_aggregator=True,
    ),
    _moved("tree", "Broadcast along a binomial tree, eight ranks", 8, 1, tree(8), owner=[0]),
    _moved("chain", "Broadcast along a chain, four ranks, three chunks", 4, 3, chain(4, 3), owner=[0] * 3),
    _moved("pairwise", "Pairwise all-to-all, four ranks", 4, 4, pairwise(4), owner=range(4)),
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

"""Every algorithm of shoal.predict.cost, played with slices of a buffer, to count its steps and bytes.

A slice is the set of ranks whose data is in it. What moves is checked: a step over the network lets each rank
send to one rank and receive from one, and at the end every rank has to have what the collective promises. The
whole buffer, S, is 1.
"""

from fractions import Fraction


class Medium:
    """Counts what n ranks, `per_host` of them on each host, move in steps."""

    def __init__(self, ranks, per_host=1):
        self.ranks = ranks
        self.per_host = per_host
        self.steps = 0
        self.path = Fraction(0)  # the largest transfer of each step, summed
        self.sent = [Fraction(0)] * ranks  # by each rank; in shared memory, what it read

    def exchange(self, messages):
        """One step over the network: (sender, receiver, size) of each message."""
        for end in (0, 1):
            ranks = [message[end] for message in messages]
            assert len(set(ranks)) == len(ranks), "a rank has one port each way"
        leaving = [Fraction(0)] * self.ranks
        for sender, receiver, size in messages:
            self.sent[sender] += size
            if sender // self.per_host != receiver // self.per_host:
                leaving[sender // self.per_host] += size
        self.steps += 1
        self.path += max(leaving)

    def read(self, sizes):
        """One synchronisation in shared memory, after which each rank reads that much of others."""
        self.steps += 1
        self.path += max(sizes)
        self.sent = [before + size for before, size in zip(self.sent, sizes, strict=True)]


def own_slices(n):
    """Per rank, n slices of its own data."""
    return [[{rank} for _ in range(n)] for rank in range(n)]


def in_turn(n):
    """For each step, everyone's partner: the next rank, the one after, ..."""
    return [[(rank, (rank + step) % n) for rank in range(n)] for step in range(1, n)]


def halving_rounds(n):
    """(slices held before, slices kept) of each round of a halving."""
    rounds = []
    while n > 1:
        rounds.append((n, (n + 1) // 2))
        n = (n + 1) // 2
    return rounds


def full(n):
    return set(range(n))


# Reduce-scatter: rank i ends with slice i of everyone.


def ring_reduce_scatter(medium, n):
    slices = own_slices(n)
    for step in range(1, n):
        moves = [(rank, (rank + 1) % n, (rank - step) % n) for rank in range(n)]
        carried = [(to, which, set(slices[rank][which])) for rank, to, which in moves]
        medium.exchange([(rank, to, Fraction(1, n)) for rank, to, _ in moves])
        for to, which, data in carried:
            slices[to][which] |= data
    assert all(slices[rank][rank] == full(n) for rank in range(n))


def direct_reduce_scatter(medium, n):
    folded = [{rank} for rank in range(n)]
    for pairs in in_turn(n):
        medium.exchange([(rank, to, Fraction(1, n)) for rank, to in pairs])
        for rank, to in pairs:
            folded[to].add(rank)
    assert all(each == full(n) for each in folded)


def recursive_reduce_scatter(medium, n):
    slices = own_slices(n)
    for held, kept in halving_rounds(n):
        carried = []
        for rank in range(n):
            entries = [(rank + entry) % n for entry in range(kept, held)]
            carried.append(((rank + kept) % n, {which: set(slices[rank][which]) for which in entries}))
        medium.exchange([(rank, to, Fraction(held - kept, n)) for rank, (to, _) in enumerate(carried)])
        for to, parts in carried:
            for which, data in parts.items():
                slices[to][which] |= data
    assert all(slices[rank][rank] == full(n) for rank in range(n))


# All-gather: rank i starts with slice i, everyone ends with all.


def ring_all_gather(medium, n):
    have = [{rank} for rank in range(n)]
    for step in range(n - 1):
        moves = [(rank, (rank + 1) % n, (rank - step) % n) for rank in range(n)]
        assert all(which in have[rank] for rank, _, which in moves)
        medium.exchange([(rank, to, Fraction(1, n)) for rank, to, _ in moves])
        for _, to, which in moves:
            have[to].add(which)
    assert all(each == full(n) for each in have)


def direct_all_gather(medium, n):
    have = [{rank} for rank in range(n)]
    for pairs in in_turn(n):
        medium.exchange([(rank, to, Fraction(1, n)) for rank, to in pairs])
        for rank, to in pairs:
            have[to].add(rank)
    assert all(each == full(n) for each in have)


def recursive_all_gather(medium, n):
    have = [{rank} for rank in range(n)]
    for held, kept in reversed(halving_rounds(n)):
        moves = []
        for rank in range(n):
            entries = {(rank + entry) % n for entry in range(held - kept)}
            assert entries <= have[rank]
            moves.append(((rank - kept) % n, entries))
        medium.exchange([(rank, to, Fraction(len(each), n)) for rank, (to, each) in enumerate(moves)])
        for to, entries in moves:
            have[to] |= entries
    assert all(each == full(n) for each in have)


# From and to one rank, 0.


def binomial_rounds(n):
    """(parent, child) pairs of a broadcast, to the farthest first."""
    distance = 1 << (n - 1).bit_length()
    while distance > 1:
        distance //= 2
        yield [(rank, rank + distance) for rank in range(0, n - distance, 2 * distance)]


def tree_broadcast(medium, n):
    have = {0}
    for pairs in binomial_rounds(n):
        assert have.issuperset(parent for parent, _ in pairs)
        medium.exchange([(parent, child, 1) for parent, child in pairs])
        have |= {child for _, child in pairs}
    assert have == full(n)


def tree_reduce(medium, n):
    folded = [{rank} for rank in range(n)]
    for pairs in reversed(list(binomial_rounds(n))):
        medium.exchange([(child, parent, 1) for parent, child in pairs])
        for parent, child in pairs:
            folded[parent] |= folded[child]
    assert folded[0] == full(n)


def chain(medium, n, chunks):
    """Both ways alike: in step t, rank r passes on chunk t - r."""
    for step in range(chunks + n - 2):
        moving = [rank for rank in range(n - 1) if 0 <= step - rank < chunks]
        medium.exchange([(rank, rank + 1, Fraction(1, chunks)) for rank in moving])


def gather(medium, n):
    for rank in range(1, n):
        medium.exchange([(rank, 0, Fraction(1, n))])


def scatter(medium, n):
    for rank in range(1, n):
        medium.exchange([(0, rank, Fraction(1, n))])


# Shared memory: what each rank reads of others, by rank.


def everyone(n, size):
    return [Fraction(size)] * n


def root_alone(n, size):
    return [Fraction(size), *[Fraction(0)] * (n - 1)]


def all_but_root(n, size):
    return [Fraction(0), *[Fraction(size)] * (n - 1)]


def play(collective, name, level, medium):
    """Plays an algorithm; chain and double-tree, which are pipelined, are played by their own tests."""
    n = medium.ranks
    if n == 1:
        return
    part, rest = Fraction(1, n), Fraction(n - 1, n)
    if level == "network":
        for play_one in NETWORK[collective, name]:
            play_one(medium, n)
        return
    reads = {
        ("all_reduce", "one-shot"): [everyone(n, n - 1)],
        ("all_reduce", "two-shot"): [everyone(n, rest), everyone(n, rest)],
        ("all_gather", "one-shot"): [everyone(n, rest)],
        ("all_gather", "direct"): [everyone(n, rest)],
        ("reduce_scatter", "one-shot"): [everyone(n, rest)],
        ("reduce_scatter", "direct"): [everyone(n, rest)],
        ("broadcast", "one-shot"): [all_but_root(n, 1)],
        ("broadcast", "direct"): [all_but_root(n, 1)],
        ("reduce", "one-shot"): [root_alone(n, n - 1)],
        ("reduce", "direct"): [everyone(n, rest), root_alone(n, rest)],
        ("all_to_all", "direct"): [everyone(n, rest)],
        ("gather", "one-shot"): [root_alone(n, rest)],
        ("gather", "direct"): [root_alone(n, rest)],
        ("scatter", "one-shot"): [all_but_root(n, part)],
        ("scatter", "direct"): [all_but_root(n, part)],
    }
    for sizes in reads[collective, name]:
        medium.read(sizes)


NETWORK = {
    ("all_reduce", "two-shot"): [direct_reduce_scatter, direct_all_gather],
    ("all_reduce", "ring"): [ring_reduce_scatter, ring_all_gather],
    ("all_reduce", "halving-doubling"): [recursive_reduce_scatter, recursive_all_gather],
    ("all_gather", "direct"): [direct_all_gather],
    ("all_gather", "ring"): [ring_all_gather],
    ("all_gather", "recursive"): [recursive_all_gather],
    ("reduce_scatter", "direct"): [direct_reduce_scatter],
    ("reduce_scatter", "ring"): [ring_reduce_scatter],
    ("reduce_scatter", "recursive"): [recursive_reduce_scatter],
    ("broadcast", "tree"): [tree_broadcast],
    ("reduce", "tree"): [tree_reduce],
    ("all_to_all", "pairwise"): [direct_all_gather],  # another slice to each: the same messages
    ("gather", "direct"): [gather],
    ("scatter", "direct"): [scatter],
}

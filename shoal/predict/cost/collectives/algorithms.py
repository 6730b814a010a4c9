"""Collectives and their algorithms by name, with the steps and bytes of each: the one list of them.

There are n ranks, g on each host, and k = n / g hosts. S is the bytes of the whole buffer: the tensor for
all-reduce, broadcast and reduce; the output for all-gather and gather; for the others the input of one rank
(for scatter, of the root).

Bytes on the path are the sum over steps of each step's largest transfer. With alpha seconds per step and
beta seconds per byte,

    time = alpha * steps + beta * bytes on the path

In shared memory, ranks read one another's buffers. With one-shot, each rank first copies its buffer into a
shared slot, and the others read the slot; with direct (all-reduce: two-shot) they read the buffer itself. A
step is a synchronisation, however many ranks take part.

| collective     | algorithm        | steps                 | bytes on the path / S                 |
|----------------|------------------|-----------------------|---------------------------------------|
| all_reduce     | one-shot         | 1                     | n-1                                   |
|                | two-shot         | 2                     | 2(n-1)/n                              |
| all_gather     | one-shot, direct | 1                     | (n-1)/n                               |
| reduce_scatter | one-shot, direct | 1                     | (n-1)/n                               |
| broadcast      | one-shot, direct | 1                     | 1                                     |
| reduce         | one-shot         | 1                     | n-1: the root folds                   |
|                | direct           | 2                     | 2(n-1)/n: each folds a slice          |
| all_to_all     | direct           | 1                     | (n-1)/n                               |
| gather         | one-shot, direct | 1                     | (n-1)/n                               |
| scatter        | one-shot, direct | 1                     | 1/n                                   |

Over the network a step is a message that waits for the one before it; in a step a rank sends to one rank and
receives from one. The counts of pipelined algorithms (double-tree, chain) are the limit for small chunks.

| collective     | algorithm        | steps                 | bytes on the path / S                 |
|----------------|------------------|-----------------------|---------------------------------------|
| all_reduce     | two-shot         | 2(n-1)                | 2(n-1)/n *                            |
|                | ring             | 2(n-1)                | 2(n-1)/n                              |
|                | halving-doubling | 2 ceil(log2 n)        | 2(n-1)/n *                            |
|                | double-tree      | 2 floor(log2 n)       | 2                                     |
|                | hierarchical     | 2(k-1)                | 2(k-1)/k, and S/g each inside hosts   |
|                | in-network       | 2                     | 1, and S/g each inside hosts          |
| all_gather     | direct           | n-1                   | (n-1)/n *                             |
|                | ring             | n-1                   | (n-1)/n                               |
|                | recursive        | ceil(log2 n)          | (n-1)/n *                             |
|                | hierarchical     | k-1                   | (k-1)/k, and (g-1)/g S inside hosts   |
| reduce_scatter | as all_gather    |                       |                                       |
| broadcast      | tree             | ceil(log2 n)          | ceil(log2 n)                          |
|                | chain            | n-1                   | 1                                     |
| reduce         | as broadcast     |                       |                                       |
| all_to_all     | pairwise         | n-1                   | (n-1)/n *                             |
| gather         | direct           | n-1                   | (n-1)/n                               |
| scatter        | direct           | n-1                   | (n-1)/n                               |

* Every rank of a host sends to other hosts at once, so g(n-g)/(n-1) times as many bytes go through the host's
interface. With the other algorithms one flow leaves a host, because ranks are numbered host by host. Ring
all-reduce moves nearly 2S through every rank: its bytes do not shrink with more ranks. With in-network an
aggregator, which stands where the switch is, adds up what the hosts send: each byte crosses a host's link
once up and once down, and both directions are busy at once. Halving-doubling here works with any number of
ranks. The variant for powers of two, in which each rank beyond the power first hands its buffer to another
rank, would take 2 steps and 2S more.

Sources: Thakur, Rabenseifner and Gropp, 2005 (ring, recursive, pairwise, tree); Träff, 2024, arXiv:2410.14234
(halving-doubling of any number of ranks); Sanders, Speck and Träff, 2009 (double tree).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import ConfigError, nearest

if TYPE_CHECKING:
    import numpy as np


class AlphaBeta(NamedTuple):
    """Seconds per step and per byte.

    Attributes:
        alpha: Seconds per step.
        beta: Seconds per byte on the path.
    """

    alpha: float
    beta: float


@dataclass(frozen=True)
class Algorithm:
    """One way to do a collective on one level, as counts for n peers that have an interface each.

    Attributes:
        collective: The collective that it does, such as "all_reduce".
        name: The name that users write in options, such as "halving-doubling".
        level: "shared-memory" or "network".
        steps_of: Function of n: messages that wait for one another.
        path_of: Function of n: bytes on the path, divided by S, the bytes of the whole buffer.
        sent_of: Function of n: bytes that the busiest peer sends, divided by S. In shared memory, bytes that
            it reads from others.
        crowds: Whether all ranks of a host send to other hosts at once.
        forwards_sums: Whether ranks pass on partial sums. Partial sums of 16-bit floats travel as 32-bit
            floats.
        inside: Collectives inside each host, before and after, as (collective, algorithm) in shared memory.
            The peers are then hosts, and each rank of a host carries an equal part of the bytes to others.
        aggregated: Whether it needs an aggregator between the hosts.
    """

    collective: str
    name: str
    level: str
    steps_of: Callable[[int], int]
    path_of: Callable[[int], float]
    sent_of: Callable[[int], float]
    crowds: bool = False
    forwards_sums: bool = False
    inside: tuple[tuple[str, str], ...] = ()
    aggregated: bool = False

    def steps(self, ranks: int, ranks_per_host: int = 1) -> int:
        """Return the number of messages that wait for one another.

        Args:
            ranks: Number of ranks in the group.
            ranks_per_host: Number of ranks that share a network interface; 1 in shared memory.
        """
        return self.steps_of(self._peers(ranks, ranks_per_host))

    def bytes_on_path(self, ranks: int, nbytes: float, ranks_per_host: int = 1) -> float:
        """Return the bytes that pass one after another the busiest interface, or the busiest rank's memory.

        Args:
            ranks: Number of ranks in the group.
            nbytes: S, as shoal.predict.cost.collectives.algorithms defines it for each collective.
            ranks_per_host: Number of ranks that share a network interface; 1 in shared memory.
        """
        alone = self.path_of(self._peers(ranks, ranks_per_host)) * nbytes
        if self.crowds and ranks > 1:
            return alone * ranks_per_host * (ranks - ranks_per_host) / (ranks - 1)
        return alone

    def bytes_sent(self, ranks: int, nbytes: float, ranks_per_host: int = 1) -> float:
        """Return the bytes that the busiest rank sends, or in shared memory reads from others.

        The arguments are those of `bytes_on_path`.
        """
        sent = self.sent_of(self._peers(ranks, ranks_per_host)) * nbytes
        return sent / ranks_per_host if self.inside else sent

    def time(self, cost: AlphaBeta, ranks: int, nbytes: float, ranks_per_host: int = 1) -> float:
        """Return the seconds without those of `inside`; the arguments are those of `bytes_on_path`."""
        path = self.bytes_on_path(ranks, nbytes, ranks_per_host)
        return cost.alpha * self.steps(ranks, ranks_per_host) + cost.beta * path

    def _peers(self, ranks: int, ranks_per_host: int) -> int:
        return -(-ranks // ranks_per_host) if self.inside else ranks


LEVELS: tuple[str, ...] = ("shared-memory", "network")
"""What carries the bytes: the memory of one host, or the network between hosts."""

COLLECTIVES: tuple[str, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
)


def find_algorithm(collective: str, name: str, level: str) -> Algorithm:
    """Return the algorithm with that name.

    Raises:
        ConfigError: There is no such collective, level or algorithm, or it is not on that level.
    """
    require_name("a collective", collective, COLLECTIVES)
    require_name("a level", level, LEVELS)
    offered = tuple(each.name for each in algorithms_of(collective, level))
    require_name(f"a {level} algorithm of {collective}", name, offered)
    return ALGORITHMS[collective, name, level]


def algorithms_of(collective: str, level: str) -> tuple[Algorithm, ...]:
    """Return the algorithms of a collective on a level, in the order of the tables above."""
    return tuple(each for each in ALGORITHMS.values() if (each.collective, each.level) == (collective, level))


def require_name(what: str, given: str, offered: Sequence[str]) -> None:
    """Raise ConfigError unless the name is among those offered.

    Args:
        what: The kind of name, with its article, such as "a collective".
        given: The name to check.
        offered: The names that exist.
    """
    if given not in offered:
        raise ConfigError(
            f"{given!r} is not {what}{nearest(given, offered)}",
            possible=", ".join(offered),
            change="use one of these names",
        )


def _once(n: int) -> int:
    """Return 1, or 0 if there is one rank only."""
    return min(n - 1, 1)


def _twice(n: int) -> int:
    return 2 * _once(n)


def _others(n: int) -> int:
    return n - 1


def _others_twice(n: int) -> int:
    return 2 * (n - 1)


def _rest(n: int) -> float:
    """Return the share of a buffer that belongs to other ranks."""
    return (n - 1) / n


def _rest_twice(n: int) -> float:
    return 2 * (n - 1) / n


def _part(n: int) -> float:
    return _once(n) / n


def _doublings(n: int) -> int:
    """Return ceil(log2 n)."""
    return (n - 1).bit_length()


def _shared(
    collective: str, name: str, steps: Callable[[int], int], path: Callable[[int], float]
) -> Algorithm:
    return Algorithm(collective, name, "shared-memory", steps, path, sent_of=path)


def _network(
    collective: str,
    name: str,
    steps: Callable[[int], int],
    path: Callable[[int], float],
    sent: Callable[[int], float] | None = None,
    crowds: bool = False,
    forwards_sums: bool = False,
    inside: tuple[tuple[str, str], ...] = (),
    aggregated: bool = False,
) -> Algorithm:
    """Make a network algorithm; without `sent`, one rank sends all bytes on the path."""
    sent = sent or path
    return Algorithm(
        collective, name, "network", steps, path, sent, crowds, forwards_sums, inside, aggregated
    )


_DEFINED = (
    _shared("all_reduce", "one-shot", _once, _others),
    _shared("all_reduce", "two-shot", _twice, _rest_twice),
    _shared("all_gather", "one-shot", _once, _rest),
    _shared("all_gather", "direct", _once, _rest),
    _shared("reduce_scatter", "one-shot", _once, _rest),
    _shared("reduce_scatter", "direct", _once, _rest),
    _shared("broadcast", "one-shot", _once, _once),
    _shared("broadcast", "direct", _once, _once),
    _shared("reduce", "one-shot", _once, _others),
    _shared("reduce", "direct", _twice, _rest_twice),
    _shared("all_to_all", "direct", _once, _rest),
    _shared("gather", "one-shot", _once, _rest),
    _shared("gather", "direct", _once, _rest),
    _shared("scatter", "one-shot", _once, _part),
    _shared("scatter", "direct", _once, _part),
    _network("all_reduce", "two-shot", _others_twice, _rest_twice, crowds=True),
    _network("all_reduce", "ring", _others_twice, _rest_twice, forwards_sums=True),
    _network(
        "all_reduce",
        "halving-doubling",
        lambda n: 2 * _doublings(n),
        _rest_twice,
        crowds=True,
        forwards_sums=True,
    ),
    _network("all_reduce", "double-tree", lambda n: 2 * (n.bit_length() - 1), _twice, forwards_sums=True),
    _network(
        "all_reduce",
        "hierarchical",
        _others_twice,
        _rest_twice,
        inside=(("reduce_scatter", "direct"), ("all_gather", "direct")),
    ),
    _network(
        "all_reduce",
        "in-network",
        _twice,
        _once,
        inside=(("reduce_scatter", "direct"), ("all_gather", "direct")),
        aggregated=True,
    ),
    _network("all_gather", "direct", _others, _rest, crowds=True),
    _network("all_gather", "ring", _others, _rest),
    _network("all_gather", "recursive", _doublings, _rest, crowds=True),
    _network("all_gather", "hierarchical", _others, _rest, inside=(("all_gather", "direct"),)),
    _network("reduce_scatter", "direct", _others, _rest, crowds=True),
    _network("reduce_scatter", "ring", _others, _rest, forwards_sums=True),
    _network("reduce_scatter", "recursive", _doublings, _rest, crowds=True, forwards_sums=True),
    _network(
        "reduce_scatter",
        "hierarchical",
        _others,
        _rest,
        forwards_sums=True,
        inside=(("reduce_scatter", "direct"),),
    ),
    _network("broadcast", "tree", _doublings, _doublings),
    _network("broadcast", "chain", _others, _once),
    _network("reduce", "tree", _doublings, _doublings, sent=_once, forwards_sums=True),
    _network("reduce", "chain", _others, _once, forwards_sums=True),
    _network("all_to_all", "pairwise", _others, _rest, crowds=True),
    _network("gather", "direct", _others, _rest, sent=_part),
    _network("scatter", "direct", _others, _rest),
)

ALGORITHMS: dict[tuple[str, str, str], Algorithm] = {
    (each.collective, each.name, each.level): each for each in _DEFINED
}
"""Every algorithm, by collective, name and level."""


def fit_alpha_beta(
    steps: Sequence[float], nbytes: Sequence[float], seconds: Sequence[float], known: Sequence[float]
) -> AlphaBeta:
    """Fit alpha and beta of seconds = alpha * steps + beta * nbytes + known.

    The fit has the least sum of squared relative errors. With absolute errors the largest buffers alone would
    decide, and alpha, which only small buffers show, would be noise. Neither alpha nor beta is below 0: where
    plain least squares make one negative, the best fit within bounds has one at 0 (the problem is convex).

    Args:
        steps: Steps of each measurement, [measurements].
        nbytes: Bytes on the path of each measurement, [measurements].
        seconds: Seconds that each measurement took, above 0, [measurements].
        known: Seconds of each measurement that are already explained, [measurements].
    """
    import numpy as np  # imported here, so that planning, which does not fit, starts without it

    weight = 1 / np.asarray(seconds)
    counts = np.stack([steps, nbytes], axis=1) * weight[:, None]
    wanted = 1 - np.asarray(known) * weight
    scale = np.maximum(counts.max(axis=0), np.finfo(float).tiny)  # bytes outnumber steps by far
    both = np.linalg.lstsq(counts / scale, wanted, rcond=None)[0] / scale
    if (both >= 0).all():
        return AlphaBeta(*both.tolist())
    edges = [AlphaBeta(_fit_one(counts[:, 0], wanted), 0.0), AlphaBeta(0.0, _fit_one(counts[:, 1], wanted))]
    return min(edges, key=lambda edge: float(((counts @ np.array(edge) - wanted) ** 2).sum()))


def _fit_one(counts: np.ndarray, wanted: np.ndarray) -> float:
    """Return the x >= 0 with the least sum of (counts * x - wanted)^2."""
    square = float(counts @ counts)
    return max(float(counts @ wanted) / square, 0.0) if square else 0.0

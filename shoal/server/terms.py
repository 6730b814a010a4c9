"""What the board and the workers agree on, and what they tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import CommunicationError

SERVER = b"parameter server"
"""The purpose of channels to a parameter server."""


class ServerError(CommunicationError):
    """A parameter server cannot be reached, or refuses what it was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a board goes by, equal for all workers of a training.

    Attributes:
        workers: Workers with which the training begins; the first round waits for them, and a bound counts
            from their beginning.
        shares: Shares of the whole training.
        staleness: Clocks that a worker may be ahead of the slowest; infinite for no bound, 0 for rounds.
        quorum: Workers that close a round; 0 for all that are present.
        grace: Seconds that a round with a quorum waits for others.
        every: Shares between two arrivals of a worker.
        patience: Seconds after which a worker that others wait for is taken for lost.
        guard: Whether stale gradients give way to rounds when they do harm; see `guard.py`.
    """

    workers: int
    shares: int
    staleness: float = 0
    quorum: int = 0
    grace: float = 0.0
    every: int = 1
    patience: float = 600.0
    guard: bool = False

    @property
    def has_rounds(self) -> bool:
        """Whether contributions are averaged in rounds from the first one on, not applied one by one."""
        return self.staleness == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """How the next contribution of a worker is applied, and what servers do before they are asked again.

    Attributes:
        in_rounds: Whether it waits for its round.
        changes: Number of times that this has changed.
        reason: Why it last did.
        snapshots: Snapshots that each shard has taken of its values, with the present one.
        returns: Number of times that each shard has gone back to the snapshot before its newest one.
    """

    in_rounds: bool = False
    changes: int = 0
    reason: str = ""
    snapshots: int = 0
    returns: int = 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a worker gets when it joins.

    Attributes:
        worker: Its number.
        clock: Its clock.
        shares: The shares to train on; empty if none is left.
        finished: Shares that all workers have finished.
        leads: Whether it is the worker that validates and saves.
        mode: How its next contribution is applied.
    """

    worker: int
    clock: int
    shares: tuple[int, ...]
    finished: int
    leads: bool
    mode: Mode

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Ticket:
        """Return the Ticket of which JSON has these fields."""
        return cls(**{**told, "shares": tuple(told["shares"]), "mode": Mode(**told["mode"])})


@dataclass(frozen=True, slots=True)
class Decision:
    """What a worker gets when it may go on.

    Attributes:
        shares: Its next shares; empty if none is left, and then the worker is a member no more.
        finished: Shares that all workers have finished.
        complete: Shares from the first one on that are all finished: what a saved state contains.
        leads: Whether it is the worker that validates and saves. One alone leads when no share is left.
        round: Number of the round that it was in; 0 without rounds.
        members: Worker and clock of each member of the round, in the order of their shares.
        weights: Weight of each.
        staleness: Rounds that closed since each was in one; empty without rounds.
        lost: Workers that were lost since the round before; empty without rounds.
        loss: Mean loss of what workers sent since this one was answered before; None if that is nothing.
        mode: How its next contribution is applied.
    """

    shares: tuple[int, ...]
    finished: int
    complete: int
    leads: bool
    round: int = 0
    members: tuple[tuple[int, int], ...] = ()
    weights: tuple[float, ...] = ()
    staleness: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    loss: float | None = None
    mode: Mode = field(default_factory=Mode)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Decision:
        """Return the Decision of which JSON has these fields."""
        lists = {name: tuple(told[name]) for name in ("shares", "weights", "staleness", "lost")}
        pairs = tuple((worker, at) for worker, at in told["members"])
        return cls(**{**told, **lists, "members": pairs, "mode": Mode(**told["mode"])})

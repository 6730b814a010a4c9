"""A Passage: the pieces of one forward or backward of a rank, from its start to its end.

A piece of compute is a number of seconds. Between these stand `Exposed` (a communication that compute waits
for), `Start` (begins a communication that travels beside compute) and `Wait` (the next piece needs what such
a communication brings).

The pieces of a block's forward and backward: its compute, divided by the communications within it.

Communication over tp stands before and after equal parts of compute (`shoal.predict.cost.time.block` lists
it). Attention's communication over cp stands after the first part of compute. Experts get their tokens before
the last part of compute and return them after it. Costs give the total time over cp and with experts; each
communication gets an equal share. A block's straggler wait is put at its last communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from shoal.predict.cost import Costs, Layout
from shoal.predict.cost.time import BlockCost, Join, Joined
from shoal.spec.plan.group import Group
from shoal.spec.plan.schedules import Work
from shoal.spec.timeline import Purpose
from shoal.spec.workload import Block, Part


@dataclass(frozen=True, slots=True)
class Collective:
    """A communication with ranks that are at the same point of their programs.

    Attributes:
        name: Name as in recorded spans, such as "all_reduce:bucket 3".
        seconds: Seconds from start to end if no other communication is before it.
        bytes: Bytes of the tensor.
        group: Global ranks of the participants.
        purpose: Purpose of the communication.
        late: The part of `seconds` before all of the group have arrived.
    """

    name: str
    seconds: float
    bytes: int
    group: tuple[int, ...]
    purpose: Purpose
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class Exposed:
    """A communication within a block, or the part of one, that compute waits for."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Start:
    """Queue a communication behind those that the rank has begun before.

    Attributes:
        key: The key that a `Wait` names; a `Wait` covers all communications begun under its key.
        collective: The communication.
        load: The load on the device while it travels:
        `shoal.predict.cost.collectives.network.collective_load`.
    """

    key: object
    collective: Collective
    load: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Stop compute until the communications begun under a key have ended.

    Attributes:
        key: See `Start`; if nothing was begun under it, compute does not stop.
    """

    key: object


Piece = float | Exposed | Start | Wait


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """A forward, a backward or one half of a backward of a stage for one micro-batch; equal to itself alone.

    Attributes:
        pieces: The pieces, in order.
        seconds: Duration if nothing travels beside it.
        is_plain: Whether it has no communication that travels beside compute.
    """

    pieces: tuple[Piece, ...]
    seconds: float
    is_plain: bool

    @property
    def exposed(self) -> Iterator[Collective]:
        """Yield the communications within blocks that compute waits for."""
        return (piece.collective for piece in self.pieces if isinstance(piece, Exposed))

    def exposed_moments(self) -> Iterator[tuple[float, float]]:
        """Yield start and end of these communications, in seconds from the passage's start."""
        now = begin = 0.0
        for piece in self.pieces:
            if isinstance(piece, Exposed):
                now += piece.collective.seconds
            elif isinstance(piece, float):
                if now > begin:
                    yield begin, now
                now = begin = now + piece
        if now > begin:
            yield begin, now

    def gathered(self) -> Passage:
        """Return a plain passage with all compute in one piece, and then one piece for each operation.

        A pipeline has thousands of passages with many communications each, which a Timeline shows as few.
        """
        by_name: dict[str, list[Collective]] = {}
        for each in self.exposed:
            by_name.setdefault(each.name, []).append(each)
        compute = math.fsum(piece for piece in self.pieces if isinstance(piece, float))
        together = [
            Exposed(
                Collective(
                    name,
                    math.fsum(each.seconds for each in found),
                    sum(each.bytes for each in found),
                    found[0].group,
                    found[0].purpose,
                    math.fsum(each.late for each in found),
                )
            )
            for name, found in by_name.items()
        ]
        return Passage((compute, *together), self.seconds, True)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Passage:
        """Return the passage of these pieces; consecutive pieces of compute become one."""
        merged: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, float) and merged and isinstance(merged[-1], float):
                merged[-1] += piece
            else:
                merged.append(piece)
        seconds = math.fsum(
            piece if isinstance(piece, float) else piece.collective.seconds
            for piece in merged
            if isinstance(piece, float | Exposed)
        )
        is_plain = not any(isinstance(piece, Start | Wait) for piece in merged)
        return cls(tuple(merged), seconds, is_plain)


Members = Callable[[Group], tuple[int, ...]]
"""A function from a group to the global ranks of its instance that the played rank belongs to."""


@dataclass(frozen=True, slots=True)
class Within:
    """Make the pieces of blocks.

    Args:
        costs: Costs of the workload that has these blocks.
        layout: The layout of the workload over ranks.
        members: The groups of the rank that is played.
    """

    costs: Costs
    layout: Layout
    members: Members

    def pieces(self, block: Block, work: Work) -> tuple[Piece, ...]:
        """Return the pieces of a block's forward, of its backward or of a half of that."""
        cost = self.costs.block(block, self.layout)
        if work is Work.WEIGHT:
            return (cost.compute.weight,)
        if work is Work.FORWARD:
            return _with_late(list(self._divided(block, cost.compute.forward, cost, 0, 1)), cost.late[0])
        compute = cost.compute.backward if work is Work.BACKWARD else cost.compute.input
        rounds = 2 if self.layout.policy(block, is_layer=True) == "full" else 1
        return _with_late(list(self._divided(block, compute, cost, 1, rounds)), cost.late[1])

    def _divided(
        self,
        block: Block,
        compute: float,
        cost: BlockCost,
        way: int,
        rounds: int,
    ) -> Iterator[Piece]:
        """Yield what a forward (`way` 0) or a backward (1) does; of a hidden ring, waits for late ranks."""
        joins, context, expert = cost.joins[way] or (Join((), ()),), cost.context[way], cost.expert[way]
        synchronises = cost.late[way] > 0 and self.layout.cp > 1
        attends = context > 0 or (synchronises and any(True for _ in block.attentions))
        for number, join in enumerate(joins):
            yield from map(self._joined, join.before)
            is_last = number == len(joins) - 1
            if is_last and expert:
                yield self._exchange(block, expert / 2, rounds)
            yield compute / len(joins)
            if is_last and expert:
                yield self._exchange(block, expert / 2, rounds)
            if number == 0 and attends:
                yield self._attend(block, context, rounds)
            yield from map(self._joined, join.behind)

    def _joined(self, joined: Joined) -> Piece:
        group = self.members(self.layout.tensor_group)
        return Exposed(Collective(joined.name, joined.seconds, round(joined.nbytes), group, Purpose.TENSOR))

    def _attend(self, block: Block, seconds: float, rounds: int) -> Piece:
        layout, length = self.layout, self.costs.workload.length
        of_tokens = length * layout.microbatch // layout.cp // layout.tp * layout.width * rounds
        keys = sum(each.kv_heads * (each.key_width + each.value_width) for each in block.attentions)
        if layout.context == "ring":
            name, nbytes = "shift:keys and values", of_tokens * keys * (layout.cp - 1)
        else:
            queries = sum(each.heads * (each.key_width + each.value_width) for each in block.attentions)
            name, nbytes = "all_to_all:heads", of_tokens * (keys + queries)
        group = self.members(layout.context_group)
        return Exposed(Collective(name, seconds, nbytes, group, Purpose.CONTEXT))

    def _exchange(self, block: Block, seconds: float, rounds: int) -> Piece:
        layout = self.layout
        nbytes = round(block.routed * layout.share(Part.STREAM)) * layout.width * rounds
        group = self.members(layout.expert_group)
        return Exposed(Collective("all_to_all:tokens", seconds, nbytes, group, Purpose.EXPERT))


def _with_late(pieces: list[Piece], late: float) -> tuple[Piece, ...]:
    """Add this wait for late ranks to the last communication."""
    for at in reversed(range(len(pieces))):
        piece = pieces[at]
        if isinstance(piece, Exposed):
            seconds = piece.collective.seconds + late
            pieces[at] = Exposed(replace(piece.collective, seconds=seconds, late=late))
            break
    return tuple(pieces)

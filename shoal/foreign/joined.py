"""Operations of ranks as spans: which ranks a communication joins, and what the rest of the work is.

A message joins the stage before and the stage after; a collective of gradients or parameters joins the ranks
of a stage, one of the embeddings the ranks that have it in a pipeline, and clipping all ranks. The k-th of a
kind is the same one on all its ranks.

Messages that were noted but never sent join nobody; see `shoal.foreign.messages`.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.foreign.messages import ahead, ends_of, unsent
from shoal.foreign.operation import Operation
from shoal.foreign.waits import with_waits
from shoal.timeline import Kind, Lane, Purpose, Span


class Joined:
    """The rows, and which ranks their communications join."""

    def __init__(self, rows: Sequence[Operation]) -> None:
        self._rows = rows
        self._places = {row.rank: (row.stage, row.dp) for row in rows}
        self._by_place: dict[tuple[int, int], list[int]] = {}
        self._with_kind: dict[str, set[int]] = {}
        for rank, place in self._places.items():
            self._by_place.setdefault(place, []).append(rank)
        for row in rows:
            self._with_kind.setdefault(row.kind, set()).add(row.rank)
        self._stages = 1 + max(stage for stage, _ in self._places.values())

    def spans(self) -> list[Span]:
        """Return the spans of all ranks, with a span for each step and with waits."""
        by_rank: dict[int, list[Span]] = {}
        windows: dict[tuple[int, int], tuple[float, float]] = {}
        alone = unsent(self._rows, self._stages)
        for position, row in enumerate(self._rows):
            by_rank.setdefault(row.rank, []).append(self._span(row, is_joined=position not in alone))
            first, last = windows.get((row.rank, row.step), (row.start, row.stop))
            windows[row.rank, row.step] = min(first, row.start), max(last, row.stop)
        for (rank, step), (first, last) in windows.items():
            by_rank[rank].append(Span(rank, Lane.COMPUTE, Kind.STEP, str(step), first, last - first))
        return [span for spans in by_rank.values() for span in with_waits(spans)]

    def _span(self, row: Operation, *, is_joined: bool) -> Span:
        start, seconds = row.start, row.stop - row.start
        joined = self._communication(row, is_joined=is_joined)
        if joined is not None:
            name, purpose, group = joined
            lane, collective = Lane.COMMUNICATION, Kind.COLLECTIVE
            return Span(row.rank, lane, collective, name, start, seconds, group=group, purpose=purpose)
        kind, name = _work(row)
        return Span(row.rank, Lane.COMPUTE, kind, name, start, seconds)

    def _communication(self, row: Operation, *, is_joined: bool) -> tuple[str, str, tuple[int, ...]] | None:
        """Return name, purpose and group of a communication; None for other work."""
        kind = row.kind
        if ends := ends_of(kind):
            passes, is_sent = ends[0]
            what = {"forward": "activation", "backward": "gradient"}[passes] if len(ends) == 1 else "exchange"
            if not is_joined:
                return f"{what}:unsent", Purpose.PIPELINE, (row.rank,)
            other = (row.stage + ahead(passes, is_sent=is_sent)) % self._stages
            ways = row.rank, self._beside(row.rank, (other, row.dp))
            sender, receiver = ways if is_sent or len(ends) == 2 else ways[::-1]
            group = tuple(sorted({sender, receiver}))
            name = f"{sender} to {receiver}" if len(ends) == 1 else f"{group[0]} and {group[-1]}"
            return f"{what}:{name}", Purpose.PIPELINE, group
        if "clip" in kind:
            return f"all_reduce:{kind}", Purpose.CONTROL, tuple(sorted(self._with_kind[kind]))
        for operation in (
            "all-reduce",
            "allreduce",
            "reduce-scatter",
            "reducescatter",
            "all-gather",
            "allgather",
        ):
            if operation in kind:
                return f"{operation}:{kind}", self._purpose(kind), self._group(row)
        return None

    @staticmethod
    def _purpose(kind: str) -> str:
        return Purpose.TENSOR if kind.startswith(("tp-", "layernorm")) else Purpose.DATA

    def _group(self, row: Operation) -> tuple[int, ...]:
        having = self._with_kind[row.kind]
        if row.kind.startswith(("tp-", "layernorm")):
            found = set(self._by_place[row.stage, row.dp])
        elif row.kind.startswith("embedding"):
            found = {rank for rank in having if self._places[rank][1] == row.dp}
        else:
            found = {rank for rank in having if self._places[rank][0] == row.stage}
            if len(found) > len({self._places[rank] for rank in found}):  # several along tp: their like only
                place = self._by_place[row.stage, row.dp].index(row.rank)
                found = {
                    ranks[place]
                    for (stage, _), ranks in self._by_place.items()
                    if stage == row.stage and place < len(ranks)
                }
        return tuple(sorted(found & having | {row.rank}))

    def _beside(self, rank: int, place: tuple[int, int]) -> int:
        """Return the rank at a place that is there what this rank is at its own place."""
        others = self._by_place.get(place, [rank])
        return others[min(self._by_place[self._places[rank]].index(rank), len(others) - 1)]


def _work(row: Operation) -> tuple[str, str]:
    """Return kind and name of work; in a pipeline the name is the action."""
    action = "" if row.microbatch is None else str(row.microbatch)
    if row.kind.startswith("forward"):
        return Kind.FORWARD, f"{row.chunk}F{action}" if action else ""
    if row.kind.startswith("backward"):
        letter = "W" if "wgrad" in row.kind else "B"
        return Kind.BACKWARD, f"{row.chunk}{letter}{action}" if action else ""
    if row.kind.startswith("optimizer"):
        return Kind.OPTIMIZER, ""
    if row.kind.startswith("data") or row.kind in ("loader", "dataloader"):
        return Kind.DATA_WAIT, ""
    return Kind.OTHER, row.kind

"""Draws context parallelism: which rank has and computes what of causal attention, as the code does it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from drawn.svg import BLUE, COLORS, WIDTH, arrow, box, frame, svg, text
from drawn.watched import watch
from shoal.parallel.context.positions import POSITIONS
from shoal.parallel.context.ring_attention import Kernel, Operands, kernel_for, ring_attention
from shoal.parallel.context.ulysses import ulysses_attention

__all__ = ["CHUNKS", "RANKS", "Block", "heads_and_positions", "pictures", "ring_steps"]

RANKS = 4
CHUNKS = 2 * RANKS
"""Of a sequence in a ring; a chunk here is of one position."""

HEADS = 8


def pictures() -> dict[str, str]:
    """The text of every picture, by the name of its file."""
    return {"ring-attention.svg": _ring(), "ulysses.svg": _ulysses()}


class Block(NamedTuple):
    """A chunk of queries that a rank attends with to a chunk of keys.

    Attributes:
        query: Which chunk.
        key: As well.
        rank: Who.
        is_half: Whether it is the causal half.
    """

    query: int
    key: int
    rank: int
    is_half: bool


def ring_steps() -> list[list[Block]]:
    """What all ranks compute in each step of ring attention."""

    def program(axis: Any) -> None:
        position = POSITIONS["ring"](CHUNKS, RANKS, axis.index).float().view(1, 1, -1, 1)
        query, key, value = (position.expand(-1, -1, -1, 8).contiguous() for _ in range(3))

        def watched_kernel(operands: Operands, *, causal: bool, seen: torch.Tensor | None) -> Kernel:
            axis.note("causal" if causal else "whole", *operands)
            return kernel_for(operands, causal=causal, seen=seen)

        with patch("shoal.parallel.context.ring_attention.kernel_for", watched_kernel):
            ring_attention(query, key, value, axis)

    steps: list[list[Block]] = [[] for _ in range(RANKS)]
    for rank, events in enumerate(watch(program, RANKS)):
        attended = [event for event in events if event.kind in ("causal", "whole")]
        for step, event in zip(steps, attended, strict=True):
            queries, keys = (each[0, 0, :, 0].int().tolist() for each in event.tensors[:2])
            for row, query in enumerate(queries):
                for column, key in enumerate(keys):
                    if event.kind == "whole" or column <= row:
                        step.append(Block(query, key, rank, is_half=query == key))
    return steps


def heads_and_positions() -> tuple[list[list[int]], list[list[int]]]:
    """By head and part of the sequence, which rank has it, before Ulysses' exchange and after."""
    before = [[-1] * RANKS for _ in range(HEADS)]
    after = [[-1] * RANKS for _ in range(HEADS)]

    def program(axis: Any) -> None:
        position = POSITIONS["ulysses"](RANKS, RANKS, axis.index).view(1, 1, -1, 1)
        numbered = (100 * torch.arange(HEADS).view(1, -1, 1, 1) + position).float()
        query, key, value = (numbered.expand(-1, -1, -1, 8).contiguous() for _ in range(3))
        ulysses_attention(query, key, value, axis)

    for rank, events in enumerate(watch(program, RANKS)):
        sent = next(event for event in events if event.kind == "start")
        for receiver, rows in enumerate(sent.tensors[0].split(sent.rows)):
            for number in rows[:, 0, 0, 0].int().tolist():
                head, position = divmod(number, 100)
                before[head][position], after[head][position] = rank, receiver
    return before, after


CELL = 17
SQUARE = CHUNKS * CELL
APART = SQUARE + 30  # from one step's square to the next
LEFT = 3
STEPS = 104  # top of the squares


def _ring() -> str:
    """Who has which chunk, and who computes what in each step."""
    owners = {
        chunk: rank for rank in range(RANKS) for chunk in POSITIONS["ring"](CHUNKS, RANKS, rank).tolist()
    }
    wide = 70
    begin = WIDTH - 3 - CHUNKS * wide
    parts = [text(0, 14, "chunk", anchor="start"), text(0, 38, "rank", anchor="start")]
    for chunk, rank in sorted(owners.items()):
        parts.append(text(begin + (chunk + 0.5) * wide, 14, str(chunk)))
        parts.append(
            box(
                begin + chunk * wide + 0.5, 24, wide - 1, 20, color=COLORS[rank], stroke=None, label=str(rank)
            )
        )
    steps = ring_steps()
    work = {(step, rank): 0.0 for step in range(RANKS) for rank in range(RANKS)}
    for number, step in enumerate(steps):
        at = LEFT + number * APART, STEPS
        (away,) = {(block.rank - owners[block.key]) % RANKS for block in step}
        parts.append(text(at[0] + SQUARE / 2, STEPS - 24, f"step {number + 1}", color=BLUE))
        parts.append(
            text(at[0] + SQUARE / 2, STEPS - 8, f"keys of rank - {away}" if away else "keys of its own")
        )
        parts += _square(at, step, [block for before in steps[:number] for block in before])
        for block in step:
            work[number, block.rank] += 0.5 if block.is_half else 1
    (each,) = set(work.values())
    below = STEPS + SQUARE + 22
    legend = f"Rows are queries, columns keys. Every step is {each:g} squares of work for every rank."
    parts.append(text(LEFT, below, legend, anchor="start"))
    return svg(f"Ring attention, {RANKS} ranks: who computes what of the causal square", below + 8, parts)


def _square(at: tuple[float, float], step: list[Block], done: list[Block]) -> Iterator[str]:
    """All queries against all keys: what is computed in a step, and pale what was before."""
    left, top = at
    for blocks, opacity in ((done, 0.18), (step, 1.0)):
        for block in blocks:
            x, y, color = left + block.key * CELL, top + block.query * CELL, COLORS[block.rank]
            if block.is_half:
                yield f'<path d="M{x:g} {y:g}v{CELL}h{CELL}z" fill="{color}" fill-opacity="{opacity:g}"/>'
            else:
                label = str(block.rank) if opacity == 1 else ""
                yield box(x, y, CELL, CELL, color=color, opacity=opacity, stroke=None, label=label)
    yield frame(left, top, SQUARE, SQUARE)


def _ulysses() -> str:
    """Heads against positions: before attention, in it, and after it."""
    before, after = heads_and_positions()
    wide, high, top = 34, 16, 48
    width, height = RANKS * wide, HEADS * high
    lefts = [54, 264, 474]
    parts = [text(0, top + height / 2 + 4, "heads", anchor="start")]
    for left, have in zip(lefts, (before, after, before), strict=True):
        for head, row in enumerate(have):
            for part, rank in enumerate(row):
                at = left + part * wide + 0.5, top + head * high + 0.5
                parts.append(box(*at, wide - 1, high - 1, color=COLORS[rank], stroke=None, label=str(rank)))
        heading = "some heads, all positions" if have is after else "all heads, some positions"
        parts.append(text(left + width / 2, 14, heading))
        parts.append(text(left + width / 2, top + height + 18, "positions"))
    parts.append(text(lefts[1] + width / 2, 36, "attention", color=BLUE))
    for left, names in ((lefts[0], ("query", "key", "value")), (lefts[1], ("output",))):
        start, end = left + width + 5, left + 210 - 5
        middle = top + height / 2
        parts.append(text((start + end) / 2, middle - 8, "all-to-all", color=BLUE))
        parts.append(arrow((start, middle), (end, middle), stands_out=True))
        parts += [text((start + end) / 2, middle + 18 + 16 * row, name) for row, name in enumerate(names)]
    return svg(f"Ulysses, {RANKS} ranks and {HEADS} heads: which rank has what", top + height + 26, parts)

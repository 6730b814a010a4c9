"""Sums over an axis whose ranks send each other less than their vectors.

    two phases   each rank gets all ranks' payloads of a part, sums them, and sends everyone the payload of
                 its sum: about 2 (d - 1) / d payloads of the whole, as an all-reduce. What is left out of a
                 part's sum is fed back too. For kinds that send every element
    gathered     every rank gets all ranks' payloads, and sums them: d - 1 payloads sent. For sparse kinds,
                 and for any kind between two ranks
    by value     an all-reduce of elements that all ranks choose alike. For random
    low rank     two all-reduces of factors. For powersgd (`low_rank.py`)

All ranks decode the same payloads in the same order, so that their results are equal bit by bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch

from shoal.collectives import codec_of
from shoal.parallel.communication import Axis, Pending, Then, new_buffer
from shoal.parallel.exchange.low_rank import LowRankSum
from shoal.parallel.exchange.memory import ErrorMemory
from shoal.plan import BLOCK, Compression

Matrices = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Returns the parts of a vector that are parameters, as views in their shapes."""


class CompressedSum(ABC):
    """The sum of a vector over an axis, compressed, with this rank's error memory."""

    @property
    @abstractmethod
    def memories(self) -> Sequence[tuple[int, ErrorMemory]]:
        """Return what this rank left out of earlier exchanges: the first element, and the memory.

        The first memory is of the whole vector.
        """

    def kept(self) -> dict[str, torch.Tensor]:
        """Return what the next exchange on this rank depends on, by name."""
        lefts = [memory.left for _, memory in self.memories]
        return {f"error {number}": left for number, left in enumerate(lefts) if left is not None}

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `kept` returned."""
        for number, (_, memory) in enumerate(self.memories):
            memory.left = kept.get(f"error {number}")

    def left_out(self) -> torch.Tensor:
        """Return the sum of squares of what this rank left out of earlier exchanges, a scalar."""
        lefts = [memory.left.square().sum() for _, memory in self.memories if memory.left is not None]
        return torch.stack(lefts).sum() if lefts else torch.zeros(())

    def give_up(self, elements: int) -> torch.Tensor | None:
        """Return the sum of what this rank left out, `[elements]`, and forget it; None if it is nothing."""
        lefts = [(place, memory.left) for place, memory in self.memories if memory.left is not None]
        if not lefts:
            return None
        total = torch.zeros(elements, device=lefts[0][1].device)
        for place, left in lefts:
            total[place : place + len(left)].add_(left)
        self.take(None)
        return total

    def take(self, left: torch.Tensor | None) -> None:
        """Make `left`, `[elements]`, what this rank left out of earlier exchanges."""
        for number, (_, memory) in enumerate(self.memories):
            memory.left = left if number == 0 else None

    @abstractmethod
    def start(self, vector: torch.Tensor, name: str, number: int) -> Pending:
        """Begin to sum a vector in place; it is undefined until the result is waited for.

        Args:
            vector: `[elements]`, fp32, contiguous.
            name: Name of the collectives in the Timeline.
            number: Another number for each exchange, equal on all ranks.
        """


def sum_over(
    axis: Axis, compression: Compression, feedback: float, matrices: Matrices = lambda vector: [vector]
) -> CompressedSum:
    """Return the way to sum a vector over an axis with a compression.

    Args:
        axis: The ranks.
        compression: What is sent.
        feedback: Share of what was left out of one exchange that is added to the next.
        matrices: The parameters in the vector; for powersgd.
    """
    if compression.kind == "powersgd":
        return _LowRank(axis, compression.number, feedback, matrices)
    if compression.kind == "random":
        return _ByValue(axis, compression, feedback)
    if compression.is_quantised and axis.size > 2:
        return _InTwoPhases(axis, compression, feedback)
    return _Gathered(axis, compression, feedback)


def seed_of(number: int, rank: int) -> int:
    """Return another seed, of 62 bits, for each exchange and rank; those that follow it are for parts."""
    return (number * 0x9E3779B97F4A7C15 + rank * 0xBF58476D1CE4E5B9) % (1 << 62)


@final
class _Gathered(CompressedSum):
    def __init__(self, axis: Axis, compression: Compression, feedback: float) -> None:
        self._axis = axis
        self._codec = codec_of(compression)
        self._has_fixed_size = compression.has_fixed_size
        self._memory = ErrorMemory(feedback)

    @property
    def memories(self) -> Sequence[tuple[int, ErrorMemory]]:
        return [(0, self._memory)]

    def start(self, vector: torch.Tensor, name: str, number: int) -> Pending:
        size, index = self._axis.size, self._axis.index
        self._memory.add_to(vector)
        capacity = self._codec.payload(len(vector))
        own = new_buffer(capacity, dtype=torch.uint8, device=vector.device)
        seed = seed_of(number, index)
        (written,) = self._memory.encode(self._codec, vector, len(vector), [own], seed=seed)
        if not self._has_fixed_size:
            capacity = self._largest(written, vector.device, name)
        every = new_buffer(size * capacity, dtype=torch.uint8, device=vector.device)
        payloads = every.chunk(size)
        payloads[index][:written].copy_(own[:written])

        def finish() -> None:
            vector.zero_()
            for payload in payloads:
                self._codec.decode_add(payload, vector)

        return Then(self._axis.all_gather(every, name), finish)

    def _largest(self, written: int, device: torch.device, name: str) -> int:
        """Return the most bytes that a rank sends."""
        sizes = torch.zeros(self._axis.size, dtype=torch.int64, device=device)
        sizes[self._axis.index] = written
        self._axis.all_gather(sizes, f"{name} sizes").wait()
        return int(sizes.max())


@final
class _InTwoPhases(CompressedSum):
    def __init__(self, axis: Axis, compression: Compression, feedback: float) -> None:
        self._axis = axis
        self._codec = codec_of(compression)
        self._of_whole = ErrorMemory(feedback)
        self._of_sum = ErrorMemory(feedback)
        self._begins = 0  # this rank's part of the vector

    @property
    def memories(self) -> Sequence[tuple[int, ErrorMemory]]:
        return [(0, self._of_whole), (self._begins, self._of_sum)]

    def start(self, vector: torch.Tensor, name: str, number: int) -> Pending:
        size, index, codec = self._axis.size, self._axis.index, self._codec
        part = -(-len(vector) // (size * BLOCK)) * BLOCK
        parts = [vector[min(at * part, len(vector)) :][:part] for at in range(size)]
        self._begins = min(index * part, len(vector))
        sizes = [codec.payload(len(each)) for each in parts]
        sent = new_buffer(sum(sizes), dtype=torch.uint8, device=vector.device)
        self._of_whole.add_to(vector)
        self._of_whole.encode(codec, vector, part, sent.split(sizes), seed=seed_of(2 * number, index))
        rows = [sizes[index]] * size
        received = new_buffer(sum(rows), dtype=torch.uint8, device=vector.device)

        def finish() -> None:
            own = parts[index].zero_()
            for payload in received.split(rows):
                codec.decode_add(payload, own)
            every = new_buffer(size * sizes[0], dtype=torch.uint8, device=vector.device)
            payloads = [each[:bytes] for each, bytes in zip(every.chunk(size), sizes, strict=True)]
            self._of_sum.add_to(own)
            seed = seed_of(2 * number + 1, index)
            self._of_sum.encode(codec, own, part, [payloads[index]], seed=seed)
            self._axis.all_gather(every, name).wait()
            for each, payload in zip(parts, payloads, strict=True):
                codec.decode_add(payload, each.zero_())

        return Then(self._axis.all_to_all(received, sent, name, received_rows=rows, sent_rows=sizes), finish)


@final
class _ByValue(CompressedSum):
    def __init__(self, axis: Axis, compression: Compression, feedback: float) -> None:
        self._axis = axis
        self._codec = codec_of(compression)
        self._memory = ErrorMemory(feedback)

    @property
    def memories(self) -> Sequence[tuple[int, ErrorMemory]]:
        return [(0, self._memory)]

    def start(self, vector: torch.Tensor, name: str, number: int) -> Pending:
        self._memory.add_to(vector)
        payload = new_buffer(self._codec.payload(len(vector)), dtype=torch.uint8, device=vector.device)
        self._memory.encode(self._codec, vector, len(vector), [payload], seed=number)
        return Then(
            self._axis.all_reduce(payload.view(torch.float32), name),
            lambda: self._codec.decode(payload, vector, seed=number),
        )


@final
class _LowRank(CompressedSum):
    def __init__(self, axis: Axis, rank: int, feedback: float, matrices: Matrices) -> None:
        self._memory = ErrorMemory(feedback)
        self._sum = LowRankSum(axis, rank)
        self._matrices = matrices

    @property
    def memories(self) -> Sequence[tuple[int, ErrorMemory]]:
        return [(0, self._memory)]

    def kept(self) -> dict[str, torch.Tensor]:
        factors = {f"factor {number}": factor for number, factor in self._sum.factors.items()}
        return {**super().kept(), **factors}

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        super().restore(kept)
        names = {name: name.removeprefix("factor ") for name in kept if name.startswith("factor ")}
        self._sum.factors = {int(number): kept[name] for name, number in names.items()}

    def start(self, vector: torch.Tensor, name: str, number: int) -> Pending:
        self._memory.add_to(vector)
        given = vector.clone()
        pending = self._sum.start(self._matrices(vector), name)

        def finish() -> None:
            self._memory.keep(given.sub_(vector, alpha=1 / self._sum.size), given)

        return Then(pending, finish)

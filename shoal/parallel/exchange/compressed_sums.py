"""Sums over an axis whose ranks send each other less than their vectors.

    two phases   each rank gets all ranks' payloads of a part, sums them, and sends everyone the payload of
                 its sum: about 2 (d - 1) / d payloads of the whole, as an all-reduce. What is left out of a
                 part's sum is fed back too. For kinds that send every element
    gathered     every rank gets all ranks' payloads, and sums them: d - 1 payloads sent. For sparse kinds,
                 and for any kind between two ranks
    by value     an all-reduce of elements that all ranks choose alike. For random
    low rank     two all-reduces of factors. For powersgd

All ranks decode the same payloads in the same order, so that their results are equal bit by bit.

Error feedback: what compression left out of an exchange is added to the next one.

Without it top-k never sends what is small but constant, and sign never converges; with it the sum of all that
was sent follows the sum of all that was to be sent (Stich et al., arXiv:1809.07599; Karimireddy et al.,
arXiv:1901.09847).

PowerSGD: a sum of matrices, approximated by the product of two factors of a small rank.

With M_i the matrix of rank i and Q a factor kept from the exchange before, one step of subspace iteration:

    P = sum M_i Q, orthogonalised;  Q = sum M_i^T P;  the sum of M_i is about P Q^T

A matrix [n, m] is sent as r (n + m) numbers in place of n m. Tensors with one dim, and matrices that would be
no smaller, are summed whole, with the first factors. Vogels et al., arXiv:1905.13727, algorithm 1 and 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch.nn.functional import linear

from shoal.collectives import Codec, codec_of
from shoal.parallel.communication import Axis, Pending, Then, new_buffer
from shoal.spec.plan import BLOCK, Compression, Exchange, Plan


@dataclass(slots=True)
class Compressing:
    """What the exchanges of a strategy's gradients have in common; with exchange=auto it changes.

    Attributes:
        compression: What is sent in place of a vector.
        feedback: Share of what was left out of one exchange that is added to the next.
        dense: First steps, in which nothing is compressed.
        is_between_workers: Whether the sums over replicas are compressed. If not, the plan has one worker,
            and its ranks compress what they send each other.
        step: Steps made.
        changes: How often another exchange was to be followed.
    """

    compression: Compression
    feedback: float
    dense: int
    is_between_workers: bool
    step: int = 0
    changes: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Compressing | None:
        """Return the compression of gradients under a Plan; None if they are sent whole."""
        exchange = plan.exchanged
        if exchange.merges or not (exchange.compresses or (exchange.is_chosen and plan.replicas > 1)):
            return None
        return cls(exchange.compression, exchange.feedback, exchange.dense, plan.replicas > 1)

    def follow(self, exchange: Exchange) -> None:
        """Compress as an exchange says from the next step on; what was left out before is dropped."""
        self.compression = Compression() if exchange.merges else exchange.compression
        self.feedback, self.dense = exchange.feedback, 0
        self.changes += 1

    @property
    def is_on(self) -> bool:
        """Whether this step's gradients are compressed."""
        return self.compression.kind != "none" and self.step >= self.dense


class ErrorMemory:
    """What was left out of the exchanges of one vector on this rank.

    Args:
        feedback: Share of it that is added to the next vector; 0 keeps nothing.

    Attributes:
        left: `[elements]`, fp32; None before the first exchange.
    """

    def __init__(self, feedback: float) -> None:
        self._feedback = feedback
        self.left: torch.Tensor | None = None

    def add_to(self, vector: torch.Tensor) -> None:
        """Add to a vector `[elements]` what was left out before."""
        if self.left is not None:
            vector.add_(self.left, alpha=self._feedback)

    def encode(
        self, codec: Codec, vector: torch.Tensor, part: int, payloads: Sequence[torch.Tensor], *, seed: int
    ) -> list[int]:
        """Write what is sent of a vector, to which `add_to` was applied, and keep the rest.

        Args:
            codec: Writes payloads.
            vector: `[elements]`, fp32.
            part: Elements of a part: each is written by itself.
            payloads: For each part, the memory to write to.
            seed: Another number for each exchange and rank.

        Returns:
            For each part, the bytes written.
        """
        rest = torch.empty_like(vector) if self._feedback else None
        written = []
        for number, payload in enumerate(payloads):
            window = slice(min(number * part, len(vector)), min((number + 1) * part, len(vector)))
            left = None if rest is None else rest[window]
            written.append(codec.encode(vector[window], payload, seed=seed + number, residual=left))
        if rest is not None:
            self.keep(rest, vector)
        return written

    def keep(self, rest: torch.Tensor, vector: torch.Tensor) -> None:
        """Keep what was left out of a vector.

        If the vector has NaN or infinity its step is skipped, and what was left out before stays.
        """
        if not self._feedback:
            return
        if self.left is None:
            self.left = torch.zeros_like(vector)
        # In fp32 the sum of large numbers may overflow.
        if vector.device.type != "cpu":  # the host does not wait for the device
            is_finite = vector.sum(dtype=torch.float64).isfinite()
            self.left = torch.where(is_finite, rest, self.left)
        elif vector.sum().isfinite() or vector.isfinite().all():
            self.left = rest


class LowRankSum:
    """Sums of the same matrices over an axis, step by step.

    Args:
        axis: The ranks.
        rank: Rank of the factors.

    Attributes:
        factors: The second factor of each matrix, `[columns, rank]`, by the number of the tensor.
    """

    def __init__(self, axis: Axis, rank: int) -> None:
        self._axis = axis
        self._rank = rank
        self.factors: dict[int, torch.Tensor] = {}

    @property
    def size(self) -> int:
        """Number of ranks that are summed over."""
        return self._axis.size

    def start(self, tensors: Sequence[torch.Tensor], name: str) -> Pending:
        """Begin to sum tensors, fp32, in place; give the same ones in every step."""
        return _Summing(self._axis, [self._factored(*each) for each in enumerate(tensors)], name)

    def _factored(self, number: int, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a tensor with the factor that it begins with; None if it is summed whole."""
        matrix = tensor.flatten(1) if tensor.dim() > 1 else tensor.view(-1, 1)
        rows, columns = matrix.shape
        if self._rank * (rows + columns) >= rows * columns:
            return tensor, None
        if number not in self.factors:  # alike on all ranks
            chance = torch.Generator().manual_seed(number)
            self.factors[number] = torch.randn(columns, self._rank, generator=chance).to(tensor.device)
        return tensor, self.factors[number]


@final
class _Summing:
    """The two all-reduces of one exchange; the second begins when the first is waited for.

    Products with factors are written with the factor's few rows first: on a core M^T P of 3.3 million
    elements takes 5.5 ms, and (P^T M)^T 0.6 ms.
    """

    def __init__(
        self, axis: Axis, tensors: Sequence[tuple[torch.Tensor, torch.Tensor | None]], name: str
    ) -> None:
        self._axis = axis
        self._name = name
        self._whole = [tensor for tensor, factor in tensors if factor is None]
        self._pairs = [(tensor, factor) for tensor, factor in tensors if factor is not None]
        left = [linear(factor.T.contiguous(), tensor.flatten(1)).T for tensor, factor in self._pairs]
        self._sent = self._packed([*left, *self._whole])
        self._pending = axis.all_reduce(self._sent, name)

    def wait(self) -> None:
        """Return once the sums are in place."""
        self._pending.wait()
        shapes = [(len(tensor), factor.shape[1]) for tensor, factor in self._pairs]
        summed = self._unpacked(self._sent, [*shapes, *(tuple(each.shape) for each in self._whole)])
        for tensor, total in zip(self._whole, summed[len(shapes) :], strict=True):
            tensor.copy_(total)
        if not self._pairs:
            return
        left = [torch.linalg.qr(each).Q for each in summed[: len(shapes)]]
        right = [(each.T @ tensor.flatten(1)).T for (tensor, _), each in zip(self._pairs, left, strict=True)]
        sent = self._packed(right)
        self._axis.all_reduce(sent, self._name).wait()
        sums = self._unpacked(sent, [tuple(factor.shape) for _, factor in self._pairs])
        for (tensor, factor), one, other in zip(self._pairs, left, sums, strict=True):
            factor.copy_(torch.where(other.isfinite().all(), other, factor))
            torch.mm(one, other.T, out=tensor.view(len(tensor), -1))

    def _packed(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return copies of tensors, one after another."""
        elements = sum(each.numel() for each in tensors)
        device = tensors[0].device if tensors else torch.device("cpu")
        packed = new_buffer(elements, dtype=torch.float32, device=device)
        for part, each in zip(packed.split([each.numel() for each in tensors]), tensors, strict=True):
            part.view(each.shape).copy_(each)
        return packed

    def _unpacked(self, packed: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        parts = packed.split([torch.Size(shape).numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


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


class CompressedScatter:
    """A reduce-scatter, compressed, with this rank's error memory.

    Args:
        axis: The ranks.
        compression: What is sent; not powersgd.
        feedback: Share of what was left out of one exchange that is added to the next.
    """

    def __init__(self, axis: Axis, compression: Compression, feedback: float) -> None:
        self._axis = axis
        self._codec = codec_of(compression)
        self._has_fixed_size = compression.has_fixed_size
        self._chooses_alike = compression.kind == "random"  # by the seed of the part, on all ranks
        self.memory = ErrorMemory(feedback)

    def kept(self) -> dict[str, torch.Tensor]:
        """See `CompressedSum.kept`."""
        return {} if self.memory.left is None else {"error": self.memory.left}

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """See `CompressedSum.restore`."""
        self.memory.left = kept.get("error")

    def start(self, parts: torch.Tensor, name: str, number: int) -> Pending:
        """Begin to sum; once waited for, this rank's part has its sum, and the others are undefined.

        Args:
            parts: `[size x n]`, fp32, contiguous.
            name: Name of the collectives in the Timeline.
            number: Another number for each exchange, equal on all ranks.
        """
        size, index, codec = self._axis.size, self._axis.index, self._codec
        part = len(parts) // size
        capacity = codec.payload(part)
        sent = new_buffer(size * capacity, dtype=torch.uint8, device=parts.device)
        seed = number * size if self._chooses_alike else seed_of(number, index)
        self.memory.add_to(parts)
        written = self.memory.encode(codec, parts, part, sent.chunk(size), seed=seed)
        rows = [capacity] * size
        if not self._has_fixed_size:
            rows = self._rows(written, parts.device, name)
            sent = torch.cat([each[:bytes] for each, bytes in zip(sent.chunk(size), written, strict=True)])
        received = new_buffer(sum(rows), dtype=torch.uint8, device=parts.device)

        def finish() -> None:
            own = parts.chunk(size)[index].zero_()
            for payload in received.split(rows):
                codec.decode_add(payload, own, seed=seed + index)

        return Then(
            self._axis.all_to_all(received, sent, name, received_rows=rows, sent_rows=written), finish
        )

    def _rows(self, written: Sequence[int], device: torch.device, name: str) -> list[int]:
        """Return the bytes that come from each rank, out of those that go to each."""
        sent = torch.tensor(written, dtype=torch.int64, device=device)
        received = torch.empty_like(sent)
        self._axis.all_to_all(received, sent, f"{name} sizes").wait()
        rows: list[int] = received.tolist()
        return rows

"""The measurement: checks every contestant, then times them in turns.

At each size every contestant's result is checked first. Then come the rounds. In each round every contestant
has a turn; every other round is in reverse order, so that drift of the machine affects all equally. A turn is
as many operations as take about 50 ms, at least 3. Before them comes one operation that is not counted,
because it finds the caches as the previous contestant left them. The time of a turn is the mean over its
operations on the slowest rank.

Tensors are reused: the operations of a turn use the same tensors, as buckets of gradients do. If fresh
tensors are asked for too, every size is measured once more. Each operation then uses new tensors, in pages
that the system has just given, as malloc gives them to large tensors. The input was allocated and written
before the clock started, because its producer had to write it. The output is only allocated, so its first
page faults belong to the operation. This holds for every contestant.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TypeVar

import torch

from shoal.errors import CommunicationError
from shoal.machine.bench.collective import COLLECTIVES, Collective, Extent, Row, expected, given
from shoal.machine.bench.contestants import Buffers, Contestant, Operation, UnsupportedError, enter
from shoal.machine.bench.report import Facts, describe, plot
from shoal.machine.bench.settings import Ranks, Settings

_TURN_SECONDS = 0.05
_WARM_UP_SECONDS = 0.01
_FEWEST, _MOST = 3, 100_000
_MOST_BUFFERS = 64  # per size; smaller buffers would need more, but latency dominates their time
_FRESH_BYTES = 8 << 20  # tensors made in advance: recently written tensors are in a cache, as in training
_LARGER_THAN_ANY = 99  # larger than any right result except a product's; shows elements that were not written

Result = TypeVar("Result")


def measure(
    settings: Settings, contestants: Mapping[str, Contestant], ranks: Ranks
) -> Iterator[tuple[Row, ...]]:
    """Measure each collective at each size, one after the other; every rank must iterate.

    Args:
        settings: What to measure.
        contestants: This rank's contestants, by name.
        ranks: This rank and the number of ranks.

    Yields:
        The row of each contestant at one size of one collective, equal on all ranks. Rows for fresh tensors
        come after those for reused tensors of a collective.
    """
    for name in settings.collectives:
        collective = COLLECTIVES[name]
        has_sizes = collective.output is not Extent.NONE
        sizes = settings.sizes if has_sizes else (0,)
        for fresh in (False, True) if settings.fresh and has_sizes else (False,):
            for size in sizes:
                yield _Point(collective, size, settings, ranks, fresh).measure(contestants)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A contestant whose result was checked."""

    contestant: Contestant
    operations: tuple[Operation, ...]  # one after another, each with its own buffers
    wrong: int | None


class _Point:
    """One collective at one size.

    Args:
        collective: The collective.
        size: Bytes of the whole, as asked for; at least one element for each rank is measured.
        settings: The other settings.
        ranks: This rank and the number of ranks.
        fresh: Whether each operation is on tensors of its own.
    """

    def __init__(
        self, collective: Collective, size: int, settings: Settings, ranks: Ranks, fresh: bool = False
    ) -> None:
        self._fresh = fresh
        self._collective = collective
        self._settings = settings
        self._ranks = ranks
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        multiple = ranks.count if collective.divides else 1
        self._count = max(size // self._dtype.itemsize // multiple, 1) * multiple if size else 0

    def measure(self, contestants: Mapping[str, Contestant]) -> tuple[Row, ...]:
        """Return one row for each contestant, in their order."""
        shared: dict[str, Buffers] = {}
        ready: dict[str, _Ready] = {}
        problems: dict[str, str] = {}
        for name, contestant in contestants.items():
            if contestant.memory not in shared:
                shared[contestant.memory] = self._buffers(contestant)
            entered = self._prepare(contestant, shared[contestant.memory])
            if isinstance(entered, _Ready):
                ready[name] = entered
            else:
                problems[name] = entered
        for buffers in shared.values():
            buffers.zero()
        iterations = {name: self._warm_up(entered) for name, entered in ready.items()}
        seconds: dict[str, list[float]] = {name: [] for name in ready}
        for index in range(self._settings.rounds):
            for name in reversed(ready) if index % 2 else ready:
                seconds[name].append(self._turn(ready[name], iterations[name]))
        return tuple(
            Row(
                collective=self._collective.name,
                backend=name,
                ranks=self._ranks.count,
                bytes=self._count * self._dtype.itemsize,
                count=self._count,
                dtype=self._settings.dtype,
                op=self._settings.op if self._collective.reduces else None,
                iterations=iterations.get(name, 0),
                seconds=tuple(seconds.get(name, ())),
                wrong=ready[name].wrong if name in ready else None,
                problem=problems.get(name),
                fresh=self._fresh,
            )
            for name in contestants
        )

    def _buffers(self, contestant: Contestant, fresh: bool = False) -> Buffers:
        empty = _new_pages if fresh and contestant.memory == "cpu" else contestant.empty
        like = torch.empty(0, dtype=self._dtype)
        sizes = {
            Extent.NONE: 0,
            Extent.PART: self._count // self._ranks.count,
            Extent.WHOLE: self._count,
        }
        output = empty(sizes[self._collective.output], like)
        if self._collective.input is Extent.NONE:
            return Buffers(output, output)
        return Buffers(empty(sizes[self._collective.input], like), output)

    def _prepare(self, contestant: Contestant, buffers: Buffers) -> _Ready | str:
        """Do the collective once and check the result; return the reason if it cannot be done."""
        problem, operation = "", None
        buffers.output.fill_(_LARGER_THAN_ANY)
        buffers.input.copy_(self._of_this_rank(given))
        self._ranks.start_together()
        try:
            operation = contestant.operation(self._collective, buffers, self._settings.op)
            operation()
            contestant.finish()
        except (UnsupportedError, RuntimeError, ValueError, TypeError) as error:
            problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if self._ranks.total(operation is None or problem != ""):
            return problem or "another rank could not do it"
        assert operation is not None
        wrong = self._wrong(buffers) if contestant.communicates else None
        others = []
        for _ in range(1, self._sets):
            more = self._buffers(contestant)
            more.zero()
            others.append(contestant.operation(self._collective, more, self._settings.op))
        return _Ready(contestant, (operation, *others), wrong)

    @property
    def _sets(self) -> int:
        """Return the number of buffers that take turns."""
        size = max(self._count * self._dtype.itemsize, 1)
        return min(1 + self._settings.apart // size, _MOST_BUFFERS)

    def _wrong(self, buffers: Buffers) -> int:
        """Return the number of wrong elements on all ranks."""
        wanted = self._of_this_rank(expected)
        wrong = 0 if wanted is None else int((buffers.output.cpu() != wanted).sum())
        return int(self._ranks.total(wrong))

    def _of_this_rank(self, of: Callable[..., Result]) -> Result:
        rank, count = self._ranks.rank, self._ranks.count
        return of(self._collective, self._count, count, rank, dtype=self._dtype, op=self._settings.op)

    def _warm_up(self, ready: _Ready) -> int:
        """Warm up, and return the number of operations of a turn."""
        iterations = _FEWEST
        for seconds in (_WARM_UP_SECONDS, _TURN_SECONDS):
            iterations = min(max(_FEWEST, round(seconds / self._turn(ready, iterations))), _MOST)
        return iterations

    def _turn(self, ready: _Ready, iterations: int) -> float:
        if self._fresh:
            return self._fresh_turn(ready, iterations)
        operations = cycle(ready.operations)
        self._start(next(operations), ready)
        seconds = self._time(islice(operations, iterations), ready)
        return self._ranks.largest(seconds / iterations)

    def _fresh_turn(self, ready: _Ready, iterations: int) -> float:
        size = max(self._count * self._dtype.itemsize, 1)
        together = min(max(_FRESH_BYTES // size, 1), _MOST_BUFFERS)
        parts, seconds = math.ceil(iterations / together), 0.0
        for _ in range(parts):
            operations = [self._fresh_operation(ready.contestant) for _ in range(together)]
            self._start(ready.operations[0], ready)
            seconds += self._time(operations, ready)
        return self._ranks.largest(seconds / (parts * together))

    def _fresh_operation(self, contestant: Contestant) -> Operation:
        buffers = self._buffers(contestant, fresh=True)
        buffers.input.zero_()
        return contestant.operation(self._collective, buffers, self._settings.op)

    def _start(self, operation: Operation, ready: _Ready) -> None:
        """Do one operation that is not counted, so that the ranks start together."""
        self._ranks.start_together()
        operation()
        ready.contestant.finish()

    @staticmethod
    def _time(operations: Iterable[Operation], ready: _Ready) -> float:
        start = time.perf_counter()
        for operation in operations:
            operation()
        ready.contestant.finish()
        return time.perf_counter() - start


def _new_pages(elements: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a memory mapping of its own, which is freed with it."""
    nbytes = max(elements, 1) * like.element_size()
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype, count=elements) if elements else torch.empty_like(like)


Report = Callable[[Iterable[tuple[Row, ...]], Facts], None]


def run(settings: Settings, ranks: Ranks, report: Report, picture: Path | None) -> None:
    """Measure, within the default group of the ranks.

    Args:
        settings: What to measure.
        ranks: This rank and the number of ranks.
        report: Function that iterates over the measurements and prints them, on rank 0.
        picture: The file to plot to, if any.

    Raises:
        CommunicationError: On rank 0, after the report: a result was wrong.
    """
    torch.set_num_threads(1)
    contestants = {
        name: enter(name, algorithms=settings.algorithms, local_rank=ranks.local_rank)
        for name in settings.backends
    }
    rows: list[Row] = []

    def measured() -> Iterable[tuple[Row, ...]]:
        for point in measure(settings, contestants, ranks):
            rows.extend(point)
            yield point

    if ranks.rank != 0:
        for _ in measured():
            pass
        return
    versions = {name: contestant.version() for name, contestant in contestants.items()}
    report(measured(), Facts(settings=settings, ranks=ranks.count, machine=describe(), versions=versions))
    if picture is not None:
        plot(rows, picture)
        print(f"plot written to {picture}", file=sys.stderr)
    if wrong := sum(row.wrong or 0 for row in rows):
        raise CommunicationError(f"{wrong} elements of results are wrong; see the lines below the tables")


@contextlib.contextmanager
def stdout_for_data() -> Iterator[None]:
    """Within this context, send the output of native libraries to stderr, so that only Python uses stdout."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as data:
        os.dup2(2, 1)
        try:
            with contextlib.redirect_stdout(data):
                yield
        finally:
            data.flush()
            os.dup2(data.fileno(), 1)

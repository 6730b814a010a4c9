"""The reduction of buckets' gradients while backward still runs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import CheckpointFunction

from shoal.errors import LayoutError, TrainingError
from shoal.parallel.data.block_order import NO_BACKWARD
from shoal.parallel.data.bucket import Bucket, CompressedBucket
from shoal.parallel.data.gradient_sum import GradientSum


class GradientReduction:
    """Reduce buckets while backward still runs, in an order that is equal on every rank.

    Each parameter's hook adds its gradient to the bucket's sum. The strategy decides when a reduction may
    start: `reduce_complete` for `on_complete`, or `reduce` at places that all ranks come to. At the end of
    backward the remaining buckets, whose parameters the loss did not all depend on, are reduced too, and all
    reductions are waited for.

    Args:
        buckets: The buckets, in the order in which backward is expected to complete them.
        finish: Hands over a bucket's sum: `GradientSum.give`, or `GradientSum.give_and_free`.
        on_complete: Called when all of a bucket's gradients of one backward are there.
        before_end: Called when backward ends, before the remaining buckets are reduced.
        on_end: Called at the end of every backward.
        waits: Whether a bucket's reduction is waited for when the second one after it begins, so that its
            memory is free early. It must be False if ranks that reduce together also synchronise within a
            backward: a rank that waits for a bucket which another starts only at the end would never reach
            that point.
        defers: Whether the first backward reduces at its end alone. It shows whether the model runs backwards
            inside of it, which may give a parameter several gradients.

    Attributes:
        makes_graph: Whether the last backward made a graph of itself (`create_graph=True`).
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        finish: Callable[[GradientSum], None],
        on_complete: Callable[[GradientReduction], None] = lambda reduction: None,
        before_end: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        waits: bool = True,
        defers: bool = False,
    ) -> None:
        self._paused = False
        self._defers = defers
        self._waits = waits
        self._sums = [GradientSum(bucket) for bucket in buckets]
        self._finish_sum = finish
        self._on_complete = on_complete
        self._before_end = before_end
        self._on_end = on_end
        self._backward = NO_BACKWARD
        self._is_nested: bool | None = None  # unknown in the first backward
        self.makes_graph = False
        self._early: list[int] | None = None
        self._complete_here: dict[int, bool]
        self._missing: list[int]
        self._reset()
        for position, gradient_sum in enumerate(self._sums):
            gradient_sum.hold_hooks(partial(self._hook, position))

    def exchanges(self) -> dict[str, CompressedBucket]:
        """Return the exchange of each bucket, by the bucket's name."""
        return {each.bucket.name: each.exchange for each in self._sums}

    @property
    def is_paused(self) -> bool:
        """Whether backwards reduce nothing."""
        return self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Make backward add to the sums and reduce nothing, while this context lasts."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def start(self) -> None:
        """Begin to reduce the sums that backwards within `pause` added up."""
        for gradient_sum in self._sums:
            gradient_sum.start_reduction()

    def finish(self) -> None:
        """End the reductions that `start` began."""
        for gradient_sum in self._sums:
            gradient_sum.continue_reduction()
        for gradient_sum in self._sums:
            self._finish_sum(gradient_sum)
        self._on_end()

    def call_hooks(self) -> None:
        """Call users' hooks on the parameters with a new gradient, after the last backward of a step."""
        for gradient_sum in self._sums:
            gradient_sum.call_hooks()

    def clear(self) -> None:
        """Forget all gradients of backwards that were not reduced."""
        for gradient_sum in self._sums:
            gradient_sum.clear()
        self._reset()
        self._backward = NO_BACKWARD

    def begin(self) -> None:
        """Begin a backward that all ranks make; it then reduces even without a gradient here.

        Raises:
            TrainingError: The previous backward did not end.
        """
        current = torch._C._current_graph_task_id()
        if current != self._backward:
            if _is_within_backward():
                if not self._is_nested:
                    self._expect_more()
                if self._backward != NO_BACKWARD:
                    return
            if self._backward != NO_BACKWARD:
                raise TrainingError(
                    "a backward began before the last one ended: if the last one raised an error, call "
                    "zero_grad() of the parallel model first"
                )
            self._backward = current
            self._missing = [
                sum(parameter.requires_grad for parameter in gradient_sum.bucket.parameters)
                for gradient_sum in self._sums
            ]
            self.makes_graph = torch.is_grad_enabled()
            Variable._execution_engine.queue_callback(self._end_backward)

    def _expect_more(self) -> None:
        """Reduce nothing before the end of a backward from now on: the model runs backwards inside of it.

        Each of these may add to a gradient, as reversible layers that share weights do.
        """
        self._is_nested = True
        for gradient_sum in self._sums:
            gradient_sum.move_waiting()

    def reduce_complete(self) -> None:
        """Start the buckets whose gradients are all there, up to the first that lacks one."""
        if self._is_nested or (self._is_nested is None and self._defers):
            return
        while self._next < len(self._sums) and self._missing[self._next] == 0:
            self.reduce([self._next])
            self._next += 1

    def reduce(self, positions: Iterable[int]) -> None:
        """Start these buckets, by position, unless started in this backward; missing gradients count as zero.

        The shard sum of the bucket started before each has had time to complete, and so has the replica sum
        of the one before that, whose buffer may be freed.
        """
        if not self._is_nested:
            self._start(positions)

    def _start(self, positions: Iterable[int]) -> None:
        for position in () if self._paused else positions:
            if self._is_started[position]:
                continue
            self._sums[position].start_reduction()
            if self._started:
                self._sums[self._started[-1]].continue_reduction(may_wait=self._waits)
            if self._waits and len(self._started) > 1:
                self._finish_sum(self._sums[self._started[-2]])
            self._started.append(position)
            self._is_started[position] = True

    def reduce_early(self, positions: Sequence[int]) -> None:
        """Start these buckets, by position, if in the first backward they were complete here on every rank.

        The place in backward at which the root's gradients are complete is not known before that. A bucket
        of which a part was frozen then is never started early: it may be trained later.
        """
        if self._early is not None:
            self.reduce(self._early)
        elif not self._paused and not self._complete_here:
            self._complete_here = {position: self._is_complete(position) for position in positions}

    def _is_complete(self, position: int) -> bool:
        """Return whether all parameters of a bucket have got their gradients in this backward."""
        parameters = self._sums[position].bucket.parameters
        return self._missing[position] == 0 and all(each.requires_grad for each in parameters)

    def _hook(self, position: int, index: int) -> Callable[[torch.Tensor], None]:
        # The garbage collector does not see what a parameter's hooks hold; so they must not hold the
        # parameter.
        reference = weakref.ref(self)

        def ready(_: torch.Tensor) -> None:
            reduction = reference()
            if reduction is not None:
                reduction._take(position, index)

        return ready

    def _take(self, position: int, index: int) -> None:
        self.begin()
        with torch.no_grad():
            self._add(position, index)

    def _add(self, position: int, index: int) -> None:
        bucket = self._sums[position].bucket
        if self._is_nested and (self._is_started[position] or (position, index) in self._scaled):
            raise LayoutError(
                f"{bucket.layout.slots[index].name} got a second gradient in a backward: the model runs "
                "backwards inside of it, as reversible layers do, and uses the parameter elsewhere too",
                possible="parameters that only these layers use; shard=none, if these run in the first step",
                change="give these layers parameters of their own, or use another shard",
            )
        if self._is_started[position]:
            raise TrainingError(
                f"{bucket.layout.slots[index].name} got a gradient after the place in backward where it was "
                "complete before: the model uses it outside of its block, or in another place than in the "
                "first step"
            )
        is_last = not self._paused and self._is_nested is False  # no other gradient comes in this backward
        if is_last:
            self._scaled.add((position, index))
        self._sums[position].add(index, bucket.family.factor if is_last else 1.0)
        self._missing[position] -= 1
        if self._missing[position] == 0 and not self._paused:
            self._on_complete(self)

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._before_end()
        for gradient_sum in self._sums:
            gradient_sum.move_waiting()
        self._is_nested = bool(self._is_nested)
        self._start(range(len(self._sums)))
        left = self._started[-2:] if self._waits else self._started
        for position in left:
            self._sums[position].continue_reduction()
        for position in left:
            self._finish_sum(self._sums[position])
        if self._complete_here:
            self._early = [
                position for position, here in self._complete_here.items() if self._agree(position, here)
            ]
        self._reset()
        self._backward = NO_BACKWARD
        self._on_end()

    def _agree(self, position: int, is_complete: bool) -> bool:
        """Return whether this is true on all ranks that reduce the bucket."""
        bucket = self._sums[position].bucket
        others = torch.tensor(float(not is_complete), device=bucket.weights.device)
        bucket.family.reduce.all_reduce(others, bucket.name).wait()
        bucket.family.summed.all_reduce(others, bucket.name).wait()
        return others.item() == 0

    def _reset(self) -> None:
        self._scaled: set[tuple[int, int]] = set()  # the factor is in these sums
        self._next = 0
        self._started: list[int] = []
        self._is_started = [False] * len(self._sums)
        self._complete_here = {}


def _is_within_backward() -> bool:
    """Return whether this backward was called by the backward of a function, as reversible layers do.

    Raises:
        LayoutError: The function is a recompute that does not show when gradients are complete.
    """
    frame: FrameType | None = sys._getframe()
    has_begun = False
    while frame is not None:
        code = frame.f_code
        if code is CheckpointFunction.backward.__code__:
            raise LayoutError(
                "the model recomputes with use_reentrant=True",
                possible="use_reentrant=False, which shows when gradients are complete, or recompute=full in "
                "the Plan",
                change="give checkpoint() use_reentrant=False",
            )
        has_begun |= code is _engine_run_backward.__code__
        if has_begun and code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False

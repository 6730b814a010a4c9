"""The compressed exchange of a bucket's gradients: between workers, or between the ranks of the only one.

A buffer of gradients says at its end which ranks have which gradients. These numbers are summed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shoal.parallel.communication import Pending
from shoal.parallel.data.bucket import Bucket
from shoal.parallel.exchange.scatter import CompressedScatter
from shoal.parallel.exchange.sums import CompressedSum, sum_over

_EXCHANGES = 1 << 16
"""More than the exchanges of a bucket in one step."""


class CompressedBucket:
    """The exchange of one bucket's gradients, where its Plan compresses them.

    Args:
        bucket: The bucket.

    Attributes:
        scatter: The sum over shards, if it is compressed.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._step = self._exchanges = 0
        self.scatter: CompressedScatter | None = None
        self._sum: CompressedSum | None = None
        self._before: list[torch.Tensor] = []  # weights before others were loaded
        self._changes: int | None = None  # how often the compression had changed when the sum was made
        compressing = bucket.compressing
        if compressing is None or compressing.is_between_workers or not bucket.trains:
            return
        if bucket.family.reduce.size > 1:
            compression, feedback = compressing.compression, compressing.feedback
            self.scatter = CompressedScatter(bucket.family.reduce, compression, feedback)

    @property
    def sum(self) -> CompressedSum | None:
        """The sum over replicas, if it is compressed."""
        compressing, family = self._bucket.compressing, self._bucket.family
        if compressing is None or not compressing.is_between_workers or not self._bucket.trains:
            return None
        if self._changes != compressing.changes:
            self._changes, self._sum = compressing.changes, None
            compression, feedback = compressing.compression, compressing.feedback
            if compression.kind != "none" and family.summed.size > 1:
                self._sum = sum_over(family.summed, compression, feedback, self._matrices)
        return self._sum

    @property
    def compresses_shards(self) -> bool:
        """Whether the sum over the ranks that hold the bucket's shards is compressed in this step."""
        return self.scatter is not None and self._is_on

    @property
    def compresses_replicas(self) -> bool:
        """Whether the sum over the bucket's replicas is compressed in this step."""
        return self._is_on and self.sum is not None

    @property
    def _is_on(self) -> bool:
        return self._bucket.compressing is not None and self._bucket.compressing.is_on

    def kept(self) -> dict[str, torch.Tensor]:
        """Return what the next exchange on this rank depends on, by name."""
        exchange = self.sum or self.scatter
        return {} if exchange is None or self._has_others else exchange.kept()

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `kept` returned."""
        self._before = []
        exchange = self.sum or self.scatter
        if exchange is not None:
            exchange.restore(kept)

    def expect_others(self) -> None:
        """Forget what was left out, if the next exchange finds other weights than the present ones.

        An evaluation may load an average, and then the weights that were there before.
        """
        if not self._before and self.kept():
            self._before = [owned.local.clone() for owned in self._bucket.owned]

    @property
    def _has_others(self) -> bool:
        return not all(map(torch.equal, self._before, (owned.local for owned in self._bucket.owned)))

    def _forget_if_others(self) -> None:
        if self._has_others:
            self.restore({})
        self._before = []

    def all_reduce(self, sums: torch.Tensor) -> Pending:
        """Begin to sum a whole buffer, or this rank's rows of one, over the replicas, in place."""
        self._forget_if_others()
        bucket, layout = self._bucket, self._bucket.layout
        is_whole = layout.shards == 1
        elements = layout.elements if is_whole else layout.packed_elements
        if is_whole:
            layout.clear_gaps(sums)
        summed = self.sum
        assert summed is not None
        vector, presence = sums[:elements], sums[elements:]
        pending = summed.start(vector, bucket.name, self._number())
        return _Both([pending, bucket.family.summed.all_reduce(presence, f"{bucket.name} presence")])

    def reduce_scatter(self, buffer: torch.Tensor) -> Pending:
        """Begin to sum a buffer; this rank gets the sums of its rows, in place."""
        self._forget_if_others()
        bucket, layout = self._bucket, self._bucket.layout
        reduce = bucket.family.reduce
        packed = buffer.new_zeros(layout.shards * layout.packed_elements)
        for shard, part in enumerate(packed.chunk(layout.shards)):
            torch._foreach_copy_(layout.packed_parts(part, shard), layout.parts(buffer, shard))
        assert self.scatter is not None
        presence = buffer[layout.elements :]
        own = presence.chunk(layout.shards)[reduce.index]

        def finish() -> None:
            mine = packed.chunk(layout.shards)[reduce.index]
            torch._foreach_copy_(layout.parts(buffer, reduce.index), layout.packed_parts(mine, reduce.index))

        return _Both(
            [
                self.scatter.start(packed, bucket.name, self._number()),
                reduce.reduce_scatter(own, presence, f"{bucket.name} presence"),
            ],
            finish,
        )

    def _matrices(self, vector: torch.Tensor) -> Sequence[torch.Tensor]:
        layout = self._bucket.layout
        if layout.shards == 1:
            return layout.views(vector)
        return layout.packed_parts(vector, self._bucket.family.shard.index)

    def _number(self) -> int:
        """Return another number for each exchange of the training."""
        compressing = self._bucket.compressing
        assert compressing is not None
        if self._step != compressing.step:
            self._step, self._exchanges = compressing.step, 0
        self._exchanges += 1
        return self._step * _EXCHANGES + self._exchanges


class _Both:
    """Collectives that were started together, and the work to do once all are complete."""

    def __init__(self, pending: Sequence[Pending], finish: Callable[[], object] = lambda: None) -> None:
        self._pending = pending
        self._finish = finish

    def wait(self) -> None:
        """Return once all results may be used."""
        for each in self._pending:
            each.wait()
        self._finish()

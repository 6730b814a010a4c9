"""A bucket of parameters: the weights that compute, and the rows of them that this rank owns.

weights    [elements], the type that computes; the model's parameters are views of it
master     this rank's rows, fp32; the optimizer changes them. If the weights are fp32 too and stay in
           memory, they are rows of the weights; otherwise they have memory of their own. Rows of parameters
           that are not trained have the type that computes. In files (`offload`) they are read for a gather.

The compressed exchange of a bucket's gradients: between workers, or between the ranks of the only one.

A buffer of gradients says at its end which ranks have which gradients. These numbers are summed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from shoal.collectives import use_huge_pages
from shoal.errors import LayoutError
from shoal.parallel.axes import Family
from shoal.parallel.communication import Pending, Striped, new_buffer
from shoal.parallel.exchange.compressed_sums import CompressedScatter, CompressedSum, Compressing, sum_over
from shoal.parallel.local_shards import BucketLayout, Cut, Frozen, Owned, as_sharded, like, memory_order
from shoal.parallel.offload.storage import Storage, Stored, StoredShard, aligned_buffer, note_norms
from shoal.parallel.parameter_init import FirstValues

Named = tuple[str, nn.Parameter]
"""A parameter of the model with its name."""


class Bucket:
    """Parameters that are gathered, reduced and sharded together.

    Args:
        name: Name of the bucket's collectives in the Timeline.
        parameters: The model's parameters, in the order of the buffer; all trained, or none.
        family: The ranks to communicate with; the bucket is cut into one shard per rank of `family.shard`.
        dtype: Type of the weights that compute.
        resident: Whether the weights stay in memory; if not, they begin dropped.
        first_values: Gives the first values.
        cuts: This rank's block of each parameter that tp or ep cuts, by name.
        wire: Type in which ranks send each other gradients.
        compressing: How ranks compress gradients that they send each other; None if they do not.
        storage: Files for the rows that this rank owns, or for their gradients; None if there are none.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[Named],
        *,
        family: Family,
        dtype: torch.dtype,
        resident: bool,
        first_values: FirstValues,
        cuts: Mapping[str, Cut],
        wire: torch.dtype = torch.float32,
        compressing: Compressing | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.name = name
        self.compressing = compressing
        self.wire = wire
        self.family = family
        self.parameters = [parameter for _, parameter in parameters]
        self.trains = self.parameters[0].requires_grad
        self.layout = BucketLayout.of(
            [(name, tuple(each.shape), memory_order(each)) for name, each in parameters], family.shard.size
        )

        elements, device = self.layout.elements, self.parameters[0].device
        kept = torch.float32 if self.trains else dtype  # the type of the master weights
        self._is_resident = resident
        self._shares_memory = resident and dtype == kept
        if resident:
            first = self.weights = new_buffer(elements, dtype=kept, device=device).zero_()
            for slot, view in zip(self.layout.slots, self.layout.views(first), strict=True):
                first_values.fill(slot.name, view)
            if dtype != kept:
                self.weights = new_buffer(elements, dtype=dtype, device=device).copy_(first)
        else:  # ordinary memory, which can be emptied
            self.weights = torch.empty(elements, dtype=dtype, device=device)
        self._views = self.layout.views(self.weights)
        self._weight_parts = self.parts(self.weights)
        self._has_files = storage is not None and storage.tiers.has_files
        self._shard: StoredShard | None = None
        if storage is not None and storage.has_shards and not resident:
            self._shard = StoredShard(storage, self.layout.packed_elements, kept, trains=self.trains)
        if not resident:
            self.weights.untyped_storage().resize_(0)  # until the first gather
            self._master = self._filled(first_values, kept)
        elif self._shares_memory:
            self._master = self._weight_parts
        else:
            self._master = self._copied(self.parts(first))
        self._striped = Striped(family.shard, self.layout.stripes)
        self.gradients = Striped(family.reduce, self.layout.gradient_stripes)
        self.whole = self._shares_memory and family.shard.size == 1 and family.is_mean
        self._show_weights()
        self.owned = self._owned(cuts) if self.trains else []
        self.frozen = [] if self.trains else self._frozen(cuts)

        self._gathering: Pending | None = None
        self._absent = torch.full((), torch.nan, dtype=dtype, device=device)
        self.dropped = False
        self._versions = [each._version for each in self.parameters]
        self._noted: list[torch.Tensor] | None = None  # this rank's rows of the weights, within `gathered`
        if not resident:
            self.drop_weights()

    @property
    def is_current(self) -> bool:
        """Whether the weights are up to date without a gather: they lie in the owners' memory."""
        return self._shares_memory and self.family.shard.size == 1

    def parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's rows of every parameter in a buffer `[elements]`."""
        return self.layout.parts(buffer, self.family.shard.index)

    def start_gather(self) -> None:
        """Begin to update the weights from every shard's master."""
        self.finish_gather()
        self.follow_assignments()
        self.take_writes(are_current=False)
        if self.dropped:
            storage = self.weights.untyped_storage()
            storage.resize_(self.weights.numel() * self.weights.element_size())
            if self._has_files:  # freed memory goes back to the system
                use_huge_pages(self.weights.data_ptr(), self.weights.nbytes)
            self._show_weights()
            self.dropped = False
        if self._shard is not None and self._shard.parameters is not None:
            self._shard.start_read()
            return
        if not self._shares_memory:
            torch._foreach_copy_(self._weight_parts, self._master)
        self._gathering = self._striped.all_gather(self.weights, self.name)

    def follow_assignments(self) -> None:
        """Compute with the tensors that were assigned to `.data` of owned parameters.

        The tensors that were there before keep their values: somebody may hold them, to assign them again.

        Raises:
            LayoutError: The parameters are in files.
        """
        if not self.trains or self.whole:  # there are no owned parts, or they are the model's parameters
            return
        current = [owned.local for owned in self.owned]
        pairs = zip(current, self._master, strict=True)
        if not any(given.numel() and given.data_ptr() != own.data_ptr() for given, own in pairs):
            return
        if self._shard is not None and self._shard.parameters is not None:
            raise LayoutError(
                f"a tensor was assigned to .data of a parameter of {self.name}, which is in a file",
                possible="parameter.data.copy_(value), and clones of values that are needed again",
                change="copy the values",
            )
        if not self._shares_memory:
            self._master = current
            return
        self._move_weights(self._assigned())
        torch._foreach_copy_(self._master, current)

    def finish_gather(self) -> None:
        """Wait for a gather that was begun, if there is one."""
        if self._shard is not None and self._shard.is_reading:
            read = self.layout.packed_parts(self._shard.finish_read(), self.family.shard.index)
            torch._foreach_copy_(self._weight_parts, read)
            self._gathering = self._striped.all_gather(self.weights, self.name)
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self.note_values(is_on=self._noted is not None)

    def note_values(self, *, is_on: bool) -> None:
        """Let `take_writes` find writes through `.data` too, which torch does not count, or no longer."""
        notes = is_on and not self._shares_memory
        self._noted = [part.clone() for part in self._weight_parts] if notes else None

    def count_write(self) -> None:
        """Make backwards fail that go through earlier uses of the weights, as after a write in place."""
        self.take_writes(are_current=False)
        torch.autograd.graph.increment_version(self.parameters)
        self._versions = [each._version for each in self.parameters]

    def take_writes(self, *, are_current: bool) -> None:
        """Take what was written to the model's parameters since the last call for the owner's rows.

        They were written in place, or a tensor was assigned to their `.data`.

        Args:
            are_current: Whether the weights equal the owners' rows, but for what was written.

        Raises:
            LayoutError: They do not, or the rows are in a file; or a tensor of another shape was assigned.
        """
        versions = [each._version for each in self.parameters]
        pairs = zip(self._versions, versions, strict=True)
        assigned = self._assigned()
        written = {index for index, (before, now) in enumerate(pairs) if now != before} | assigned.keys()
        self._versions = versions
        if assigned and not self.dropped:
            self._move_weights(assigned)
        noted = self._noted
        if noted is not None and not self.dropped:
            values = enumerate(zip(noted, self._weight_parts, strict=True))
            written |= {index for index, (before, now) in values if not torch.equal(before, now)}
        if not written or self._shares_memory:
            return
        if (
            not are_current
            or noted is None
            or self.dropped
            or (self._shard is not None and self._shard.parameters is not None)
        ):
            raise LayoutError(
                f"the model's weight {self.layout.slots[min(written)].name} was written outside of "
                "gathered(), or beside a step within it, where it is only a copy of what ranks own",
                possible="writes within `with parallel.gathered():`, the same on all ranks, unless weights "
                "are in files; writes to parameters() of what shoal.parallelize returned",
                change="write within gathered(); after a step within it, call the model first",
            )
        for index in written:
            master, part = self._master[index], self._weight_parts[index]
            is_written = part != noted[index]  # the others keep what fp32 has beyond the weights
            master.copy_(torch.where(is_written, part.to(master.dtype), master))
        self.note_values(is_on=True)

    def _move_weights(self, assigned: Mapping[int, torch.Tensor]) -> None:
        """Move the weights to new memory, and there take other values for some parameters, by index.

        The memory before keeps its values: somebody may hold it, to assign it again.
        """
        before = self.weights
        if self._is_resident:
            self.weights = new_buffer(before.numel(), dtype=before.dtype, device=before.device).copy_(before)
        else:
            self.weights = before.clone()
        self._views = self.layout.views(self.weights)
        self._weight_parts = self.parts(self.weights)
        for index, value in assigned.items():
            self._views[index].copy_(value)
        self._show_weights()
        if self._shares_memory:
            self._master = self._weight_parts
            for owned, local in zip(self.owned, self._master, strict=True):
                owned.parameter.data = like(owned.parameter, from_dlpack(local))

    def _assigned(self) -> dict[int, torch.Tensor]:
        """Return the tensors that were assigned to `.data` of the model's parameters, by index."""
        if self.whole:  # the optimizer changes the parameter itself, wherever it lies
            return {}
        places = [self._absent.data_ptr()] * len(self._views) if self.dropped else self._places
        assigned = {}
        for index, (parameter, place) in enumerate(zip(self.parameters, places, strict=True)):
            if parameter.data_ptr() == place or parameter.numel() == 0:
                continue
            slot = self.layout.slots[index]
            if parameter.shape != slot.shape:
                raise LayoutError(
                    f"a tensor of shape {list(parameter.shape)} was assigned to .data of {slot.name}",
                    possible=f"the shape of the model's parameter, {list(slot.shape)}",
                    change="give a tensor of this shape",
                )
            assigned[index] = parameter.detach()
        return assigned

    def drop_weights(self) -> None:
        """Free the weights; until the next gather the model's parameters read as NaN.

        The storage is emptied and not replaced: autograd saved views of it, and they are valid again once the
        weights are back.
        """
        self.finish_gather()
        self.take_writes(are_current=True)
        for parameter in self.parameters:
            parameter.data = self._absent.expand(parameter.shape)
        self.weights.untyped_storage().resize_(0)
        self.dropped = True

    def _copied(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the parts, as views of one new tensor."""
        if not parts:
            return []
        packed = parts[0].new_zeros(self.layout.packed_elements)
        copies = self.layout.packed_parts(packed, self.family.shard.index)
        torch._foreach_copy_(copies, list(parts))
        return copies

    def _filled(self, first_values: FirstValues, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return this rank's rows with their first values, as views of one new tensor."""
        if self._shard is not None and self._shard.parameters is not None:
            packed = self._shard.parameters.tensor
        else:
            packed = self.weights.new_zeros(self.layout.packed_elements, dtype=dtype)
        filled = self.layout.packed_parts(packed, self.family.shard.index)
        for slot, part in zip(self.layout.slots, filled, strict=True):
            first_values.fill_rows(slot.name, slot.shape, slot.rows(self.family.shard.index), part)
        return filled

    @property
    def stores_gradients(self) -> bool:
        """Whether the gradients of owned parameters are kept in a file."""
        return self._shard is not None and self._shard.gradients is not None

    def store_gradients(self) -> None:
        """Move the gradients of owned parameters to the file."""
        assert self._shard is not None
        assert self._shard.gradients is not None
        index = self.family.shard.index
        staged = aligned_buffer(self._shard.elements, torch.float32)
        mapped = self.layout.packed_parts(self._shard.gradients.tensor, index)
        noted = []
        parts = self.layout.packed_parts(staged, index)
        for owned, part, view in zip(self.owned, parts, mapped, strict=True):
            if owned.gradient is not None and owned.stored is not None:
                part.copy_(owned.gradient)
                owned.give(view)
                gradient = owned.parameter.grad
                # Otherwise another stage's gradient is still to be added.
                if owned.family.tied_ranks is None and gradient is not None:
                    noted.append((owned.stored, part, gradient))
        note_norms(noted)
        self._shard.write_gradients(staged)

    def _show_weights(self) -> None:
        self._places = [view.data_ptr() for view in self._views]
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def _owned(self, cuts: Mapping[str, Cut]) -> list[Owned]:
        owned = []
        for slot, parameter, local in zip(self.layout.slots, self.parameters, self._master, strict=True):
            cut = cuts.get(slot.name)
            start, stop = slot.interval(self.family.shard.index)
            given = parameter
            if not self.whole:
                given = nn.Parameter(self._for_optimizer(slot.shape, local))
            owned.append(
                Owned(
                    slot.name,
                    slot.shape if cut is None else cut.shape,
                    start,
                    stop,
                    given,
                    self.family,
                    cut,
                    None if self._shard is None else Stored(self._shard, slot.packed),
                )
            )
        return owned

    def _for_optimizer(self, shape: tuple[int, ...], local: torch.Tensor) -> torch.Tensor:
        return local if self.family.mesh is None else as_sharded(local, shape, self.family.mesh)

    def _frozen(self, cuts: Mapping[str, Cut]) -> list[Frozen]:
        shard = self.family.shard
        frozen = []
        for slot, local in zip(self.layout.slots, self._master, strict=True):
            cut = cuts.get(slot.name)
            frozen.append(
                Frozen(
                    slot.name,
                    slot.shape if cut is None else cut.shape,
                    slot.interval(shard.index)[0],
                    local,
                    cut,
                    self.family.is_first,
                    self.family,
                    self.family.mesh,
                )
            )
        return frozen


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

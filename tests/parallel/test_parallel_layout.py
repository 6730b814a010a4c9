import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.local_shards import ALIGNMENT, BucketLayout, fill_buckets, memory_order

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)
cuts = st.tuples(shapes, st.integers(1, 7)).filter(lambda each: each[1] == 1 or all(each[0]))


def laid(shapes, shards):
    named = [(str(index), shape, tuple(range(len(shape)))) for index, shape in enumerate(shapes)]
    return BucketLayout.of(named, shards)


@given(cuts)
def test_each_shard_has_the_rows_that_torch_chunk_gives_it(cut):
    shapes, shards = cut
    layout = laid(shapes, shards)
    buffer = torch.zeros(layout.elements)
    wholes = [torch.randn(shape) for shape in shapes]
    for whole, view in zip(wholes, layout.views(buffer), strict=True):
        view.copy_(whole)
    for shard in range(shards):
        packed = torch.empty(layout.packed_elements)
        for into, part in zip(layout.packed_parts(packed, shard), layout.parts(buffer, shard), strict=True):
            into.copy_(part)
        held = zip(
            wholes, layout.slots, layout.parts(buffer, shard), layout.packed_parts(packed, shard), strict=True
        )
        for whole, slot, part, apart in held:
            chunks = whole.chunk(shards) if whole.dim() else (whole,)
            expected = chunks[shard] if shard < len(chunks) else whole[:0]
            start, stop = slot.interval(shard)
            assert torch.equal(part, expected)
            assert torch.equal(apart, expected)
            assert torch.equal(whole.flatten()[start:stop], expected.flatten())


@given(cuts)
def test_slots_are_aligned_and_hold_an_equal_part_for_every_shard(cut):
    shapes, shards = cut
    layout = laid(shapes, shards)
    end = 0
    for slot in layout.slots:
        assert slot.offset % ALIGNMENT == 0
        assert slot.offset >= end
        end = slot.offset + shards * slot.part_elements
        # Padding is less than a row for each shard.
        assert (
            slot.elements <= shards * slot.part_elements < slot.elements + shards * max(1, slot.row_elements)
        )
    assert end <= layout.elements < end + ALIGNMENT


@given(st.lists(st.integers(1, 5), min_size=4, max_size=4), st.integers(1, 3))
def test_memory_in_channels_last_stays_so(shape, shards):
    whole = torch.randn(shape).to(memory_format=torch.channels_last)
    layout = BucketLayout.of([("weight", tuple(shape), memory_order(whole))], shards)
    (view,) = layout.views(torch.empty(layout.elements))
    assert view.is_contiguous(memory_format=torch.channels_last)
    assert view.copy_(whole).equal(whole)
    for shard in range(shards):
        (part,) = layout.parts(torch.empty(layout.elements), shard)
        assert part.numel() == 0 or part.is_contiguous(memory_format=torch.channels_last)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 60))
def test_buckets_keep_the_order_and_the_capacity(sizes, capacity):
    buckets = fill_buckets(sizes, capacity)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        held = sum(sizes[index] for index in bucket)
        assert held <= capacity or len(bucket) == 1
    for bucket, following in itertools.pairwise(buckets):
        assert sum(sizes[index] for index in bucket) + sizes[following[0]] > capacity

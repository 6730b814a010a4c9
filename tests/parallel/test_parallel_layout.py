import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.layout import ALIGNMENT, BucketLayout, fill_buckets

shapes = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, st.integers(1, 7))
def test_the_shards_hold_every_element_of_every_parameter_once(shapes, shards):
    layout = BucketLayout.of([(str(index), shape) for index, shape in enumerate(shapes)], shards)
    held = [
        (piece.slot.name, element)
        for shard in range(shards)
        for piece in layout.pieces(shard)
        for element in range(piece.start, piece.stop)
    ]
    assert sorted(held) == sorted(
        (str(index), element) for index, shape in enumerate(shapes) for element in range(math.prod(shape))
    )


@given(shapes, st.integers(1, 7))
def test_a_piece_lies_where_the_buffer_of_its_parameter_says(shapes, shards):
    layout = BucketLayout.of([(str(index), shape) for index, shape in enumerate(shapes)], shards)
    for shard in range(shards):
        for piece in layout.pieces(shard):
            in_buffer = shard * layout.shard_elements + piece.offset
            assert in_buffer == piece.slot.offset + piece.start or piece.start == piece.stop
            assert piece.offset + piece.stop - piece.start <= layout.shard_elements


@given(shapes, st.integers(1, 7))
def test_slots_are_aligned_and_do_not_overlap(shapes, shards):
    layout = BucketLayout.of([(str(index), shape) for index, shape in enumerate(shapes)], shards)
    end = 0
    for slot in layout.slots:
        assert slot.offset % ALIGNMENT == 0
        assert slot.offset >= end
        end = slot.offset + slot.elements
    assert end <= layout.elements
    assert layout.elements == shards * layout.shard_elements
    # Padding is at most one alignment for each slot and shard.
    assert layout.elements < sum(math.prod(shape) for shape in shapes) + ALIGNMENT * (len(shapes) + shards)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 60))
def test_buckets_keep_the_order_and_the_capacity(sizes, capacity):
    buckets = fill_buckets(sizes, capacity)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        held = sum(sizes[index] for index in bucket)
        assert held <= capacity or len(bucket) == 1
    for bucket, following in itertools.pairwise(buckets):
        assert sum(sizes[index] for index in bucket) + sizes[following[0]] > capacity

"""Parts of a sequence: what is cut is what is joined, gathered and summed."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.parallel import Axis
from shoal.parallel.tensor.vocabulary import cut, joined, start_gather, start_reduce_scatter
from shoal.record import NullRecorder


def axis():
    if not dist.is_initialized():
        return Axis("tp", (0,), 0, None, NullRecorder())
    return Axis("tp", tuple(range(dist.get_world_size())), dist.get_rank(), None, NullRecorder())


class Ranks:
    """An axis of any size, of which only the size is asked."""

    def __init__(self, size):
        self.size, self.name = size, "tp"


@given(size=st.integers(1, 5), batch=st.integers(1, 4), length=st.integers(1, 4), width=st.integers(1, 3))
def test_parts_joined_are_the_whole(size, batch, length, width):
    whole = torch.arange(batch * size * length * width).view(batch, size * length, width)
    parts = cut(whole, Ranks(size))
    assert torch.equal(parts, torch.stack(whole.chunk(size, 1)))
    assert torch.equal(joined(parts), whole)


def test_a_sequence_shorter_than_the_axis_is_refused():
    with pytest.raises(PlanError, match=r"3 tokens cannot be cut .* 4 ranks of tp\n.*such as 4 or 8\n"):
        cut(torch.zeros(1, 3, 2), Ranks(4))


def gather_and_scatter():
    tp = axis()
    whole = torch.arange(3.0 * 8 * 2).view(3, 8, 2)
    parts, pending = start_gather(cut(whole, tp)[tp.index], tp, "parts")
    pending.wait()
    gathered = joined(parts).clone()
    part, pending = start_reduce_scatter(parts, tp, "parts")
    pending.wait()
    return gathered, part.clone()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_are_gathered_and_summed(ranks, size):
    whole = torch.arange(3.0 * 8 * 2).view(3, 8, 2)
    for index, (gathered, part) in enumerate(ranks.run(gather_and_scatter, size)):
        assert torch.equal(gathered, whole)
        assert torch.equal(part, size * whole.chunk(size, 1)[index])

"""Collectives of several tensors in one buffer, against plain arithmetic on what all ranks bring."""

import os
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shoal.collectives import Options, Stripes, empty, is_built
from shoal.errors import CollectiveError
from shoal.parallel.communication import Axis, Striped
from shoal.record import NullRecorder

pytestmark = pytest.mark.skipif(not is_built(), reason="the native core was not built")

ROWS = (0, 1, 2, 7, 16, 333, 4097, 40_000)


def axis_of(kind):
    """All ranks, over a group of that kind: one host, hosts of one rank or of two, gloo, or copies only."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    group = None
    if size > 1 and kind == "gloo":
        group = dist.new_group(backend="gloo")
    elif size > 1:
        per_host = {"hosts of 1": 1, "hosts of 2": 2}.get(kind, size)
        hosts = {"SHOAL_HOST_ID": f"host {rank // per_host}", "MASTER_ADDR": "127.0.0.1"}
        with mock.patch.dict(os.environ, hosts):
            group = dist.new_group(pg_options=Options(direct_reads=kind != "copies", debug=kind == "copies"))
    return Axis("test", tuple(range(size)), rank, group, NullRecorder())


def draw(choose, size):
    """The stripes of up to five tensors, with gaps between them, and the elements of their buffer."""
    stripes, end = [], 0
    for _ in range(choose.randrange(6)):
        end += choose.randrange(3)
        stripes.append((end, choose.choice(ROWS)))
        end += size * stripes[-1][1]
    return stripes, end + choose.randrange(3)


def brought(seed, rank, elements, dtype):
    """What a rank brings: whole numbers, so that sums are exact in every type."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-9, 9, (elements,), generator=generator).to(dtype)


def compare(seed, kind):
    """Collectives of random stripes over one kind of group, on buffers that are shared, private, or mixed."""
    axis, choose = axis_of(kind), random.Random(seed)
    own = axis.index
    for case in range(12):
        stripes, elements = draw(choose, axis.size)
        dtype = choose.choice((torch.float32, torch.bfloat16, torch.float64))
        is_shared = [choose.random() < 0.5 for _ in axis.members][own]
        given = [brought(seed + case, rank, elements, dtype) for rank in range(axis.size)]
        buffer = empty(elements, dtype=dtype) if is_shared else torch.empty(elements, dtype=dtype)
        striped = Striped(axis, stripes)
        what = (kind, seed, case, dtype, is_shared, stripes)

        wanted = given[own].clone()
        for first, part in stripes:
            for rank, theirs in enumerate(given):
                place = slice(first + rank * part, first + (rank + 1) * part)
                wanted[place] = theirs[place]
        striped.all_gather(buffer.copy_(given[own]), "test").wait()
        assert torch.equal(buffer, wanted), ("all_gather", *what)

        total = torch.stack(given).sum(0)
        striped.reduce_scatter(buffer.copy_(given[own]), "test").wait()
        for first, part in stripes:
            place = slice(first + own * part, first + (own + 1) * part)
            assert torch.equal(buffer[place], total[place]), ("reduce_scatter", *what)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["one host", "copies", "gloo"])
def test_stripes_are_gathered_and_summed_as_plain_arithmetic_does(ranks, size, kind):
    ranks.run(compare, size, size, kind)


@pytest.mark.parametrize(("size", "kind"), [(2, "hosts of 1"), (3, "hosts of 2"), (4, "hosts of 2")])
def test_between_hosts_stripes_are_packed(ranks, size, kind):
    ranks.run(compare, size, size, kind)
    ranks.run(refuse_between_hosts, size, kind)


def refuse_between_hosts(kind):
    """What the native core would be asked for, were the stripes not packed."""
    buffer, stripes = torch.zeros(64), Stripes([(0, 4)])
    group = axis_of(kind).process_group
    for call in (group.all_gather_stripes, group.reduce_scatter_stripes):
        with pytest.raises(CollectiveError, match="within a host") as raised:
            call(buffer, stripes)
        assert raised.value.fault == "invalid"


def refuse_what_does_not_fit():
    group = dist.group.WORLD
    for buffer, stripes, message in (
        (torch.zeros(64), [(0, 132)], "not within the buffer"),
        (torch.zeros(64), [(0, 64), (120, 4)], "overlaps"),
        (torch.zeros(8, 16)[:, ::2], [(0, 4)], "contiguous"),
    ):
        with pytest.raises(CollectiveError, match=message):
            group.all_gather_stripes(buffer, Stripes(stripes))
    with pytest.raises(CollectiveError, match="whole elements"):
        group.reduce_scatter_stripes(torch.zeros(64), Stripes([(0, 6)]))
    untouched = torch.full((64,), float(dist.get_rank()))
    group.all_gather_stripes(untouched, Stripes([])).wait()
    group.reduce_scatter_stripes(untouched, Stripes([])).wait()
    assert bool((untouched == dist.get_rank()).all())


def test_stripes_that_do_not_fit_their_buffer_are_refused_before_anything_moves(ranks):
    ranks.run(refuse_what_does_not_fit, 2)

"""What `torch.distributed` offers beside the plain collectives works over the backend "shoal"."""

import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from shoal.testing import RankPool


@pytest.fixture(scope="module")
def shoal_ranks():
    with RankPool("shoal") as pool:
        yield pool


def own(*shape):
    """This rank's tensor: its rank's number plus 1, everywhere."""
    return torch.full(shape, dist.get_rank() + 1.0)


def total():
    return sum(range(1, dist.get_world_size() + 1))


# --- functional collectives ---


def through_functional_collectives(x):
    group = list(range(dist.get_world_size()))
    summed = functional.all_reduce(x, "sum", group)
    gathered = functional.all_gather_tensor(summed + x, 0, group)
    scattered = functional.reduce_scatter_tensor(gathered * 2, "avg", 0, group)
    swapped = functional.all_to_all_single(gathered, None, None, group)
    return functional.broadcast(scattered, 1, group), swapped


def functional_collectives():
    size = dist.get_world_size()
    scattered, swapped = through_functional_collectives(own(4))
    assert torch.equal(scattered, torch.full((4,), 2.0 * (total() + 2)))
    everyone = torch.cat([torch.full((4,), float(total() + rank + 1)) for rank in range(size)])
    assert torch.equal(swapped, everyone.chunk(size)[dist.get_rank()].repeat(size))


def compiled_functional_collectives():
    # Traced and decomposed as for Inductor, but run by its graph: no C++ compiler has to be there.
    compiled = torch.compile(through_functional_collectives, backend="aot_eager", fullgraph=True)
    for given, wanted in zip(compiled(own(4)), through_functional_collectives(own(4)), strict=True):
        assert torch.equal(given, wanted)


@pytest.mark.parametrize("run", [functional_collectives, compiled_functional_collectives])
def test_functional_collectives_give_what_the_formula_says(shoal_ranks, run):
    shoal_ranks.run(run, 2)


# --- objects and messages ---


def objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    told = {"rank": rank, "text": "x" * 1000 * (rank + 1)}
    everyone = [{"rank": each, "text": "x" * 1000 * (each + 1)} for each in range(size)]
    gathered = [None] * size
    dist.all_gather_object(gathered, told)
    assert gathered == everyone
    at_root = [None] * size if rank == 1 else None
    dist.gather_object(told, at_root, dst=1)
    assert rank != 1 or at_root == everyone
    given = [told, rank]
    dist.broadcast_object_list(given, src=size - 1)
    assert given == [everyone[-1], size - 1]
    part = [None]
    dist.scatter_object_list(part, everyone if rank == 0 else None, src=0)
    assert part == [everyone[rank]]
    if rank == 0:
        dist.send_object_list([told], dst=1)
    elif rank == 1:
        received = [None]
        dist.recv_object_list(received, src=0)
        assert received == [everyone[0]]


def messages_in_a_batch():
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty(1000) for _ in range(size)]
    operations = [
        each
        for peer in range(size)
        if peer != rank
        for each in (dist.P2POp(dist.isend, own(1000), peer), dist.P2POp(dist.irecv, received[peer], peer))
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for peer, tensor in enumerate(received):
        assert peer == rank or torch.equal(tensor, torch.full((1000,), peer + 1.0))


@pytest.mark.parametrize("run", [objects, messages_in_a_batch])
def test_objects_and_batches_of_messages_arrive(shoal_ranks, run):
    shoal_ranks.run(run, 3)


# --- groups and meshes ---


def groups():
    rank = dist.get_rank()
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    tensor = own(5)
    dist.all_reduce(tensor, group=odds if rank % 2 else evens)
    assert torch.equal(tensor, torch.full((5,), 6.0 if rank % 2 else 4.0))
    backwards, _ = dist.new_subgroups_by_enumeration([[3, 0], [2, 1]])
    gathered = torch.empty(2)
    dist.all_gather_into_tensor(gathered, own(1), group=backwards)
    assert gathered.tolist() == ([1, 4] if rank in (0, 3) else [2, 3])


def meshes():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name, peer in (("inner", rank ^ 1), ("outer", rank ^ 2)):
        tensor = own(3)
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert torch.equal(tensor, torch.full((3,), rank + peer + 2.0))
    flat = own(3)
    dist.all_reduce(flat, group=mesh._flatten().get_group())
    assert torch.equal(flat, torch.full((3,), float(total())))


@pytest.mark.parametrize("run", [groups, meshes])
def test_groups_of_some_ranks_communicate_among_themselves(shoal_ranks, run):
    shoal_ranks.run(run, 4)


# --- how a call is made ---


def every_collective(asynchronous):
    """Every collective through `torch.distributed`, each waited for before the next if it is asynchronous."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def done(work):
        assert (work is not None) == asynchronous
        if asynchronous:
            work.wait()

    for count in (3, 100_000):  # through slots, and directly
        everyone = [torch.full((count,), each + 1.0) for each in range(size)]
        summed = own(count)
        done(dist.all_reduce(summed, async_op=asynchronous))
        assert torch.equal(summed, torch.full((count,), float(total())))
        reduced = own(count)
        done(dist.reduce(reduced, 1, async_op=asynchronous))
        assert torch.equal(reduced, summed if rank == 1 else everyone[rank])
        given = own(count)
        done(dist.broadcast(given, 1, async_op=asynchronous))
        assert torch.equal(given, everyone[1])
        listed = [torch.empty(count) for _ in range(size)]
        done(dist.all_gather(listed, own(count), async_op=asynchronous))
        assert torch.equal(torch.cat(listed), torch.cat(everyone))
        at_root = [torch.empty(count) for _ in range(size)] if rank == 0 else None
        done(dist.gather(own(count), at_root, 0, async_op=asynchronous))
        assert rank != 0 or torch.equal(torch.cat(at_root), torch.cat(everyone))
        part = torch.empty(count)
        done(dist.scatter(part, everyone if rank == 0 else None, 0, async_op=asynchronous))
        assert torch.equal(part, everyone[rank])
        parts = [own(count) for _ in range(size)]
        done(dist.reduce_scatter(part, parts, async_op=asynchronous))
        assert torch.equal(part, summed)
        flat = torch.empty(size * count)
        done(dist.all_gather_into_tensor(flat, own(count), async_op=asynchronous))
        assert torch.equal(flat, torch.cat(everyone))
        done(dist.reduce_scatter_tensor(part, flat, async_op=asynchronous))
        assert torch.equal(part, everyone[rank] * size)
        done(dist.all_to_all(listed, parts, async_op=asynchronous))
        assert torch.equal(torch.cat(listed), torch.cat(everyone))
        done(dist.all_to_all_single(flat, torch.cat(parts), async_op=asynchronous))
        assert torch.equal(flat, torch.cat(everyone))
        done(dist.barrier(async_op=asynchronous))


def without_gradients():
    with torch.inference_mode():
        every_collective(True)


def coalesced():
    many = [own(7) * scale for scale in range(1, 40)]
    with dist._coalescing_manager(async_ops=True) as begun:
        for tensor in many:
            dist.all_reduce(tensor)
    begun.wait()
    for scale, tensor in enumerate(many, 1):
        assert torch.equal(tensor, torch.full((7,), float(total() * scale)))
    gathered = [torch.empty(dist.get_world_size() * 3) for _ in range(4)]
    with dist._coalescing_manager() as _:
        for tensor in gathered:
            dist.all_gather_into_tensor(tensor, own(3))
    for tensor in gathered:
        assert torch.equal(tensor, torch.arange(1.0, dist.get_world_size() + 1).repeat_interleave(3))


def many_at_once():
    tensors = [own(count) for count in (1, 1000, 300_000) for _ in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, total()))


def dropped():
    for _ in range(20):
        if dist.get_rank() == 0:
            tensor = own(200_000)
            kept = weakref.ref(tensor)
            dist.all_reduce(tensor, async_op=True)
            del tensor
            torch.full((200_000,), 99.0)  # where the tensor was, if it is gone
        else:
            time.sleep(0.001)
            tensor = own(200_000)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.full_like(tensor, total()))
    for _ in range(3):  # all that was begun before is complete, and forgotten with the next call
        dist.barrier()
    assert dist.get_rank() != 0 or kept() is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_collective_can_be_called_and_waited_for(shoal_ranks, asynchronous):
    shoal_ranks.run(every_collective, 3, asynchronous)


@pytest.mark.parametrize("run", [without_gradients, coalesced, many_at_once])
def test_ways_to_call_give_the_same(shoal_ranks, run):
    shoal_ranks.run(run, 2)


def test_an_operation_that_nobody_waits_for_keeps_its_tensors_until_it_is_complete(shoal_ranks):
    shoal_ranks.run(dropped, 2)


# --- sparse tensors ---


def sum_of_sparse_tensors_with_more_entries_on_each_rank():
    rank, size = dist.get_rank(), dist.get_world_size()

    def of_rank(number):
        """One entry on rank 0, two on rank 1, ...; neighbours have one in the same place."""
        places = torch.arange(number, 2 * number + 1)
        return torch.sparse_coo_tensor(places[None], torch.full((number + 1,), number + 1.0), (2 * size,))

    tensor = of_rank(rank)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), sum(of_rank(each).to_dense() for each in range(size)))


def test_sparse_tensors_with_other_numbers_of_entries_are_summed(shoal_ranks):
    shoal_ranks.run(sum_of_sparse_tensors_with_more_entries_on_each_rank, 3)

"""What does not fit together is refused, as gloo refuses it, before anything is sent or written."""

from unittest import mock

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from mistaken_calls import (
    COUNT,
    FORMS,
    GLOO_DIES,
    GLOO_DIES_OF_TYPES,
    GLOO_SERVES,
    GLOO_SERVES_TYPES,
    MISTAKES,
    RANKS,
    ROOTED,
    Memory,
    finish,
    is_root,
    make,
    wrong_types,
)
from torch.distributed.distributed_c10d import ReduceOp

from shoal.collectives import Options
from shoal.collectives.ctypes_core import load_core
from shoal.errors import CollectiveError


def refusal_of(call, memory):
    """The error of a call that has to be refused, and to touch nothing."""
    with pytest.raises(CollectiveError, match=r"\n  possible: .+\n  change: .+") as raised:
        finish(call())
    assert raised.value.fault == "invalid"
    assert memory.is_untouched()
    return str(raised.value)


def called_rightly(form, group):
    """All elements of a right call's tensors afterwards; nothing beside them was written."""
    memory = Memory()
    tensors = make(memory, form)
    finish(FORMS[form][1](group, tensors))
    assert memory.margins_are_untouched()
    return torch.cat(tensors)


def refuse_types():
    over_gloo = dist.new_group(backend="gloo")
    for form, (_, call) in FORMS.items():
        wanted = called_rightly(form, over_gloo)
        for wrong in wrong_types(form):
            if form not in ROOTED or is_root():
                memory = Memory()
                tensors = make(memory, form, wrong)
                said = refusal_of(lambda call=call, tensors=tensors: call(dist.group.WORLD, tensors), memory)
                for dtype, shape in (("float32", f"[{COUNT}]"), (str(wrong[1]).removeprefix("torch."), "[")):
                    assert f"{dtype} {shape}" in said or f"{dtype} [{2 * COUNT}]" in said, said
            assert torch.equal(called_rightly(form, dist.group.WORLD), wanted), (form, wrong)


def test_tensors_of_different_types_are_refused_and_the_group_goes_on(ranks):
    ranks.run(refuse_types, RANKS)


def refuse_mistakes():
    for name, mistake in MISTAKES.items():
        memory = Memory()
        refusal_of(lambda mistake=mistake, memory=memory: mistake(dist.group.WORLD, memory), memory)
        total = torch.full((COUNT,), dist.get_rank() + 1.0)
        dist.all_reduce(total)
        assert torch.equal(total, torch.full((COUNT,), 3.0)), name


def test_lists_sizes_roots_tags_and_reductions_that_do_not_fit_are_refused_and_the_group_goes_on(ranks):
    ranks.run(refuse_mistakes, RANKS)


def verdicts_of_gloo():
    group = dist.new_group(backend="gloo")
    calls = {name: lambda memory, call=call: call(group, memory) for name, call in MISTAKES.items()}
    for form in FORMS.keys() - {*ROOTED, *GLOO_DIES_OF_TYPES}:
        for wrong in wrong_types(form):
            calls[form, wrong] = lambda memory, form=form, wrong=wrong: FORMS[form][1](
                group, make(memory, form, wrong)
            )
    serves = set()
    for name, call in calls.items():
        if name not in GLOO_DIES:
            try:
                finish(call(Memory()))
            except (RuntimeError, NotImplementedError):
                continue
            serves.add(name)
    return serves


def test_gloo_refuses_the_same_but_for_what_it_serves_wrongly(ranks):
    types = {(form, wrong) for form in GLOO_SERVES_TYPES for wrong in wrong_types(form)}
    for serves in ranks.run(verdicts_of_gloo, RANKS):
        assert serves == GLOO_SERVES | types


def serve_other_shapes():
    rank = dist.get_rank()
    whole = torch.arange(8.0)
    stacked = torch.empty(2, 4)
    dist.group.WORLD._allgather_base(stacked, whole[4 * rank :][:4].clone(), c10d.AllgatherOptions()).wait()
    assert torch.equal(stacked, whole.view(2, 4))
    listed = [torch.empty(2, 2), torch.empty(4, 1)]
    dist.all_gather(listed, whole[4 * rank :][:4].clone())
    assert torch.equal(torch.cat([each.flatten() for each in listed]), whole)
    uneven = [torch.empty(3), torch.empty(5)]
    dist.all_gather(uneven, whole[:3].clone() if rank == 0 else whole[3:].clone())
    assert torch.equal(torch.cat(uneven), whole)
    output = torch.empty((3, 5)[rank])
    dist.reduce_scatter(output, [whole[:3], whole[3:]])
    assert torch.equal(output, 2 * (whole[:3] if rank == 0 else whole[3:]))


def test_shapes_that_gloo_refuses_and_that_hold_the_elements_are_served(ranks):
    ranks.run(serve_other_shapes, RANKS)


def reduce_complex():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.complex64, torch.complex128):
        for op, divisor in ((ReduceOp.SUM, 1), (ReduceOp.AVG, size)):
            whole = torch.complex(torch.arange(8.0), -torch.arange(8.0)).to(dtype) * (rank + 1)
            wanted = torch.complex(torch.arange(8.0), -torch.arange(8.0)).to(dtype) * 3 / divisor
            part = torch.empty(4, dtype=dtype)
            options = c10d.ReduceScatterOptions()
            options.reduceOp = op
            dist.group.WORLD._reduce_scatter_base(part, whole, options).wait()
            assert torch.equal(part, wanted[4 * rank :][:4])
            strided = whole.clone().view(4, 2).t()
            dist.all_reduce(strided, op)
            assert torch.equal(strided, wanted.view(4, 2).t())


def test_sums_and_averages_of_complex_numbers_are_those_of_their_parts(ranks):
    ranks.run(reduce_complex, RANKS)


def overlap():
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (6, 300_000):  # through slots, and directly from each other's memory
        for offset in (0, 1, count // 2, count, 2 * count - 1):
            memory = torch.arange(3.0 * count) + 1000 * rank
            given = memory[offset : offset + count]
            wanted = torch.cat([torch.arange(count) + offset + 1000.0 * each for each in range(size)])
            dist.all_gather_into_tensor(memory[: 2 * count], given)
            assert torch.equal(memory[: 2 * count], wanted), ("all_gather", count, offset)

            memory = torch.arange(3.0 * count) + rank
            summed = 2 * torch.arange(3.0 * count) + 1
            dist.reduce_scatter_tensor(memory[offset : offset + count], memory[: 2 * count])
            wanted = summed[rank * count : (rank + 1) * count]
            assert torch.equal(memory[offset : offset + count], wanted), ("reduce_scatter", count, offset)

            memory = torch.arange(4.0 * count) + 1000 * rank
            own = [torch.arange(4.0 * count)[rank * count :][:count] + 1000 * each for each in range(size)]
            dist.all_to_all_single(memory[offset : offset + 2 * count], memory[: 2 * count])
            assert torch.equal(memory[offset : offset + 2 * count], torch.cat(own)), (
                "all_to_all",
                count,
                offset,
            )


def test_an_output_that_overlaps_the_input_gets_what_one_apart_gets(ranks):
    ranks.run(overlap, RANKS)


def write_back_to_parameters():
    weight = torch.nn.Parameter(torch.full((2, 3), float(dist.get_rank())).t())
    dist.broadcast(weight, 1)
    assert bool((weight == 1).all())
    gathered = [torch.nn.Parameter(torch.zeros(2, 2).t()) for _ in range(2)]
    dist.all_gather(gathered, torch.full((2, 2), float(dist.get_rank())).t())
    assert [each.sum().item() for each in gathered] == [0, 4]


def test_a_parameter_that_is_not_contiguous_is_written(ranks):
    ranks.run(write_back_to_parameters, RANKS)


def write_to_strided_outputs():
    rank = dist.get_rank()
    whole = torch.arange(24.0)
    own = whole[12 * rank :][:12].clone()

    def strided(rows, columns):
        return torch.full((columns, rows), -1.0).t()

    gathered = strided(4, 6)
    dist.all_gather_into_tensor(gathered, own)
    assert torch.equal(gathered, whole.view(4, 6))
    scattered = strided(3, 4)
    dist.reduce_scatter_tensor(scattered, whole)
    assert torch.equal(scattered, 2 * own.view(3, 4))
    dist.scatter(scattered, list(whole.view(2, 3, 4)) if rank == 1 else None, src=1)
    assert torch.equal(scattered, own.view(3, 4))
    swapped = strided(6, 4)
    dist.all_to_all_single(swapped, whole.view(6, 4) + 100 * rank)
    assert torch.equal(swapped, torch.cat([own, own + 100]).view(6, 4))
    received = strided(3, 4)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, own.view(3, 4), 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    )
    for work in works:
        work.wait()
    assert torch.equal(received, whole[12 * (1 - rank) :][:12].view(3, 4))


def test_an_output_that_is_not_contiguous_is_written(ranks):
    ranks.run(write_to_strided_outputs, RANKS)


def form_from_unlike_ranks():
    rank = dist.get_rank()
    for what, build, streams in (("another build", f"build-{rank}", 2), ("other options", "same", 2 + rank)):
        with mock.patch.object(load_core(), "build", build):
            with pytest.raises(CollectiveError, match=f"rank {1 - rank} has {what}") as raised:
                dist.new_group(pg_options=Options(streams=streams))
            assert (raised.value.fault, raised.value.rank) == ("mismatch", 1 - rank)
    dist.barrier()


def test_ranks_with_another_build_or_other_options_form_no_group_and_say_so(ranks):
    ranks.run(form_from_unlike_ranks, RANKS)

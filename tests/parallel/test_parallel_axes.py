"""The groups of a Plan's mesh, as NCCL needs them: made in one order, with channels between stages."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import connection_stand_ins
import pytest
import torch
import torch.distributed as dist

from shoal.parallel import Axes, communication
from shoal.record import NullRecorder
from shoal.spec.plan import Plan
from shoal.spec.plan.schedules import Action, Payload, Receive, Send, Step, Times, Work, transfers
from shoal.testing import RankPool

DEVICE = torch.device("meta")
"""In place of a GPU."""

WORLD = SimpleNamespace(
    bound_device_id=DEVICE,
    _device_types=[torch.device("cuda"), torch.device("cpu")],
    _get_backend=lambda device: SimpleNamespace(options=SimpleNamespace(_timeout=None)),
)


Use = tuple[str, tuple[int, ...], int]
"""An operation, the ranks of its group, and the number of groups that were made before it."""


@contextmanager
def simulated_rank(
    rank: int, ranks: int, backends: str = "cpu:gloo,cuda:nccl"
) -> Iterator[tuple[list[Any], list[Use]]]:
    """A rank of a default group of NCCL, the groups that it makes, and what it uses them for."""
    made: list[Any] = []
    uses: list[Use] = []

    def new_group(members: list[int], **options: Any) -> Any:
        made.append((tuple(members), options.get("backend"), options.get("device_id")))
        return SimpleNamespace(members=tuple(members))

    def operation(name: str) -> Callable[..., Any]:
        def begin(*arguments: Any, group: Any = None, async_op: bool = True) -> Any:
            group = arguments[-1] if name in ("isend", "irecv") else group
            members = tuple(range(ranks)) if group is None else group.members
            assert rank in members
            assert arguments[0].device == DEVICE
            uses.append((name, members, len(made)))
            return SimpleNamespace(wait=lambda: None)

        return begin

    stand_ins = {
        "is_initialized": lambda: True,
        "get_rank": lambda: rank,
        "get_world_size": lambda: ranks,
        "get_backend": lambda group: backends.rpartition(":")[2],
        "get_backend_config": lambda group: backends,
        "new_group": new_group,
    }
    operations = ("broadcast", "all_reduce", "all_to_all_single", "isend", "irecv")
    stand_ins |= {name: operation(name) for name in operations}
    of_parts = {name: operation(name) for name in ("_all_gather", "_reduce_scatter")}
    with (
        patch.multiple(dist, **stand_ins),
        patch.multiple(communication, **of_parts),
        patch.object(dist, "group", SimpleNamespace(WORLD=WORLD)),
    ):
        yield made, uses


def test_all_ranks_make_the_groups_of_nccl_in_one_order_and_on_their_device():
    for text in (
        "dp=2,tp=2,pp=4,shard=zero1,schedule=interleaved",
        "dp=4,cp=2,ep=2,shard=zero3,replicate=2",
        "dp=2,tp=2,pp=4,shard=zero1,order=dp-pp-cp-tp",
    ):
        plan = Plan.parse(text)
        orders = []
        for rank in range(plan.ranks):
            with simulated_rank(rank, plan.ranks) as (made, _):
                Axes.build(plan, NullRecorder(), are_ends_tied=plan.pp > 1)
            orders.append(made)
        assert all(order == orders[0] for order in orders)
        assert {(backend, device) for _, backend, device in orders[0]} == {("nccl", DEVICE)}


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,tp=2,pp=4,shard=zero1,schedule=interleaved",
        "dp=4,cp=2,ep=2,shard=zero3,replicate=2",
        "dp=2,tp=2,tensor=async,shard=zero2",
    ],
)
def test_all_members_use_a_group_of_nccl_before_the_next_one_is_made(text):
    plan = Plan.parse(text)
    of_group = defaultdict(list)
    for rank in range(plan.ranks):
        with simulated_rank(rank, plan.ranks) as (made, uses):
            Axes.build(plan, NullRecorder(), are_ends_tied=plan.pp > 1)
        assert uses[0][1:] == (tuple(range(plan.ranks)), 0)  # the default group
        for number, (members, *_) in enumerate(made, 1):
            own = [name for name, group, count in uses if group == members and count == number]
            if rank in members:
                of_group[number, members].append(own)
            else:
                assert own == []
    assert len(of_group) == len(made)
    collectives = {"broadcast", "all_reduce", "_all_gather", "_reduce_scatter"}
    for (_, members), of_members in of_group.items():
        assert len(of_members) == len(members)
        if sorted(of_members[0]) == ["irecv", "isend"]:  # a channel: one way, and then the other
            assert of_members == [["isend", "irecv"], ["irecv", "isend"]]
        else:
            assert all(own == of_members[0] for own in of_members)
            assert collectives <= set(of_members[0])
    of_all_pairs = [members for name, members, _ in uses if name == "all_to_all_single"]
    assert len(of_all_pairs) == (plan.cp > 1) + (plan.ep > 1) + (plan.tensor == "async")


def test_groups_of_other_backends_are_not_used_when_they_are_made():
    plan = Plan.parse("dp=2,tp=2,pp=2,cp=2,shard=zero1")
    with (
        simulated_rank(0, plan.ranks, "cpu:gloo") as (made, uses),
        patch.object(WORLD, "_device_types", [torch.device("cpu")]),
    ):
        Axes.build(plan, NullRecorder())
    assert made
    assert uses == []


@pytest.mark.parametrize("text", ["dp=2,pp=2,shard=zero1", "dp=2,cp=2,shard=zero3"])
def test_ranks_may_begin_with_any_group_if_these_connect_at_first_use(text):
    with RankPool("connects_late") as pool:
        use = connection_stand_ins.use_groups_in_other_orders
        assert pool.run(partial(use, is_connected=True), 4, text) == [""] * 4
        errors = pool.run(partial(use, is_connected=False), 4, text)
    assert any("imeout" in error for error in errors)  # what the others then wait for


@pytest.mark.parametrize("order", ["pp-dp-cp-tp", "dp-tp-cp-pp"])
def test_ranks_with_neighbouring_stages_have_a_channel_of_their_own(order):
    plan = Plan.parse(f"pp=4,tp=2,schedule=interleaved,order={order}")
    for rank in range(8):
        with simulated_rank(rank, 8):
            pp = Axes.build(plan, NullRecorder()).pp
        neighbours = {(pp.index - 1) % 4, (pp.index + 1) % 4}  # stage 4 is on the first rank again
        assert set(pp.channels) == neighbours
        for other, group in pp.channels.items():
            assert set(group.members) == {rank, pp.members[other]}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "looped-bfs", "zb-v", "dualpipe-v"])
def test_every_schedule_ends_where_a_channel_passes_its_messages_on_one_by_one(schedule):
    plan = Plan.parse(f"pp=4,schedule={schedule}")
    rows = transfers(plan.schedule_for(8, Times.equal(len(plan.placement))), ahead=1)
    assert ends(rows, lambda one, other: (min(one, other), max(one, other)))
    if schedule == "interleaved":  # why channels are needed
        assert not ends(rows, lambda one, other: 0)


Message = tuple[int, Payload, int, int]


def ends(rows: Sequence[Sequence[Step]], channel: Callable[[int, int], object]) -> bool:
    """Whether all ranks' lists end, if a channel passes messages on one by one, as a group of NCCL does."""
    position = [0] * len(rows)
    queues: defaultdict[tuple[int, object], deque[tuple[int, int, Message]]] = defaultdict(deque)
    arrived: set[Message] = set()
    awaited = {
        (rank, step.payload, step.stage, step.microbatch)
        for rank, row in enumerate(rows)
        for step in row
        if isinstance(step, Receive)
    }
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                step = row[position[rank]]
                if isinstance(step, Action):
                    payload = Payload.ACTIVATION if step.work is Work.FORWARD else Payload.GRADIENT
                    needed = rank, payload, step.stage, step.microbatch
                    if step.work is not Work.WEIGHT and needed in awaited - arrived:
                        break
                elif isinstance(step, Send):
                    message = step.peer, step.payload, step.target, step.microbatch
                    queues[rank, channel(rank, step.peer)].append((rank, step.peer, message))
                else:
                    message = rank, step.payload, step.stage, step.microbatch
                    queues[rank, channel(rank, step.peer)].append((step.peer, rank, message))
                position[rank] += 1
                goes_on = True
        for (rank, _), queue in list(queues.items()):
            if queue and queue[0][0] == rank:
                there = queues[queue[0][1], channel(queue[0][1], rank)]
                if there and there[0] == queue[0]:
                    arrived.add(queue.popleft()[2])
                    there.popleft()
                    goes_on = True
    return all(at == len(row) for at, row in zip(position, rows, strict=True))

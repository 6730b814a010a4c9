"""The groups of a Plan's mesh, as NCCL needs them: made in one order, with channels between stages."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shoal.parallel import Axes
from shoal.plan import Plan
from shoal.plan.schedules import Action, Payload, Receive, Send, Step, Times, Work, transfers
from shoal.record import NullRecorder

WORLD = SimpleNamespace(
    bound_device_id=torch.device("cuda", 0),
    _device_types=[torch.device("cuda"), torch.device("cpu")],
    _get_backend=lambda device: SimpleNamespace(options=SimpleNamespace(_timeout=None)),
)


@contextmanager
def simulated_rank(rank: int, ranks: int) -> Iterator[list[Any]]:
    """A rank of a default group of NCCL, and the groups that it makes."""
    made: list[Any] = []

    def new_group(members: list[int], **options: Any) -> Any:
        made.append((tuple(members), options["backend"], options["device_id"]))
        return SimpleNamespace(members=tuple(members))

    stand_ins = {
        "is_initialized": lambda: True,
        "get_rank": lambda: rank,
        "get_world_size": lambda: ranks,
        "get_backend": lambda group: "nccl",
        "get_backend_config": lambda group: "cpu:gloo,cuda:nccl",
        "new_group": new_group,
    }
    with patch.multiple(dist, **stand_ins), patch.object(dist, "group", SimpleNamespace(WORLD=WORLD)):
        yield made


def test_all_ranks_make_the_groups_of_nccl_in_one_order_and_on_their_device():
    for text in (
        "dp=2,tp=2,pp=4,shard=zero1,schedule=interleaved",
        "dp=4,cp=2,ep=2,shard=zero3,replicate=2",
        "dp=2,tp=2,pp=4,shard=zero1,order=dp-pp-cp-tp",
    ):
        plan = Plan.parse(text)
        orders = []
        for rank in range(plan.ranks):
            with simulated_rank(rank, plan.ranks) as made:
                Axes.build(plan, NullRecorder(), are_ends_tied=plan.pp > 1)
            orders.append(made)
        assert all(order == orders[0] for order in orders)
        assert {(backend, device) for _, backend, device in orders[0]} == {("nccl", torch.device("cuda", 0))}


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

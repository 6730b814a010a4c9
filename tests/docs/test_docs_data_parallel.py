"""What docs/concepts/data-parallel.md says of bytes moved and of memory kept is what the strategies do."""

import gc
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from shoal.parallel import parallelize
from shoal.record import NullRecorder, SpanRecorder
from shoal.spec.plan import SHARDINGS, Plan
from shoal.spec.timeline import Kind, Timeline

WIDTH, BLOCKS, MICROBATCHES = 128, 4, 2
ONE = WIDTH * WIDTH
ALL = (BLOCKS + 1) * ONE
"""Parameters of the root, of each block, and of the model; none needs padding, so the formulas are exact."""
TENSORS = BLOCKS + 1

WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
PLANS = [f"dp=2,shard={shard},precision={precision}" for shard in SHARDINGS for precision in WEIGHT_BYTES]
HYBRIDS = [f"dp=4,replicate=2,shard={shard}" for shard in SHARDINGS if shard != "none"]


class Model(nn.Module):
    """A root of one matrix, and blocks of one each."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, hidden):
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def train(plan, recorder, steps):
    """Some steps, without the last `zero_grad`; gives all that training holds on to."""
    parallel = parallelize(Model(), plan, recorder=recorder)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-3, foreach=False)
    for index in range(steps):
        optimizer.zero_grad()
        with recorder.step(index):
            for remaining in reversed(range(MICROBATCHES)):
                loss = parallel(torch.ones(1, WIDTH)).float().sum()
                if remaining:
                    with parallel.accumulate():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.step()
    return parallel, optimizer


def bytes_of_collectives(plan):
    """By operation, in the second step: before the first, no weights have changed."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = SpanRecorder(Path(folder) / "rank-00000.jsonl", 0)
        train(plan, recorder, steps=2)
        recorder.close()
        timeline = Timeline.read(folder)
    step = timeline.step(0, 1)
    counted = Counter()
    for span in timeline.spans:
        if span.kind == Kind.COLLECTIVE and step.start <= span.start < step.stop:
            counted[span.name.partition(":")[0], len(span.group)] += span.bytes
    return dict(counted)


def bytes_of_tensors():
    gc.collect()
    held = set()
    for thing in gc.get_objects():
        if (
            isinstance(thing, torch.Tensor)
            and not isinstance(thing, DTensor | FakeTensor)
            and not thing.is_meta
        ):
            first = thing.untyped_storage().data_ptr()
            held.add((first, first + thing.untyped_storage().nbytes()))
    total = end = 0
    for first, last in sorted(held):  # an owner's rows may lie within the weights
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def bytes_kept(plan):
    before = bytes_of_tensors()
    kept = train(plan, NullRecorder(), steps=2)
    after = bytes_of_tensors()
    del kept
    return after - before


@pytest.mark.parametrize("text", [*PLANS, *HYBRIDS])
def test_collectives_carry_the_bytes_that_the_page_says(ranks, text):
    plan = Plan.parse(text)
    w, m, s, r = WEIGHT_BYTES[plan.precision], MICROBATCHES, plan.shards, plan.replicas
    reductions = m if plan.shard in ("zero2", "zero3") else 1
    gathered = {"none": 0, "zero1": ALL, "zero2": ALL}.get(plan.shard, m * (2 * ALL - ONE - ONE))
    expected = {
        ("all_reduce", r): 4 * (ALL / s + TENSORS) * reductions if r > 1 else 0,
        ("reduce_scatter", s): 4 * (ALL + s * TENSORS) * reductions if s > 1 else 0,
        ("all_gather", s): w * gathered,
    }
    measured = ranks.run(bytes_of_collectives, plan.ranks, text)[0]
    assert measured == {operation: count for operation, count in expected.items() if count}


@pytest.mark.parametrize("text", PLANS)
def test_between_steps_a_rank_keeps_the_memory_that_the_page_says(ranks, text):
    plan = Plan.parse(text)
    d = plan.dp
    expected = {
        ("none", "fp32"): 16,
        ("none", "bf16"): 18,
        ("zero1", "fp32"): 8 + 8 / d,
        ("zero1", "bf16"): 6 + 12 / d,
        ("zero3-once", "fp32"): 4 + 12 / d,
        ("zero3-once", "bf16"): 4 + 12 / d,
        ("zero2", "fp32"): 4 + 12 / d,
        ("zero2", "bf16"): 2 + 16 / d,
        ("zero3", "fp32"): 16 / d,
        ("zero3", "bf16"): 16 / d,
    }[plan.shard, plan.precision]
    kept = ranks.run(bytes_kept, plan.ranks, text)[0]
    # The rest is small: counts of steps, inputs, losses.
    assert kept / ALL == pytest.approx(expected, abs=0.1)

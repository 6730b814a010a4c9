"""What one Plan saves, every other Plan goes on with as if it had not stopped; `make test-long` runs this."""

from __future__ import annotations

from itertools import product

import pytest
from pairs_stand_ins import save_and_go_on, take_up
from train_stand_ins import SEQUENCE

from shoal.spec.plan import Plan

pytestmark = pytest.mark.long

SHAPE = {"vocab_size": 64, "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": SEQUENCE}
EXPERTS = {**SHAPE, "experts": 4, "expert_ffn": 24, "experts_per_token": 2}

PLANS = [
    "dp=1",
    "dp=1,recompute=full,microbatch=2",
    "dp=2,shard=zero1",
    "tp=2",
    "cp=2",
    "pp=2,microbatch=2",
    "dp=4,shard=zero3",
    "dp=4,replicate=2,shard=zero3",
    "dp=2,tp=2,shard=zero2",
    "dp=2,cp=2,shard=zero1",
    "pp=4,schedule=zb-h1,microbatch=2",
    "dp=2,tp=2,pp=2,shard=zero1,microbatch=1",
    "dp=4,tp=2,shard=zero3",
    "dp=2,cp=2,tp=2,shard=zero2",
]
PLANS_WITH_EXPERTS = ["dp=1", "dp=2,ep=2", "dp=4,ep=2,shard=zero1", "dp=4,ep=4,shard=zero3"]

CLOSE = {"rel": 1e-4}
"""fp32 sums in another order, which AdamW's division by the root of small squares enlarges."""


@pytest.mark.parametrize(("shape", "plans"), [(SHAPE, PLANS), (EXPERTS, PLANS_WITH_EXPERTS)])
def test_every_plan_goes_on_with_what_every_other_saved(ranks, tmp_path, shape, plans):
    saved = {}
    for number, plan in enumerate(plans):
        folder = tmp_path / str(number)
        saved[plan] = ranks.run(save_and_go_on, Plan.parse(plan).ranks, plan, shape, folder)[0]
    wrong = []
    for before, after in product(plans, plans):
        path, whole = saved[before]
        found = ranks.run(take_up, Plan.parse(after).ranks, after, shape, path)[0]
        if found != (whole if before == after else pytest.approx(whole, **CLOSE)):
            wrong.append((before, after, found, whole))
    assert not wrong

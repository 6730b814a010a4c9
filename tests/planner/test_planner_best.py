"""No Plan out of many is much quicker than the chosen one: random Plans, and neighbours of neighbours."""

import random
from dataclasses import replace

import pytest
from random_plans import random_plan

from shoal.predict.cost.time import workload_on
from shoal.predict.planner import choose
from shoal.predict.planner.refine import neighbours
from shoal.spec.cluster import Cluster
from shoal.spec.workload import shape

pytestmark = pytest.mark.long

RANDOM = 2000
NEIGHBOURS = 200
MUCH = 0.01

CASES = [
    ("125m", "dgx-a100:8", 64),
    ("gpt3-1.3b", "dgx-a100:8", 32),
    ("llama3-8b", "dgx-h100:8", 32),
    ("125m", "aws-g5:16", 64),
    ("1b", "dgx-a100:16", 128),
    ("gpt3-1.3b", "dgx-h100:16", 64),
    ("llama3-8b", "dgx-h100:16", 64),
    ("llama2-13b", "dgx-a100:32", 128),
    ("mixtral-8x7b", "dgx-h100:32", 128),
    ("llama3-8b", "dgx-h100:64", 256),
    ("llama2-70b", "dgx-h100:64", 64),
    ("mixtral-8x7b", "dgx-h100:64", 256),
    ("llama3-70b", "gb200-nvl72:72", 144),
    ("llama3-8b", "dgx-h100:128", 512),
    ("llama3-70b", "dgx-h100:128", 256),
    ("mixtral-8x7b", "dgx-h100:128", 512),
    ("350m", "dgx-a100:256", 256),
    ("llama3-70b", "dgx-h100:256", 512),
    ("gpt3-175b", "dgx-a100:512", 512),
    ("llama3-8b", "dgx-h100:512", 1024),
    ("deepseek-v3", "dgx-h100:1024", 4096),
    ("llama3-70b", "dgx-h100:1024", 1024),
    ("gpt3-175b", "dgx-a100:1024", 1536),
    ("llama3-405b", "dgx-h100:1024", 512),
    ("deepseek-v3", "dgx-h100:2048", 15360),
    ("llama3-70b", "dgx-h100:2048", 2048),
    ("gpt3-175b", "dgx-h100:4096", 2048),
    ("llama3-405b", "dgx-h100:8192", 2048),
    ("llama3-405b", "meta-24k:16384", 2048),
    ("llama3-8b", "dgx-h100:16384", 2048),
]


@pytest.mark.parametrize(
    ("model", "machine", "batch", "slower"),
    [(*case, 16 if number % 3 == 2 else 1) for number, case in enumerate(CASES)],  # some with a slow network
)
def test_no_plan_out_of_many_is_much_quicker(model, machine, batch, slower):
    cluster = Cluster.parse(machine)
    inner, *outer = cluster.levels
    outer = [replace(level, bandwidth=level.bandwidth / slower) for level in outer]
    cluster = cluster.replace(levels=(inner, *outer))
    workload = workload_on(cluster, shape(model))
    choice = choose(workload, cluster, batch, limit=1)
    best, shared, room = choice.best, choice.search.shared, choice.search.room
    limit = (1 - MUCH) * best.seconds
    chance = random.Random(f"{model} {machine} {batch} {slower}")

    def seconds(plan):
        """Played, or infinite for a Plan that does not fit or whose bound is beyond what matters here."""
        if shared.costs.least(plan, batch) >= limit or shared.fullest(plan).peak > room:
            return float("inf")
        return shared.played(plan)

    found, tried = [], 0
    while tried < RANDOM:
        plan = random_plan(chance, workload, cluster.devices, batch)
        if plan.stages * plan.microbatches_of(batch) > 200_000 or shared.fullest(plan).peak > room:
            continue
        tried += 1
        found.append((seconds(plan), str(plan)))
    at, seen = best.plan, 0
    while seen < NEIGHBOURS:
        near = list(neighbours(shared.space, at))
        chance.shuffle(near)
        for plan in near[: NEIGHBOURS // 4]:
            seen += 1
            found.append((seconds(plan), str(plan)))
        fitting = [plan for plan in near if shared.fullest(plan).peak <= room]
        at = chance.choice(fitting) if fitting else best.plan
    quicker = sorted(each for each in found if each[0] < limit)
    assert not quicker, f"{best.plan} takes {best.seconds:.4f} s; {quicker[:3]}"

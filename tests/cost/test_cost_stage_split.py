"""`split=cost` means one split, for training as for simulation, and no other that fits is quicker."""

import itertools
import json

import pytest

from shoal.cli.main import main
from shoal.models import preset, preset_names
from shoal.predict.cost import Costs, Memories, settle_split
from shoal.predict.cost.time import workload_on
from shoal.predict.simulate import played_seconds, simulate
from shoal.spec.cluster import Cluster, limited
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.workload import shape
from shoal.train import TrainConfig
from shoal.train.job import resolve

CASES = [
    (name, pp)
    for name, pp in itertools.product(preset_names(), (2, 4, 8))
    if preset(name).layers >= pp and preset(name).layers <= 40
]


def simulated(model, plan, batch, cluster, memory=""):
    machines = limited(Cluster.parse(cluster).with_devices(Plan.parse(plan).ranks), memory)
    return simulate(workload_on(machines, shape(model)), machines, Plan.parse(plan), batch)


@pytest.mark.parametrize(("model", "pp"), CASES)
def test_a_run_has_the_stages_that_are_simulated(model, pp):
    for cluster, memory in (("laptop", ""), ("dgx-h100", ""), ("dgx-h100", "20GiB")):
        plan, batch = f"dp=1,pp={pp},microbatch=1,precision=fp32", 4 * pp
        config = TrainConfig(
            model=model, plan=plan, batch=batch, sequence=shape(model).seq, cluster=cluster, memory=memory
        )
        there = simulated(model, plan, batch, cluster, memory).plan
        assert resolve(config, pp).plan == there
        assert there.split.count("-") == pp - 1


def test_the_commands_say_the_split(capsys):
    plan, given = "pp=4,microbatch=1", ["--model", "125m", "--cluster", "dgx-h100", "--batch", "16", "--json"]
    for words in (["simulate", "--plan", plan], ["memory", plan]):
        assert main([*words, *given]) == 0
        said = json.loads(capsys.readouterr().out)["plan"]
        assert Plan.parse(said).split == simulated("125m", plan, 16, "dgx-h100").plan.split


def neighbours(counts):
    """Splits with one block moved from one stage to another."""
    last = len(counts) - 1
    for giver, taker in itertools.permutations(range(len(counts)), 2):
        moved = list(counts)
        moved[giver] -= 1
        moved[taker] += 1
        if all(number >= (place not in (0, last)) for place, number in enumerate(moved)):
            yield "-".join(map(str, moved))


@pytest.mark.parametrize("memory", ["", "6GiB"])
@pytest.mark.parametrize(("model", "pp"), [("125m", 4), ("125m", 8), ("350m", 4), ("1b", 4), ("1b", 8)])
def test_no_block_can_move_so_that_a_step_is_quicker_and_fits(model, pp, memory):
    """To a fiftieth: stages are cut by their blocks alone, and not by what a step has beside these."""
    for cluster, size in (("laptop", 1), ("dgx-h100", 1), ("dgx-h100", 4)):
        batch = 8 * pp * size
        found = simulated(model, f"pp={pp},microbatch={size},precision=fp32", batch, cluster, memory)
        costs = Costs(found.workload, found.cluster)
        memories, room = Memories(costs.workload, costs.cluster, costs), costs.cluster.device.memory
        for split in neighbours([int(number) for number in found.plan.split.split("-")]):
            moved = found.plan.replace(split=split)
            if memories.fullest(moved, batch).required <= room:
                assert played_seconds(costs, moved, batch) > 0.98 * found.seconds


@pytest.mark.parametrize("share", [0.97, 0.8])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_stages_keep_within_the_memory_where_the_quickest_ones_do_not(schedule, share):
    plan, batch = f"pp=4,microbatch=2,precision=fp32,schedule={schedule}", 64
    free = simulated("1b", plan, batch, "dgx-h100")
    most = Memories(free.workload, free.cluster).fullest(free.plan, batch).required
    machines = limited(free.cluster, f"{share * most:.0f}")
    tight = settle_split(SettledPlan.of(Plan.parse(plan), batch), free.workload, machines, batch)
    assert Memories(free.workload, machines).fullest(tight, batch).fits(machines)

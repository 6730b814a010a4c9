"""What a run compiles, and what it says of it."""

import pytest
import torch
from torch import nn

from shoal.models import Transformer, preset
from shoal.predict.cost import Costs
from shoal.predict.cost.time import workload_on
from shoal.predict.simulate import played_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import shape
from shoal.train.compiling import Compiling, with_compile


def test_compiling_is_told_when_it_is_over_and_when_it_comes_again():
    torch._dynamo.reset()
    told = []
    watch = Compiling(told.append)
    double = torch.compile(lambda tensor: 2 * tensor, backend="eager", dynamic=False)
    for step, size in enumerate((3, 3, 3, 5, 5), start=1):
        watch.begin_step()
        double(torch.ones(size))
        watch.stepped(step)
        with torch.no_grad():
            double(torch.ones(size, requires_grad=True))  # a validation
    watch.close()
    double(torch.ones(7))
    watch.stepped(6)
    assert len(told) == 2
    assert told[0].startswith("compiling the model took ")
    assert told[0].endswith(" of step 1")
    assert told[1].startswith("step 4 compiled again, for ")


@pytest.mark.parametrize("model", ["125m", "350m"])
def test_auto_becomes_what_is_predicted_to_be_quicker_on_this_gpu(monkeypatch, model):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    with torch.device("meta"):
        transformer = Transformer(preset(model))
    plan = SettledPlan.parse("microbatch=1,precision=bf16")
    settled = with_compile(plan, transformer, 1024, torch.device("cuda", 0))
    cluster = Cluster.preset("dgx-h100", 1)
    workload = workload_on(cluster, shape(model).replace(seq=1024))
    seconds = {
        compile: played_seconds(Costs(workload, cluster), plan.replace(compile=compile), 1)
        for compile in ("none", "blocks")
    }
    assert settled.compile == min(seconds, key=seconds.__getitem__)


def test_auto_stays_where_nothing_predicts_it(monkeypatch):
    plan, gpu = SettledPlan.parse("microbatch=1"), torch.device("cuda", 0)
    with torch.device("meta"):
        transformer = Transformer(preset("tiny"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a new device")
    assert with_compile(plan, transformer, 64, gpu) == plan
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert with_compile(plan, nn.Linear(2, 2), 64, gpu) == plan
    assert with_compile(plan, transformer, None, gpu) == plan
    assert with_compile(plan, transformer, 64, torch.device("cpu")) == plan
    chosen = plan.replace(compile="blocks")
    assert with_compile(chosen, transformer, 64, gpu) == chosen

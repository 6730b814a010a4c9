"""`plan = "auto"`."""

import dataclasses
import os
from dataclasses import asdict

import pytest
import torch
from torch import nn

from shoal.errors import ClusterError, ConfigError, PlanError
from shoal.models import build
from shoal.models.config import preset
from shoal.parallel import require_layout
from shoal.predict.cost import memory_of
from shoal.predict.cost.time import workload_on
from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster, Host
from shoal.spec.plan import SettledPlan
from shoal.spec.run import Run
from shoal.spec.workload import shape
from shoal.train import TrainConfig, auto_plan, choose_ranks, resolve
from shoal.train.auto_plan import PROCESS_BYTES, within_memory


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", ["tiny", "tiny-experts"])
def test_the_plan_is_one_that_the_model_can_be_laid_out_by(model, ranks):
    config = TrainConfig(model=model, plan="auto", batch=8, device="cpu")
    plan = resolve(config, ranks).plan
    plan.require_ranks(ranks)
    assert SettledPlan.of(plan, 8) == plan
    require_layout(build(model, overrides={}, device="meta"), plan, config.sequence)


def test_the_ranks_are_those_of_a_run_without_a_plan():
    assert choose_ranks(TrainConfig(plan="auto"), None) == choose_ranks(TrainConfig(), None)


def test_the_cluster_can_be_named():
    config = TrainConfig(model="tiny", plan="auto", batch=8, cluster="dgx-h100", device="cpu")
    assert resolve(config, 2).plan.precision == "bf16"  # which is what that device is fastest in


def test_the_plan_keeps_within_the_memory_that_it_may_take():
    config = TrainConfig(model="125m", plan="auto", batch=16, sequence=1024, cluster="dgx-h100", device="cpu")
    limit = 6 * 2**30
    found = [resolve(each, 2) for each in (config, config.model_copy(update={"memory": "6GiB"}))]
    assert found[0].cluster == found[1].cluster
    work = workload_on(found[0].cluster, shape("125m").replace(seq=1024))
    free, limited = (
        max(rank.peak for rank in memory_of(work, each.plan, 16, each.cluster)) for each in found
    )
    assert limited <= limit < free


@pytest.mark.parametrize("ranks", [1, 2])
def test_automatic_memory_is_what_is_free_divided_among_the_ranks(monkeypatch, ranks):
    free = 8 << 30
    monkeypatch.setattr(auto_plan, "available_memory", lambda: free)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = TrainConfig(plan="auto", memory="auto", device="cpu")
    cluster = within_memory(config, Cluster.preset("laptop", ranks), ranks)
    assert cluster.device.memory == free / ranks - PROCESS_BYTES
    monkeypatch.setattr(auto_plan, "available_memory", lambda: None)
    with pytest.raises(ConfigError, match="does not say how much"):
        within_memory(config, Cluster.preset("laptop", ranks), ranks)


GIB = 1 << 30
GPUS = """
import os, sys
folder = {folder!r}
others = len(os.listdir(folder))
open(os.path.join(folder, str(os.getpid())), "w").close()
print(*(free - (others + 1) * {context} for free in {free}), flush=True)
sys.stdin.read()
os.remove(os.path.join(folder, str(os.getpid())))
"""
"""Two GPUs: each process that has a context there takes some of their memory."""


@pytest.mark.parametrize(("ranks", "reserved"), [(1, 0), (2, GIB), (3, 0), (8, GIB // 4), (8, GIB)])
def test_automatic_memory_of_gpus_has_room_for_the_context_of_each_rank(
    monkeypatch, tmp_path, ranks, reserved
):
    free, context = [70 * GIB, 60 * GIB], GIB // 2
    asked = GPUS.format(folder=str(tmp_path), free=free, context=context)
    monkeypatch.setattr(auto_plan, "_FREE_ON_GPUS", asked)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cluster = dataclasses.replace(Cluster.preset("dgx-h100", ranks), reserved=float(reserved))
    found = within_memory(TrainConfig(plan="auto", memory="auto"), cluster, ranks).device.memory
    sharing = -(-ranks // 2)
    tensors = found - reserved  # what the planner gives a rank
    taken = sharing * (tensors + max(context, reserved))  # with all that it takes beside them
    assert taken == pytest.approx(60 * GIB, abs=sharing)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("optimizer", "offload"), [("adamw", True), ("muon", False)])
def test_a_plan_that_fits_with_files_alone_is_chosen_for_optimizers_that_can_have_it(
    tmp_path, optimizer, offload
):
    cluster = Cluster.preset("laptop", 2).replace(host=Host(devices=2, file_bandwidth=2e9))
    cluster.write(tmp_path / "cluster.toml")
    config = TrainConfig(
        model="350m",
        plan="auto",
        batch=4,
        cluster=str(tmp_path / "cluster.toml"),
        memory="2500MiB",
        device="cpu",
        optimizer={"name": optimizer},
    )
    if offload:
        assert resolve(config, 2).plan.tiers.has_files
    else:
        with pytest.raises(PlanError, match="does not fit"):
            resolve(config, 2)


def test_a_limit_of_memory_that_cannot_be_read_is_named():
    with pytest.raises(ConfigError, match="the memory much cannot be read"):
        resolve(TrainConfig(plan="auto", memory="much", device="cpu"), 1)


def test_an_unknown_cluster_is_refused():
    with pytest.raises(ClusterError):
        resolve(TrainConfig(plan="auto", cluster="dgx-h1000"), 2)


class Chain(nn.Module):
    """Blocks of one product each, for which no layout within a layer is declared."""

    def __init__(self, width=64, branches=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.branches = branches

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
            if self.branches and hidden.sum() > 0:
                break
        return self.head(hidden)


def own(ranks, **values):
    config = TrainConfig(model=f"{__name__}:Chain", plan="auto", batch=8, sequence=32, **values)
    return config, resolve(config, ranks).plan


@pytest.mark.parametrize("cluster", ["", "dgx-h100"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_work_of_a_model_of_the_users_own_is_traced(ranks, cluster):
    config, plan = own(ranks, cluster=cluster, device="cpu")
    plan.require_ranks(ranks)
    require_layout(Chain(), plan, config.sequence)
    assert plan.tp == plan.cp == 1  # which it has no declaration for


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which this process has no context, and whose kernels are the CPU's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(auto_plan, "_GPU", "cpu")


def test_for_a_gpu_another_process_traces_a_model_of_the_users_own(monkeypatch, gpu):
    with monkeypatch.context() as in_rank:
        in_rank.setattr(auto_plan, "_has_context", lambda: True)
        here = own(2, cluster="dgx-h100")[1]
    monkeypatch.setattr(auto_plan, "trace", lambda *_, **__: pytest.fail("it was traced here"))
    assert own(2, cluster="dgx-h100")[1] == here
    with pytest.raises(ConfigError, match="could not be traced: tracing Chain raised"):
        own(2, cluster="dgx-h100", model_options={"branches": True})
    monkeypatch.setattr(auto_plan, "_GPU", "no device")
    with pytest.raises(ConfigError, match="could not be traced: the process that traced it ended with 1"):
        own(2, cluster="dgx-h100")


def test_a_rank_with_a_context_on_its_gpu_traces_there(monkeypatch, gpu):
    monkeypatch.setattr(auto_plan, "_has_context", lambda: True)
    monkeypatch.setattr(auto_plan, "_traced_apart", lambda *_: pytest.fail("it was traced elsewhere"))
    own(2, cluster="dgx-h100")


def test_a_larger_model_of_the_users_own_gets_another_plan():
    plans = {own(4, model_options={"width": width}, cluster="dgx-h100")[1] for width in (32, 2048)}
    assert len(plans) == 2


def test_a_model_that_cannot_be_traced_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="raised") as caught:
        own(2, model_options={"branches": True}, device="cpu")
    assert caught.value.given.startswith('plan = "auto" was given, and ')
    assert caught.value.change == "choose a Plan, such as dp=2,shard=zero1"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_hugging_face_model_gets_a_plan_as_good_as_the_transformer_of_its_shape(ranks, tmp_path):
    transformers = pytest.importorskip("transformers")
    same = preset("125m")
    transformers.LlamaConfig(
        vocab_size=same.vocab_size,
        num_hidden_layers=same.layers,
        hidden_size=same.hidden,
        num_attention_heads=same.heads,
        num_key_value_heads=same.kv_heads,
        intermediate_size=same.ffn,
        max_position_embeddings=same.seq,
        tie_word_embeddings=same.tie_embeddings,
    ).save_pretrained(tmp_path / "llama")
    common = {"plan": "auto", "batch": 16, "sequence": 512, "cluster": "dgx-h100"}
    plan = resolve(TrainConfig(model=f"hf:{tmp_path / 'llama'}", **common), ranks).plan
    best = resolve(TrainConfig(model="125m", **common), ranks).plan
    cluster = Cluster.preset("dgx-h100", ranks)
    work = workload_on(cluster, shape("125m").replace(seq=512))
    seconds = [simulate(work, cluster, each, 16).seconds for each in (plan, best)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.05)


def test_the_machines_are_this_hosts_cores_where_none_are_named(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    config = TrainConfig(model="tiny", plan="auto", batch=8, device="cpu")
    cluster = resolve(config, 4).cluster
    assert cluster == Cluster.preset("laptop").with_cores(2).with_devices(4)
    assert cluster.crowding == 2


def test_a_plan_that_is_named_needs_no_machines_but_keeps_those_that_are():
    assert resolve(TrainConfig(plan="tp=2"), 2).cluster is None
    named = resolve(TrainConfig(plan="tp=2", cluster="dgx-h100"), 2)
    assert named.cluster == Cluster.preset("dgx-h100", 2)
    assert named.passed_over == ()


def test_plans_that_cannot_be_trained_are_passed_over_with_the_reason(monkeypatch):
    config = TrainConfig(model="tiny", plan="auto", batch=8, device="cpu")
    wanted = resolve(config, 2)

    def refuse_the_best(model, plan, sequence):
        if plan == wanted.plan:
            raise PlanError("its blocks do not split", possible="another", change="take another")
        require_layout(model, plan, sequence)

    monkeypatch.setattr(auto_plan, "require_layout", refuse_the_best)
    found = resolve(config, 2)
    assert found.plan != wanted.plan
    assert [(each.plan, each.reason) for each in found.passed_over] == [
        (wanted.plan, "its blocks do not split")
    ]


def test_where_none_of_those_looked_at_can_be_trained_all_ranks_are_data_parallel(monkeypatch):
    def refuse(model, plan, sequence):
        raise PlanError("no", possible="none", change="none")

    monkeypatch.setattr(auto_plan, "require_layout", refuse)
    found = resolve(TrainConfig(model="tiny", plan="auto", batch=8, device="cpu"), 2)
    assert found.plan.dp == 2
    assert len(found.passed_over) > 1


def test_a_run_that_goes_on_needs_no_file_of_its_machines_any_more(tmp_path):
    recorded = Cluster.preset("laptop", 2).replace(name="mine")
    config = TrainConfig(cluster="gone.toml")
    before = Run.create(
        tmp_path / "run", {"config": config.model_dump(mode="json"), "cluster": asdict(recorded)}
    )
    assert resolve(config, 2, before).cluster == recorded
    assert resolve(config, 4, before).cluster == recorded.with_devices(4)
    with pytest.raises(ClusterError, match="cannot be read"):
        resolve(TrainConfig(cluster="other.toml"), 2, before)

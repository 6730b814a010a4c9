"""`plan = "auto"`."""

import os
from dataclasses import asdict

import pytest

from shoal.cluster import Cluster
from shoal.errors import ClusterError, ConfigError, PlanError
from shoal.models import build
from shoal.parallel import require_layout
from shoal.run import Run
from shoal.train import TrainConfig, automatic, choose_ranks, resolve


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", ["tiny", "tiny-experts"])
def test_the_plan_is_one_that_the_model_can_be_laid_out_by(model, ranks):
    config = TrainConfig(model=model, plan="auto", batch=8, device="cpu")
    plan = resolve(config, ranks).plan
    plan.require_ranks(ranks)
    assert plan.with_microbatch_for(8) == plan
    require_layout(build(model, overrides={}, device="meta"), plan, config.sequence)


def test_the_ranks_are_those_of_a_run_without_a_plan():
    assert choose_ranks(TrainConfig(plan="auto"), None) == choose_ranks(TrainConfig(), None)


def test_the_cluster_can_be_named():
    config = TrainConfig(model="tiny", plan="auto", batch=8, cluster="dgx-h100", device="cpu")
    assert resolve(config, 2).plan.precision == "bf16"  # which is what that device is fastest in


def test_an_unknown_cluster_is_refused():
    with pytest.raises(ClusterError):
        resolve(TrainConfig(plan="auto", cluster="dgx-h1000"), 2)


def test_a_model_of_the_users_own_is_refused():
    config = TrainConfig(
        model="torch.nn:Linear", model_options={"in_features": 4, "out_features": 4}, plan="auto"
    )
    with pytest.raises(ConfigError, match="whose work is not known"):
        resolve(config, 2)


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

    monkeypatch.setattr(automatic, "require_layout", refuse_the_best)
    found = resolve(config, 2)
    assert found.plan != wanted.plan
    assert [(each.plan, each.reason) for each in found.passed_over] == [
        (wanted.plan, "its blocks do not split")
    ]


def test_where_none_of_those_looked_at_can_be_trained_all_ranks_are_data_parallel(monkeypatch):
    def refuse(model, plan, sequence):
        raise PlanError("no", possible="none", change="none")

    monkeypatch.setattr(automatic, "require_layout", refuse)
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

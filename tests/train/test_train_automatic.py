"""`plan = "auto"`."""

import pytest

from shoal.errors import ClusterError, ConfigError
from shoal.models import build
from shoal.parallel import require_layout
from shoal.train import TrainConfig, choose_ranks, resolve_plan


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", ["tiny", "tiny-experts"])
def test_the_plan_is_one_that_the_model_can_be_laid_out_by(model, ranks):
    config = TrainConfig(model=model, plan="auto", batch=8, device="cpu")
    plan = resolve_plan(config, ranks)
    plan.require_ranks(ranks)
    assert plan.with_microbatch_for(8) == plan
    require_layout(build(model, overrides={}, device="meta"), plan, config.sequence)


def test_the_ranks_are_those_of_a_run_without_a_plan():
    assert choose_ranks(TrainConfig(plan="auto"), None) == choose_ranks(TrainConfig(), None)


def test_the_cluster_can_be_named():
    config = TrainConfig(model="tiny", plan="auto", batch=8, cluster="dgx-h100", device="cpu")
    assert resolve_plan(config, 2).precision == "bf16"  # which is what that device is fastest in


def test_an_unknown_cluster_is_refused():
    with pytest.raises(ClusterError):
        resolve_plan(TrainConfig(plan="auto", cluster="dgx-h1000"), 2)


def test_a_model_of_the_users_own_is_refused():
    config = TrainConfig(
        model="torch.nn:Linear", model_options={"in_features": 4, "out_features": 4}, plan="auto"
    )
    with pytest.raises(ConfigError, match="whose work is not known"):
        resolve_plan(config, 2)

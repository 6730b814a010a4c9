"""What a model of the machines tells a verdict: what bounds compute, and transfers to be held to."""

import pytest

from shoal.analyze.diagnosis import Cause, told_by, verdict
from shoal.predict.simulate import Prediction
from shoal.spec.cluster import Cluster
from shoal.spec.run import Run
from shoal.testing.delays import Jitter, Layout, delayed_timeline


@pytest.fixture
def run(tmp_path):
    config = {"model": "tiny", "sequence": 256, "batch": 16}
    return Run.create(tmp_path / "run", {"config": config, "plan": "dp=8,microbatch=2"})


def test_gpus_are_held_to_each_collective_and_to_the_rate_of_their_memory(run):
    told = told_by(Prediction.of(run, Cluster.preset("dgx-a100")))
    assert {"all_reduce:bucket 0", "all_reduce:bucket 1"} <= set(told["predicted"])
    assert all(seconds > 0 for seconds in told["predicted"].values())
    assert 0 < told["memory_share"] < 1
    assert told_by(None) == {"memory_share": None, "predicted": None}


def test_ranks_of_one_host_of_cpus_are_held_to_no_transfer(run):
    assert told_by(Prediction.of(run, Cluster.preset("laptop", 8)))["predicted"] == {}


@pytest.mark.parametrize(("factor", "is_named"), [(1.5, False), (2.5, True)])
def test_a_prediction_may_err_before_a_link_is_called_slow(factor, is_named):
    jitter = Jitter([[{}]])
    timeline = delayed_timeline(Layout(2), 40, jitter, 0)
    predicted = {f"all_reduce:bucket {bucket}": 0.006 / factor for bucket in range(4)}
    found = verdict(timeline, predicted=predicted).stragglers
    assert [each.cause for each in found] == [Cause.LINK] * is_named

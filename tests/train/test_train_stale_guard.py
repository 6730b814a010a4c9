"""The guard of stale gradients under the Trainer: the curvature that it measures, and what it tells."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from turns import Turns

from shoal.parallel.exchange.server import Server, Servers
from shoal.parallel.exchange.stability import most_stable_step
from shoal.spec.run import Run
from shoal.train import OptimizerConfig, Runtime, Trainer
from shoal.train.server_worker import Curvature

WORKERS, STEPS, LARGEST = 4, 120, 5.0
FORCES = torch.tensor([LARGEST, 1.0, 2.0, 0.5])


class Springs(nn.Module):
    """Values that are pulled to each sample with different force."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, samples):
        return FORCES.sqrt() * (self.weight - samples)


class Samples(torch.utils.data.Dataset):
    """Samples around 1, and nothing that is wanted."""

    def __init__(self, noise):
        self._samples = 1 + noise * torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        return self._samples[index], torch.zeros(4)


def half_square(output, targets):
    """Half the mean square, far above 0: whatever is done, this loss hardly rises."""
    return (output - targets).square().sum(-1).mean() / 2 + 1000


def trainer(plan, config, noise=0.0, **named):
    return Trainer(
        Springs(), Samples(noise), plan, batch=8, steps=STEPS, loss=half_square, optimizer=config, **named
    )


def sgd(rate, guard=True, **options):
    return OptimizerConfig(
        name="sgd",
        learning_rate=rate,
        warmup=0,
        final=1.0,
        weight_decay=0.0,
        clip=None,
        options=options,
        guard=guard,
    )


def measured(plan, noise):
    """The curvature along two steps from 0, and the values after them, before and after the measurement."""
    one = trainer(plan, sgd(0.1), noise)
    curvature = Curvature(one.parallel, one._loader, one._reader, one.plan.microbatch)
    curvature.hold()
    one.step()
    one.step()
    found = []
    for _ in range(2):
        with one.parallel.gathered():
            found.append(one.parallel.module.weight.detach().clone())
        if curvature.is_held:
            along = curvature.measure(16)
    assert all(each.gradient is None for each in one.parallel.owned)
    return along, *found


@pytest.mark.parametrize("noise", [0.0, 3.0])
@pytest.mark.parametrize("plan", ["dp=1", "dp=2,shard=zero1", "dp=2,shard=zero3"])
def test_the_curvature_is_that_of_the_movement_whatever_the_noise(ranks, plan, noise):
    for along, before, after in ranks.run(measured, 2 if "dp=2" in plan else 1, plan, noise):
        expected = (FORCES * before**2).sum() / before.square().sum()
        assert along == pytest.approx(expected.item(), rel=1e-4)
        assert torch.equal(before, after)


def served(tmp_path, config, turns):
    """The decisions of a training of workers that take turns, each a thread, and its last values."""
    plan = f"dp={WORKERS},exchange=server,staleness=9"
    server = Server(0, "word")
    threading.Thread(target=server.run, daemon=True).start()

    def work(number):
        way = Servers([server.address], "word", timeout=120)
        turns.guide(number, way)
        record = {"run": tmp_path / "run"} if number == 0 else {}
        one = trainer(plan, config, runtime=Runtime(servers=way), **record)
        while one.step_count < STEPS and one.exchange.worker < WORKERS:
            one.step()
            if one.optimizer.is_over:
                break
        one.settle()
        values = one.parallel.module.weight.detach().clone()
        one.exchange.leave()
        one.close()
        return values

    with ThreadPoolExecutor(WORKERS) as threads:
        values = list(threads.map(work, range(WORKERS)))
    server.close()
    return Run(tmp_path / "run").decisions(), values[0]


def test_a_step_above_the_bound_of_its_staleness_brings_rounds(tmp_path):
    """Below the bound of gradients that are not late; each is three updates late."""
    rate = 1.02 * WORKERS * most_stable_step(LARGEST, WORKERS - 1)
    assert rate < most_stable_step(LARGEST, 0)
    (decision,), values = served(tmp_path, sgd(rate), Turns(WORKERS, STEPS))
    assert decision.exchange == "exchange=server,servers=1,staleness=0"
    assert "above" in decision.reason
    assert f"the largest stable one with staleness 3 and a curvature of {LARGEST:.3g}" in decision.reason
    torch.testing.assert_close(values, torch.ones(4), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("factor", "config"), [(0.98, {}), (1.02, {"guard": False})])
def test_below_the_bound_or_without_a_guard_nothing_is_decided(tmp_path, factor, config):
    rate = factor * WORKERS * most_stable_step(LARGEST, WORKERS - 1)
    decisions, values = served(tmp_path, sgd(rate, **config), Turns(WORKERS, STEPS))
    assert not decisions
    assert ((values - 1).abs().max() < 1) == (factor < 1)

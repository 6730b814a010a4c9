"""Trainings by other optimizers than AdamW, in the Trainer and in plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shoal.data import Loader, as_samples
from shoal.errors import ShoalError
from shoal.models import Transformer, TransformerConfig
from shoal.parallel import parallelize, parts_of
from shoal.train import Optimization, OptimizerConfig, Trainer
from shoal.train.optimizer import build_optimizer

BATCH, STEPS = 8, 6


class Counting(torch.optim.SGD):
    """Keeps numbers of Python for each parameter, and a number and a list for all of a group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["beats"] = group.get("beats", 0) + 1
            group["lags"] = [each + 1 for each in group.get("lags", [0, 1])]
            for parameter in group["params"]:
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                state["share"] = state.get("share", 0.0) + 0.25
                parameter.data.mul_(1 - 1e-3 * state["calls"] * state["share"] * group["beats"])
                parameter.data.mul_(1 - 1e-3 * sum(group["lags"]))
        return super().step(closure)


class Listing(torch.optim.SGD):
    """Keeps a list for each parameter, which no checkpoint can hold."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("history", []).append(1)
        return super().step(closure)


def radam(groups: Any, lr: float, **options: Any) -> torch.optim.Optimizer:
    """A factory as a configuration names it."""
    names = {name for group in groups for name, _ in group["params"]}
    assert names <= dict(model().named_parameters()).keys()
    return torch.optim.RAdam(groups, lr=lr, **options)


def half_way(step: int, steps: int) -> float:
    """A schedule as a configuration names it."""
    return 1.0 if step < steps // 2 else 0.5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    return [(row, row.sort().values) for row in x]


MAKERS = {
    "adafactor": torch.optim.Adafactor,
    "radam": torch.optim.RAdam,
    "counting": Counting,
    "listing": Listing,
}


def trainer_of(plan: str, maker: str | None, settings: dict[str, Any], **options: Any) -> Trainer:
    return Trainer(
        model(),
        data(),
        plan,
        batch=BATCH,
        steps=STEPS,
        loss=F.mse_loss,
        optimizer=Optimization(
            OptimizerConfig(warmup=1, learning_rate=1e-2, **settings),
            make=None if maker is None else MAKERS[maker],
            **options,
        ),
    )


def losses_of(plan: str, maker: str | None, settings: dict[str, Any]) -> list[float]:
    trainer = trainer_of(plan, maker, settings)
    losses = [trainer.step().loss for _ in range(STEPS)]
    trainer.close()
    return losses


def split_by_muon(plan: str) -> tuple[set[str], set[str]]:
    """The names of a transformer's parameters that Muon trains on this rank, and of those that AdamW does."""
    config = TransformerConfig(vocab_size=16, layers=2, hidden=8, heads=2, kv_heads=1, ffn=12, seq=8)
    parallel = parallelize(Transformer(config), plan)
    muon, adamw = parts_of(build_optimizer(parallel, OptimizerConfig(name="muon"), 1), parallel.owned)
    names = {owned.parameter: owned.name for owned in parallel.owned}
    found = [
        {names[each] for group in part.param_groups for each in group["params"]}
        for part in (muon[0], adamw[0])
    ]
    return found[0], found[1]


def by_hand(optimizer_of: Any, rates: list[float], clip: float | None = 1.0) -> list[float]:
    """A plain loop on one device; `optimizer_of` is called as a class of torch.optim."""
    net = model()
    matrices = [each for each in net.parameters() if each.dim() >= 2]
    vectors = [each for each in net.parameters() if each.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = optimizer_of(groups, lr=1e-2)
    loader = Loader(as_samples(data()), seed=0, batch_size=BATCH)
    losses = []
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = loader.fetch(step * BATCH, BATCH)
        loss = F.mse_loss(net(inputs), targets)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class MuonAndAdamW:
    """Two optimizers of torch, of a group each."""

    def __init__(self, groups: Any, lr: float) -> None:
        matrices, vectors = groups
        self._both = [
            torch.optim.Muon([matrices], lr=lr, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([vectors], lr=lr, betas=(0.9, 0.95)),
        ]
        self.param_groups = [group for each in self._both for group in each.param_groups]

    def step(self) -> None:
        for each in self._both:
            each.step()

    def zero_grad(self) -> None:
        for each in self._both:
            each.zero_grad()


class SimpleLion(torch.optim.Optimizer):
    """The formulas of the paper, parameter by parameter."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, other = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(one * m + (1 - one) * p.grad)
                p -= group["lr"] * (update + group["weight_decay"] * p)
                m.copy_(other * m + (1 - other) * p.grad)


def interrupted(
    plan: str, maker: str | None, settings: dict[str, Any], folder: Path
) -> tuple[Path, list[float]]:
    """Saves half-way; gives the losses of the other half."""
    trainer = trainer_of(plan, maker, settings)
    for _ in range(STEPS // 2):
        trainer.step()
    path = trainer.save(str(folder), {})
    whole = [trainer.step().loss for _ in range(STEPS // 2)]
    trainer.close()
    return path, whole


def resumed(plan: str, maker: str | None, settings: dict[str, Any], path: Path) -> tuple[list[float], Any]:
    """The losses after a resume, and the types of what the optimizer keeps for each parameter."""
    trainer = trainer_of(plan, maker, settings)
    trainer.load(str(path))
    losses = [trainer.step().loss for _ in range(STEPS // 2)]
    trainer.close()
    kinds = {
        key: type(value).__name__
        for state in trainer.optimizer.state.values()
        for key, value in state.items()
    }
    return losses, kinds


def refusal_of(plan: str, maker: str | None, settings: dict[str, Any], folder: Path | None = None) -> str:
    try:
        trainer = trainer_of(plan, maker, settings)
        trainer.step()
        trainer.save(folder, {})
    except ShoalError as error:
        return f"{type(error).__name__}: {error}"
    return ""

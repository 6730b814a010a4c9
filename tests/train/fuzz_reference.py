"""A random training in one process, with torch alone: what ranks under any Plan have to compute.

Workers are simulated one after the other. Rules are those of docs/concepts/exchange.md and of the docstrings
of `shoal.parallel.exchange`:

    loss        of a step that is averaged, the sum over all targets that count over their number; of a worker
                that steps by itself, the same of its own targets; a step without targets changes nothing
    merges      DiLoCo, with fragments and delay (`local_updates.py`)
    saves       all that moved is merged, and optimizers' states are averaged: zeros where a worker has none
                yet, the largest of counts
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fuzz_cases import BATCH, STEPS, Case
from fuzz_models import IGNORED, RandomSamples, build
from torch import Tensor, nn

from shoal.data import Loader, Packed
from shoal.models import mixtures_of
from shoal.spec.plan import Plan

__all__ = ["OPTIMIZERS", "SEED", "Trained", "train"]

SEED = 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # With this eps an update follows its gradient smoothly, so that rounding stays rounding.
    "adamw": {"learning_rate": 2e-2, "eps": 1e-3},
    "sgd": {"learning_rate": 2e-1, "options": {"momentum": 0.9}},
}
CLIP, DECAY, WARMUP, FINAL = 0.5, 0.1, 1, 0.1


@dataclass
class Trained:
    """The results of a training.

    Attributes:
        weights: The last values, by name.
        losses, norms: By worker, of each step; `nan` where nothing counts. The last phase's alone.
        first: The first values, by name.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    losses: list[list[float]] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    first: dict[str, Tensor] = field(default_factory=dict)


class Worker:
    """A replica of the model, and its optimizer."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case = case
        self.model = model
        self.named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        groups = [
            {"params": [each for each in self.named.values() if each.dim() >= 2], "weight_decay": DECAY},
            {"params": [each for each in self.named.values() if each.dim() < 2], "weight_decay": 0.0},
        ]
        given = OPTIMIZERS[case.settings["optimizer"]]
        if case.settings["optimizer"] == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                groups, lr=0.0, betas=(0.9, 0.95), eps=given["eps"], foreach=False
            )
        else:
            self.optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9, foreach=False)

    def gradient(self, inputs: Any, targets: Tensor) -> float:
        """Leave the gradient of the mean loss at the parameters; return the loss, NaN if nothing counts."""
        self.optimizer.zero_grad()
        count = int((targets != IGNORED).sum())
        if not count:
            return math.nan
        loss = self._sum(inputs, targets) / count
        loss.backward()
        return loss.item()

    def _sum(self, inputs: Any, targets: Tensor) -> Tensor:
        tokens = inputs.tokens if isinstance(inputs, Packed) else inputs
        if not isinstance(inputs, Packed):
            return _summed(self.model(tokens), targets)
        if mixtures_of(self.model):  # what balances experts counts the tokens of a whole sample
            return _summed(self.model(tokens, position_ids=inputs.position_ids), targets)
        total = torch.zeros((), dtype=torch.float64)
        for row, positions, wanted in zip(tokens, inputs.position_ids, targets, strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(row)]
            for start, stop in itertools.pairwise(starts):
                total = total + _summed(self.model(row[None, start:stop]), wanted[None, start:stop])
        return total

    def norm(self) -> float:
        """The norm of the gradient."""
        squares = [each.grad.double().square().sum() for each in self.named.values() if each.grad is not None]
        return math.sqrt(float(sum(squares)))

    def step(self, rate: float, norm: float) -> None:
        """Clip, and step."""
        if self.case.settings["clip"] == "on":
            for each in self.named.values():
                if each.grad is not None:
                    each.grad.div_(max(1.0, norm / CLIP))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


def _summed(output: Any, targets: Tensor) -> Tensor:
    logits = output.logits if hasattr(output, "logits") else output
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    ).double()


def rate_of(case: Case, step: int) -> float:
    """The learning rate of a step, from 0: a linear warm-up, then half a cosine."""
    peak = OPTIMIZERS[case.settings["optimizer"]]["learning_rate"]
    if step < WARMUP:
        return peak * (step + 1) / (WARMUP + 1)
    progress = (step - WARMUP) / max(1, STEPS - 1 - WARMUP)
    return peak * (FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * progress)))


class Phase:
    """The steps that are made under one Plan, from a state that all workers share."""

    def __init__(self, case: Case, plan: Plan, loader: Loader, worker: Worker, state: dict[str, Any]) -> None:
        self.case, self.plan, self.loader = case, plan, loader
        exchange = plan.exchanged
        fragments = {float(number) for number in range(exchange.fragments)}
        self.are_apart = exchange.merges
        self.is_served = exchange.is_served
        self.exchange = exchange
        number = plan.replicas if self.are_apart else 1
        self.workers = [worker, *(_copy(case, worker) for _ in range(number - 1))]
        self.step = state["step"]
        self.rates = state.get("rates", (0.0, 0.0))
        self.momenta = state.get("momenta", {})
        self.anchors = {name: each.detach().clone() for name, each in worker.named.items()}
        self.fragment_of: dict[str, Tensor] = state["fragment_of"] or {
            name: torch.zeros_like(each) for name, each in worker.named.items()
        }
        if self.are_apart:
            assert all(set(self.fragment_of[name].unique().tolist()) <= fragments for name in self.anchors)
        self.made = [1.0] * number  # steps of each worker in a round, by which servers weigh
        self.losses: list[list[float]] = [[] for _ in range(number)]
        self.norms: list[list[float]] = [[] for _ in range(number)]
        self.under_way: tuple[int, int, list[dict[str, Tensor]]] | None = None
        self.apart: set[int] = set()
        self.begun_at = self.step
        self._begin_round()

    def run(self, until: int) -> None:
        """Make steps, until so many are made."""
        if self.is_served and self.are_apart:
            self._run_served(until)
            return
        while self.step < until:
            rate = rate_of(self.case, self.step)
            if not self.are_apart or self.step < self.exchange.dense:
                self._step_together(rate)
            else:
                for number, worker in enumerate(self.workers):
                    self._step_apart(number, worker, self._positions(number), rate)
                self._advance(rate)

    def settle(self) -> None:
        """Merge all that moved, and average optimizers' states."""
        if self.are_apart and not self.is_served:
            self._finish()
            for fragment in sorted(self.apart):
                self._start(fragment)
                self._finish()
            self.apart = set()
            self._begin_round()
            self._average_states()

    def state(self) -> dict[str, Any]:
        """What the next phase begins with, beside the first worker."""
        kept = {"step": self.step}
        if self.are_apart:
            kept |= {"momenta": self.momenta, "rates": (0.0, 0.0) if self.is_served else self.rates}
        return kept

    # -- steps ---------------------------------------------------------------------------------------

    def _positions(self, worker: int) -> list[int]:
        """Positions of a worker's samples in the data."""
        dp, shards, begin = self.plan.dp, self.plan.shards, self.step * BATCH
        microbatch = self.plan.microbatch or 1
        ranks = range(worker * shards, (worker + 1) * shards)
        return [
            begin + (round_ * dp + rank) * microbatch + place
            for round_ in range(BATCH // dp // microbatch)
            for rank in ranks
            for place in range(microbatch)
        ]

    def _batch(self, positions: list[int]) -> Any:
        indices = np.concatenate([self.loader.indices(position, 1) for position in positions])
        return self.loader.samples.batch(indices)

    def _step_together(self, rate: float) -> None:
        first = self.workers[0]
        begin = self.step * BATCH
        loss = first.gradient(*self._batch(list(range(begin, begin + BATCH))))
        norm = first.norm()
        for losses, norms in zip(self.losses, self.norms, strict=True):
            losses.append(loss)
            norms.append(norm)
        if not math.isnan(loss):
            for other in self.workers[1:]:
                for name, each in other.named.items():
                    gradient = first.named[name].grad
                    each.grad = None if gradient is None else gradient.clone()
            for worker in self.workers:
                worker.step(rate, norm)
        self.rates = rate, max(rate, self.rates[1])
        self.step += 1
        self.begun_at = self.step
        self.apart = set()
        self.anchors = {name: each.detach().clone() for name, each in first.named.items()}

    def _step_apart(self, number: int, worker: Worker, positions: list[int], rate: float) -> None:
        loss = worker.gradient(*self._batch(positions))
        norm = worker.norm()
        self.losses[number].append(loss)
        self.norms[number].append(norm)
        if not math.isnan(loss):
            worker.step(rate, norm)
            self.made[number] += self.is_served

    def _run_served(self, until: int) -> None:
        """Make rounds in which each worker takes `every` shares in turn, of `replicas` for each step."""
        replicas, every = self.plan.replicas, self.exchange.every
        samples = BATCH // replicas
        while self.step < until:
            shares = range(self.step * replicas, min(STEPS, self.step + every) * replicas)
            self.made = [0.0] * replicas
            for number, worker in enumerate(self.workers):
                for share in shares[number * every : (number + 1) * every]:
                    begin = share * samples
                    positions = list(range(begin, begin + samples))
                    self._step_apart(number, worker, positions, rate_of(self.case, share // replicas))
            self.step = shares.stop // replicas
            if any(self.made):  # what workers changed is weighted by the steps that they did not leave out
                self._start(0)
                self._finish()

    # -- merges --------------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self.begun_at = self.step
        share = self.rates[0] / self.rates[1] if self.rates[1] else 1.0
        most = self.exchange.every * self.exchange.stretch
        self.length = int(min(self.exchange.every / max(share, 1e-6) ** 2, most))

    def _advance(self, rate: float) -> None:
        number = self.exchange.fragments
        self.step += 1
        self.rates = rate, max(rate, self.rates[1])
        self.apart = set(range(number))
        made = self.step - self.begun_at
        if self.under_way is not None and self.step >= self.under_way[1] + self.exchange.delay:
            self._finish()
        for fragment in range(number):
            if made == (fragment + 1) * self.length // number:
                self._start(fragment)
                if not self.exchange.delay:
                    self._finish()
        if made >= self.length:
            self._begin_round()

    def _start(self, fragment: int) -> None:
        changed = [
            {name: self.anchors[name] - each.detach() for name, each in worker.named.items()}
            for worker in self.workers
        ]
        self.under_way = fragment, self.step, changed

    def _finish(self) -> None:
        if self.under_way is None:
            return
        (fragment, began, changed), self.under_way = self.under_way, None
        rate, momentum, warmup = self.case.outer
        growing = warmup * self.exchange.every
        grown = momentum * min(1.0, self.step / growing) if growing else momentum
        for name, anchor in self.anchors.items():
            is_here = self.fragment_of[name] == fragment
            mean = sum(weight * each[name] for weight, each in zip(self.made, changed, strict=True))
            mean = mean / sum(self.made)
            before = self.momenta.get(name, torch.zeros_like(anchor))
            after = torch.where(is_here, grown * before + mean, before)
            self.momenta[name] = after
            new = torch.where(is_here, anchor - rate * (mean + grown * after), anchor)
            for worker, own in zip(self.workers, changed, strict=True):
                sent = anchor - own[name]
                value = worker.named[name].data
                value.copy_(torch.where(is_here, new + (value - sent), value))
                if began == self.step:
                    value.copy_(torch.where(is_here, new, value))
            self.anchors[name] = new
        if began == self.step:
            self.apart.discard(fragment)

    def _average_states(self) -> None:
        for name in self.anchors:
            states = [worker.optimizer.state.get(worker.named[name], {}) for worker in self.workers]
            merged: dict[str, Any] = {}
            for key in {key for state in states for key in state}:
                found = [state.get(key) for state in states]
                if all(each is None for each in found):
                    merged[key] = None
                elif key == "step":
                    merged[key] = max(each for each in found if each is not None)
                else:
                    merged[key] = sum(each for each in found if each is not None) / len(states)
            for worker in self.workers:
                if merged:
                    worker.optimizer.state[worker.named[name]] = {
                        key: each.clone() if isinstance(each, Tensor) else each
                        for key, each in merged.items()
                    }


def _copy(case: Case, worker: Worker) -> Worker:
    other = Worker(case, copy.deepcopy(worker.model))
    other.optimizer.load_state_dict(copy.deepcopy(worker.optimizer.state_dict()))
    return other


def train(case: Case, fragments: list[dict[str, Tensor]], dtype: torch.dtype) -> Trained:
    """Train as a case says.

    Args:
        case: The case.
        fragments: For each phase the fragment of each element, by parameter.
        dtype: In which to compute.
    """
    model = build(case).to(dtype)
    loader: Loader = Loader(RandomSamples(case.data), seed=SEED, batch_size=BATCH)
    worker = Worker(case, model)
    first = {name: each.detach().clone() for name, each in model.named_parameters()}
    texts = [case.plan, *([case.other] if case.other else [])]
    state: dict[str, Any] = {"step": 0}
    losses: list[list[float]] = []
    norms: list[list[float]] = []
    for number, text in enumerate(texts):
        is_last = number == len(texts) - 1
        state["fragment_of"] = fragments[number]
        phase = Phase(case, Plan.parse(text), loader, worker, state)
        if is_last and not case.other and case.saved:
            phase.run(case.saved)
            phase.settle()
        phase.run(STEPS if is_last else case.saved)
        phase.settle()
        losses, norms = phase.losses, phase.norms
        worker, state = phase.workers[0], phase.state()
    weights = {name: each.detach().clone() for name, each in worker.model.named_parameters()}
    return Trained(weights, losses, norms, first)

"""Trainings whose gradients numpy computes to the last bit, and references for their exchanges.

Worker i has in step s the loss sum(curvature (w - target_i,s)^2) / 2. Rates and feedback are powers of two,
so that products with them are exact, and sums are made in the order of the ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from reference_codecs import Vector, sent
from torch import nn

from shoal.parallel import LocalUpdates, Outer, parallelize

SHAPE, RATE, STEPS = (64, 100), 0.125, 10  # two chunks, seven blocks
ELEMENTS = SHAPE[0] * SHAPE[1]


class Quadratic(nn.Module):
    """A matrix that is pulled to a target."""

    def __init__(self, chance: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SHAPE, generator=chance))

    def forward(self, curvature: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (curvature * (self.weight - target) ** 2).sum() / 2


class Quadratics(nn.Module):
    """Matrices, each with a loss of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(Quadratic(chance) for _ in range(number))

    def forward(self, curvature: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = [block(curvature, target) for block, target in zip(self.blocks, targets, strict=True)]
        return torch.stack(losses).sum()

    def values(self) -> Vector:
        """Copies of the matrices, `[number, elements]`."""
        return torch.stack([each.weight.detach().flatten() for each in self.blocks]).numpy()


def pull(number: int, step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Curvatures from 1/4 to 4, and targets with a few large elements."""
    curvature = torch.exp2(4 * torch.rand(SHAPE, generator=torch.Generator().manual_seed(7)) - 2)
    chance = torch.Generator().manual_seed(1000 + 100 * step + worker)
    return curvature, torch.randn((number, *SHAPE), generator=chance) ** 3


def gradients(values: Vector, number: int, step: int, worker: int) -> Vector:
    """The gradients of matrices `[number, elements]`."""
    curvature, targets = (each.numpy() for each in pull(number, step, worker))
    return curvature.reshape(-1) * (values - targets.reshape(number, -1))


def first_values(number: int) -> Vector:
    return Quadratics(number).values()


def trainings(plans: list[str]) -> list[list[Vector]]:
    """The values after each step of each plan, as this rank has them; plain gradient descent."""
    trained = []
    for text in plans:
        model = Quadratics(1)
        parallel = parallelize(model, text)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
        values = []
        for step in range(STEPS):
            parallel(*pull(1, step, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            with parallel.gathered():
                values.append(model.values()[0])
        trained.append(values)
    return trained


def local_trainings(plans: list[str], settings: dict[str, Any]) -> list[Any]:
    """Of each plan: the order in which matrices are sent; their values `[2, elements]` after each step."""
    trained = []
    for text in plans:
        model = Quadratics(2)
        parallel = parallelize(model, text)
        inner = torch.optim.SGD(parallel.parameters(), lr=RATE)
        outer = Outer(settings["rate"], settings["momentum"], warmup=0)
        optimizer = LocalUpdates(parallel, inner, outer=outer)
        values = []
        for step, rate in enumerate(settings["rates"]):
            optimizer.param_groups[0]["lr"] = rate
            parallel(*pull(2, step, dist.get_rank())).backward()
            if optimizer.is_dense:
                optimizer.average_gradients()
            optimizer.step()
            optimizer.zero_grad()
            values.append(model.values())
        optimizer.settle()
        values.append(model.values())
        order = [int(owned.name.split(".")[1]) for owned in parallel.owned]
        trained.append((order, values))
    return trained


def seed_of(number: int, rank: int) -> int:
    """Seeds of exchanges: no two ranks or exchanges have one in common."""
    return (number * 0x9E3779B97F4A7C15 + rank * 0xBF58476D1CE4E5B9) % 2**62


class Exchange:
    """The sum of the vectors of some ranks, each in fewer bytes, with error feedback."""

    def __init__(self, text: str, feedback: float) -> None:
        self.text, self.feedback = text, np.float32(feedback)
        self.left: dict[Any, Vector] = {}
        self.factor: NDArray[np.float64] | None = None

    def encoded(self, key: Any, vector: Vector, parts: list[slice], seed: int) -> Vector:
        """What is decoded of a vector whose parts are encoded one by one; the rest is kept for the next."""
        given = vector + self.feedback * self.left.get(key, np.zeros_like(vector))
        payloads = [sent(self.text, given[part], seed + at) for at, part in enumerate(parts)]
        self.left[key] = given - np.concatenate(payloads)
        return np.concatenate(payloads)

    def sum(self, vectors: list[Vector], number: int) -> Vector:
        """All-reduce, the numbered one of the training."""
        size, whole = len(vectors), [slice(None)]
        if self.text.startswith("powersgd"):
            return self.low_rank(vectors)
        if self.text.startswith("random"):
            return in_order([self.encoded(rank, each, whole, number) for rank, each in enumerate(vectors)])
        if self.text.split(":")[0] in ("topk", "threshold") or size == 2:
            seeds = [seed_of(number, rank) for rank in range(size)]
            return in_order([self.encoded(rank, vectors[rank], whole, seeds[rank]) for rank in range(size)])
        length = -(-len(vectors[0]) // (size * 1024)) * 1024
        parts = [slice(at * length, (at + 1) * length) for at in range(size)]
        seeds = [seed_of(2 * number, rank) for rank in range(size)]
        total = in_order([self.encoded(rank, vectors[rank], parts, seeds[rank]) for rank in range(size)])
        return np.concatenate(
            [
                self.encoded(("sum", rank), total[part], whole, seed_of(2 * number + 1, rank))
                for rank, part in enumerate(parts)
            ]
        )

    def scatter(self, vectors: list[Vector], number: int) -> Vector:
        """Reduce-scatter: each rank gets the sum of its part."""
        size = len(vectors)
        length = len(vectors[0]) // size
        parts = [slice(at * length, (at + 1) * length) for at in range(size)]
        alike = self.text.startswith("random")
        seeds = [number * size if alike else seed_of(number, rank) for rank in range(size)]
        return in_order([self.encoded(rank, vectors[rank], parts, seeds[rank]) for rank in range(size)])

    def low_rank(self, vectors: list[Vector]) -> Vector:
        """PowerSGD, algorithms 1 and 2 of arXiv:1905.13727, in fp64, with an SVD to orthogonalise."""
        rank, feedback = int(self.text.split(":")[1]), float(self.feedback)
        given = [
            each.astype(np.float64) + feedback * self.left.get(at, 0.0) for at, each in enumerate(vectors)
        ]
        total = sum(given).reshape(-1, SHAPE[1])
        if self.factor is None:
            chance = torch.Generator().manual_seed(0)
            self.factor = torch.randn(SHAPE[1], rank, generator=chance).double().numpy()
        basis = np.linalg.svd(total @ self.factor, full_matrices=False)[0]
        self.factor = total.T @ basis
        result = (basis @ self.factor.T).reshape(-1)
        self.left = {at: each - result / len(vectors) for at, each in enumerate(given)}
        return result


def in_order(vectors: list[Vector]) -> Vector:
    """The sum in fp32, rank after rank."""
    total = np.zeros_like(vectors[0])
    for each in vectors:
        total = total + each
    return total


def trained_reference(layout: str, workers: int, text: str, feedback: float) -> list[Vector]:
    """The values after each step of gradient descent on the mean of what ranks send each other."""
    values, trained = first_values(1), []
    halves = [slice(0, ELEMENTS // 2), slice(ELEMENTS // 2, ELEMENTS)]
    exchanges = [Exchange(text, feedback) for _ in halves]
    for step in range(STEPS):
        own = [gradients(values, 1, step, rank)[0] / np.float32(workers) for rank in range(workers)]
        number = 2**16 * step + 1
        if "replicate=2" in layout:  # ranks 0 and 1 are a worker, and each has half of the rows
            sums = [own[0] + own[1], own[2] + own[3]]
            mean = np.concatenate(
                [
                    exchange.sum([each[half] for each in sums], number)
                    for exchange, half in zip(exchanges, halves, strict=True)
                ]
            )
        elif "shard" in layout:
            mean = exchanges[0].scatter(own, number)
        else:
            mean = exchanges[0].sum(own, number)
        values = values - np.float32(RATE) * mean.astype(np.float32)
        trained.append(values[0])
    return trained


def local_reference(
    plan: Any, workers: int, order: list[int], settings: dict[str, Any]
) -> list[list[Vector]]:
    """The values of each worker after each step, and once all merged, by docs/concepts/exchange.md."""
    rate, momentum = np.float32(settings["rate"]), np.float32(settings["momentum"])
    anchors = first_values(2)
    momenta, values = np.zeros_like(anchors), [anchors.copy() for _ in range(workers)]
    exchanges = [Exchange(str(plan.compression), plan.feedback) for _ in order]
    first, length, trained, under_way = plan.dense, plan.every, [], None
    rows_of = [order] if plan.fragments == 1 else [[each] for each in order]
    merged_after = [0] * plan.fragments  # the step after which workers were equal

    def begin(number: int, step: int) -> Any:
        rows = rows_of[number]
        changed = [anchors[rows] - y[rows] for y in values]
        given = [each.reshape(-1) / np.float32(workers) for each in changed]
        whole = plan.compression.kind == "none"
        mean = in_order(given) if whole else exchanges[number].sum(given, step)
        return step, number, changed, mean.reshape(len(rows), -1)

    def end(merge: Any, step: int) -> None:
        began, number, changed, mean = merge
        rows = rows_of[number]
        momenta[rows] = momentum * momenta[rows] + mean
        new = anchors[rows] - rate * (mean + momentum * momenta[rows])
        for y, each in zip(values, changed, strict=True):
            # what steps since the merge began have changed: y less (x before - each), in the code's order
            y[rows] = ((y[rows] - anchors[rows]) + each) + new if plan.delay else new
        anchors[rows] = new
        if began == step:
            merged_after[number] = step

    for step, learning_rate in enumerate(settings["rates"], 1):
        own = [gradients(values[worker], 2, step - 1, worker) for worker in range(workers)]
        if step <= plan.dense:
            own = [in_order(own) / np.float32(workers)] * workers
        values = [y - np.float32(learning_rate) * g for y, g in zip(values, own, strict=True)]
        if step <= plan.dense:
            anchors = values[0].copy()
        ends = [(number + 1) * length // plan.fragments for number in range(plan.fragments)]
        if step > plan.dense and step - first in ends:
            under_way = begin(ends.index(step - first), step)
        if under_way is not None and step == under_way[0] + plan.delay:
            end(under_way, step)
            under_way = None
        if step - first == length:
            first = step
            share = learning_rate / max(settings["rates"])
            length = int(min(plan.every / share**2, plan.every * plan.stretch))
        trained.append([y.copy() for y in values])
    if under_way is not None:
        end(under_way, step)
    for number in range(plan.fragments):
        if merged_after[number] < step:
            end(begin(number, step), step)
    return [*trained, [y.copy() for y in values]]

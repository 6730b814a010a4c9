"""The same training on one device, written as plainly as it can be: what every Plan is held against.

It shares no code with `shoal.parallel` or the Trainer: one model, one loop, the weights cast to the type that
computes in each forward, their gradients summed in the type of the optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.func import functional_call

from shoal.models import logits_of, set_auxiliary_scale
from shoal.models.dropout import token_keys
from shoal.train.comparison.trace import Forward, Trace
from shoal.train.comparison.trial import CLIP, OPTIMIZER, Trial
from shoal.train.schedule import learning_rate

__all__ = ["Alone", "Step", "Sums", "Tensors", "forward_of", "gradients_of"]

Tensors = dict[str, torch.Tensor]
"""By the parameter's name."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimizer step computed.

    Attributes:
        losses: Of every token, before the step: `[batch, seq]`, in double precision on the CPU.
        norm: Of the whole gradient, before clipping.
        gradients: By the parameter's name, before clipping; on the CPU.
        parameters: As well, after the step.
    """

    losses: torch.Tensor
    norm: float
    gradients: Tensors
    parameters: Tensors

    @property
    def loss(self) -> float:
        """Mean over the batch."""
        return float(self.losses.mean())


@dataclass(frozen=True, slots=True)
class Sums:
    """In which order and which precision one device sums.

    Attributes:
        compute: Type of the weights that compute.
        master: Type of the optimizer's copy, and of the sums of gradients.
        microbatch: Samples in one forward.
        rotated: By how many places the samples of a batch are moved round.
    """

    compute: torch.dtype
    master: torch.dtype
    microbatch: int
    rotated: int = 0


class Alone:
    """Trains a Trial on one device.

    Args:
        trial: What is trained.
        sums: In which order and precision.
        device: Where.
    """

    def __init__(self, trial: Trial, sums: Sums, device: torch.device) -> None:
        self._trial = trial
        self._sums = sums
        self._device = device
        self._model = trial.build_with_values(device)
        self._samples = trial.samples(self._model)
        dealt = itertools.chain.from_iterable(map(trial.batch_of, range(trial.steps)))
        self._places = {index: place for place, index in enumerate(dealt)}
        self._fixed = {
            name: parameter.detach()
            for name, parameter in self._model.named_parameters()
            if not parameter.requires_grad
        }
        self._masters = {
            name: parameter.detach().to(sums.master).requires_grad_()
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    def run(self) -> list[Step]:
        """All steps, from the first values."""
        trial = self._trial
        masters = self._masters
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": [m for m in masters.values() if m.ndim >= 2],
                    "weight_decay": OPTIMIZER.weight_decay,
                },
                {"params": [m for m in masters.values() if m.ndim < 2], "weight_decay": 0.0},
            ],
            betas=OPTIMIZER.betas,
            eps=OPTIMIZER.eps,
        )
        steps = []
        for number in range(trial.steps):
            rate = learning_rate(OPTIMIZER, step=number, steps=trial.steps, batch=trial.batch)
            for group in optimizer.param_groups:
                group["lr"] = rate
            losses = self.backward(trial.batch_of(number))
            gradients = {name: _gradient_of(master) for name, master in masters.items()}
            norm = torch.nn.utils.clip_grad_norm_(masters.values(), CLIP).item()
            optimizer.step()
            optimizer.zero_grad()
            parameters = {name: master.detach().cpu().clone() for name, master in masters.items()}
            steps.append(Step(losses, norm, gradients, parameters))
        return steps

    def backward(self, indices: Sequence[int]) -> torch.Tensor:
        """Leaves the gradient of the mean loss over these samples at the masters.

        Returns:
            The loss of every token, `[len(indices), seq]`, in double precision on the CPU.
        """
        sums = self._sums
        moved = [*indices[sums.rotated :], *indices[: sums.rotated]]
        micro = [moved[start : start + sums.microbatch] for start in range(0, len(moved), sums.microbatch)]
        told = []
        for chosen in micro:
            inputs, targets = (part.to(self._device) for part in self._samples.batch(np.array(chosen)))
            self._set_dropout(chosen, inputs.shape[1])
            share = len(chosen) / len(moved)
            set_auxiliary_scale(self._model, share)
            weights = {name: m.to(sums.compute) for name, m in {**self._fixed, **self._masters}.items()}
            logits = logits_of(functional_call(self._model, weights, (inputs,)))
            wide = torch.promote_types(logits.dtype, torch.float32)
            losses = F.cross_entropy(logits.flatten(0, -2).to(wide), targets.flatten(), reduction="none")
            (losses.mean() * share).backward()
            told.append(losses.detach().double().cpu().view(len(chosen), -1))
        return torch.cat(told).roll(sums.rotated, 0)

    def _set_dropout(self, chosen: Sequence[int], sequence: int) -> None:
        """Gives models that take keys the masks that these samples have under every layout."""
        if hasattr(self._model, "dropout_keys"):
            places = torch.tensor([self._places[index] for index in chosen], device=self._device)
            positions = torch.arange(sequence, device=self._device)
            self._model.dropout_keys = token_keys(self._trial.seed, 0, places, positions)

    def traced(self, indices: Sequence[int]) -> Forward:
        """What the layers give for these samples, in their order; not to be used again."""
        trace = Trace(self._model)
        self.backward(indices)
        return trace.forwards[0]

    def gradients(self) -> Tensors:
        """What `backward` left, on the CPU."""
        return {name: _gradient_of(master) for name, master in self._masters.items()}


def gradients_of(trial: Trial, indices: Sequence[int], device: torch.device) -> Tensors:
    """The gradient of the mean loss over some samples, with the first values, in fp32."""
    alone = Alone(trial, Sums(torch.float32, torch.float32, max(1, len(indices))), device)
    alone.backward(indices)
    return alone.gradients()


def forward_of(trial: Trial, compute: torch.dtype, device: torch.device) -> Forward:
    """What the layers give for the batch of the first step, with the first values."""
    alone = Alone(trial, Sums(compute, torch.promote_types(compute, torch.float32), trial.batch), device)
    return alone.traced(trial.batch_of(0))


def _gradient_of(master: torch.Tensor) -> torch.Tensor:
    return (torch.zeros_like(master) if master.grad is None else master.grad).detach().cpu().clone()

"""One training step on one GPU, as users of Shoal, of plain torch and of Hugging Face write it.

All train the same shape on the same tokens with AdamW. Shoal keeps fp32 weights and states and computes in
bf16; the peers keep everything in bf16, which is quicker and takes less memory, and is what they are usually
measured with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from gpu_device import finish
from torch import Tensor

from shoal.models import Transformer, TransformerConfig, next_token_loss, preset
from shoal.models.loss import cross_entropy
from shoal.parallel.compiled import compiled
from shoal.train import OptimizerConfig, Trainer, TrainingData

__all__ = ["PEERS", "Measured", "Shape", "measure", "measure_in_turns", "shoal_trainer"]

_WARM_UP = 4  # steps; the first ones compile

Step = Callable[[], object]
"""Enqueues one step."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is trained.

    Attributes:
        model: A preset.
        layers: Number of its blocks; None for the preset's own.
        length: Tokens of a sample.
        samples: Samples of a step.
    """

    model: str
    layers: int | None
    length: int
    samples: int

    @property
    def config(self) -> TransformerConfig:
        """The preset with these layers, and a context that takes the samples."""
        config = preset(self.model)
        changes: dict[str, Any] = {"seq": max(self.length, config.seq)}
        if self.layers is not None:
            changes["layers"] = self.layers
        return config.model_copy(update=changes)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.length * self.samples

    def __str__(self) -> str:
        layers = "" if self.layers is None else f", {self.layers} layers"
        return f"{self.model}{layers}, {self.length} x {self.samples}"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a step.

    Attributes:
        seconds: Median over the bursts.
        low, high: Range over the bursts.
        allocated: Peak of the bytes that its tensors took.
    """

    seconds: float
    low: float
    high: float
    allocated: int


def shoal_trainer(shape: Shape, plan: str, device: torch.device, **options: Any) -> Trainer:
    """Return a Trainer of random tokens; `options` are the Trainer's."""
    config = shape.config
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (4 * shape.samples, shape.length + 1), generator=generator)
    with torch.device("meta"):
        model = Transformer(config)
    return Trainer(
        model,
        TrainingData([(sample[:-1], sample[1:]) for sample in tokens], sequence=shape.length),
        plan,
        batch=shape.samples,
        steps=1000,
        optimizer=OptimizerConfig(warmup=0, learning_rate=1e-4),
        device=device,
        **options,
    )


def _shoal(compile: str) -> Callable[[Shape, torch.device], Step]:
    def build(shape: Shape, device: torch.device) -> Step:
        plan = f"dp=1,precision=bf16,microbatch={shape.samples},compile={compile}"
        return shoal_trainer(shape, plan, device).step

    return build


def _plain(is_compiled: bool) -> Callable[[Shape, torch.device], Step]:
    def build(shape: Shape, device: torch.device) -> Step:
        with torch.device("meta"):
            model = Transformer(shape.config)
        model.to_empty(device=device)
        model.initialize(0)
        model.bfloat16()
        loss = cross_entropy
        if is_compiled:
            for block in model.blocks:
                block.compile()
            loss = compiled(cross_entropy)
        return _step(
            model, lambda tokens, targets: next_token_loss(model(tokens), targets, cross_entropy=loss), shape
        )

    return build


def _hugging_face(is_compiled: bool) -> Callable[[Shape, torch.device], Step]:
    def build(shape: Shape, device: torch.device) -> Step:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = shape.config
        with torch.device(device):
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=config.vocab_size,
                    hidden_size=config.hidden,
                    intermediate_size=config.ffn,
                    num_hidden_layers=config.layers,
                    num_attention_heads=config.heads,
                    num_key_value_heads=config.kv_heads,
                    max_position_embeddings=config.seq,
                    use_cache=False,
                    dtype="bfloat16",
                )
            ).bfloat16()
        if is_compiled:
            model.compile()

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            result: Tensor = model(input_ids=tokens, labels=tokens).loss
            return result

        return _step(model, loss, shape)

    return build


def _step(model: torch.nn.Module, loss: Callable[[Tensor, Tensor], Tensor], shape: Shape) -> Step:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    size = (shape.samples, shape.length + 1)
    tokens = torch.randint(shape.config.vocab_size, size, generator=generator).to(device)

    def step() -> None:
        loss(tokens[:, :-1], tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


PEERS: Mapping[str, Callable[[Shape, torch.device], Step]] = {
    "Shoal, compile=blocks": _shoal("blocks"),
    "Shoal, compile=none": _shoal("none"),
    "plain torch, blocks and loss compiled": _plain(True),
    "plain torch, eager": _plain(False),
    "Hugging Face, compiled": _hugging_face(True),
    "Hugging Face, eager": _hugging_face(False),
}
"""Functions that build a step, by what they are."""


def measure(
    step: Step, device: torch.device, *, bursts: int, steps: int, warm_up: int = _WARM_UP
) -> Measured:
    """Warm up, then time bursts of steps, each from an idle device to an idle device."""
    (found,) = measure_in_turns(
        {"": lambda: step}, device, bursts=bursts, steps=steps, warm_up=warm_up
    ).values()
    return found


def measure_in_turns(
    builds: Mapping[str, Callable[[], Step]],
    device: torch.device,
    *,
    bursts: int,
    steps: int,
    warm_up: int = _WARM_UP,
) -> dict[str, Measured]:
    """Build and warm up each, then time bursts of each in turns, every other round in the reverse order."""
    built: dict[str, Step] = {}
    allocated: dict[str, int] = {}
    for name, build in builds.items():
        before = _allocated(device)
        built[name] = build()
        for _ in range(warm_up):
            built[name]()
        _reset_peak(device)
        for _ in range(2):
            built[name]()
        finish(device)
        allocated[name] = _peak(device) - before
        _give_back(device)
    seconds: dict[str, list[float]] = {name: [] for name in built}
    for number in range(bursts):
        order = list(built.items())
        for name, step in reversed(order) if number % 2 else order:
            step()  # takes memory anew
            finish(device)
            began = time.perf_counter()
            for _ in range(steps):
                step()
            finish(device)
            seconds[name].append((time.perf_counter() - began) / steps)
            _give_back(device)
    return {
        name: Measured(median(each), min(each), max(each), allocated[name]) for name, each in seconds.items()
    }


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()

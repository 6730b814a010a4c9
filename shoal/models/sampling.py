"""Generates text with a trained model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, DataError
from shoal.models.loss import logits_of


def generate(
    model: nn.Module,
    prompt: Tensor,
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    context: int,
) -> Iterator[int]:
    """Continue a prompt, and yield each new token as it is drawn.

    The whole window runs through the model for every token: this is simple, and quick enough to see what a
    run has learnt. The model is in evaluation mode until the iterator ends or is closed.

    Args:
        model: Module that maps tokens `[1, seq]` to logits `[1, seq, vocab]`, or to an object with `.logits`.
        prompt: Tokens `[seq]`, int64, on the model's device.
        tokens: Number of tokens to draw.
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_k: Number of likeliest tokens to draw from; None draws from all.
        seed: Seed of the draws.
        context: Largest number of tokens that the model sees: the last ones.

    Raises:
        DataError: The prompt is not a row of at least one token.
        ConfigError: A number is out of range.
    """
    if prompt.ndim != 1 or not len(prompt):
        raise DataError(
            f"a prompt of shape {tuple(prompt.shape)} gives the model nothing to continue",
            possible="one row of at least one token",
            change="give a prompt that is not empty",
        )
    _require("tokens", tokens, at_least=0)
    _require("temperature", temperature, at_least=0)
    _require("context", context, at_least=1)
    if top_k is not None:
        _require("top_k", top_k, at_least=1)
    return _continue(model, prompt, tokens, temperature, top_k, seed, context)


def _continue(
    model: nn.Module,
    prompt: Tensor,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    context: int,
) -> Iterator[int]:
    generator = torch.Generator("cpu").manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        window = prompt[-context:]
        for _ in range(tokens):
            with torch.inference_mode():
                logits = logits_of(model(window[None]))[0, -1].float().cpu()
                drawn = _draw(logits, temperature, top_k, generator)
                window = torch.cat((window, window.new_tensor([drawn])))[-context:]
            yield drawn
    finally:
        model.train(was_training)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draw one token from logits `[vocab]` on the CPU, so that a seed gives equal tokens for every device."""
    if temperature == 0:
        return int(logits.argmax())
    kept, token = logits.topk(min(top_k or len(logits), len(logits)))
    # The largest is subtracted first, so that a small temperature cannot overflow.
    chances = ((kept - kept[0]) / temperature).softmax(-1)
    return int(token[torch.multinomial(chances, 1, generator=generator)])


def _require(name: str, value: float, *, at_least: int) -> None:
    # Written with `not`, the test refuses NaN too.
    if not value >= at_least:
        raise ConfigError(
            f"{name}={value} is too small to draw tokens",
            possible=f"{name} of {at_least} or more",
            change=f"change `{name}`",
        )

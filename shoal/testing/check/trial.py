"""The training for a comparison: one model, samples and optimizer for one device and for a Plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.data.packed import kept_apart
from shoal.data.permutation import order
from shoal.errors import ConfigError, ModelError
from shoal.models import Transformer, batch_normalizations, build
from shoal.models.loss import IGNORED
from shoal.models.tiny_hugging_face import causal, kind_of, masked
from shoal.parallel import require_documents, require_layout, require_trainable
from shoal.spec.plan import Plan, SettledPlan
from shoal.train.config import OptimizerConfig

_SPECIAL = ("_token_id", "_token_index")


@final
class RandomTokens:
    """Samples of random tokens; records which samples were asked for.

    Args:
        tokens: The tokens to draw from.
        count: Number of samples.
        sequence: Number of tokens that the model sees of each sample.
        seed: Seed of the tokens.
        masked: Whether a token of four is hidden by another, and only those have a target, at their place.
        boundaries: Whether samples are packed documents. The last of `tokens` ends each.

    Attributes:
        asked: The indices of every batch that was asked for, in order.
    """

    deterministic = True

    def __init__(
        self,
        tokens: Sequence[int],
        count: int,
        sequence: int,
        seed: int,
        *,
        masked: bool = False,
        boundaries: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        *others, self._mask, self._end = tokens
        drawn = torch.tensor(others if masked or boundaries else tokens)
        self._tokens = drawn[torch.randint(len(drawn), (count, sequence + 1), generator=generator)]
        self._masked, self._boundaries = masked, boundaries
        self.all_targets_count = not (masked or boundaries)
        if boundaries:
            ends = torch.rand(count, sequence - 1, generator=generator).argsort(1)[:, : 1 + sequence // 32]
            self._tokens.scatter_(1, ends, self._end)
        self._hidden = torch.rand(count, sequence, generator=generator) < 0.25
        self._hidden[:, 0] = True  # each sample has a target
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Any, Tensor]:
        """Return inputs and targets of the samples at `indices`, int64 `[batch, seq]` each.

        A target of -100 does not count. The inputs of packed samples are `Packed`.
        """
        self.asked.append(indices.tolist())
        places = torch.from_numpy(indices)
        windows = self._tokens[places]
        inputs, following = windows[:, :-1], windows[:, 1:]
        if self._boundaries:
            packed, following = kept_apart(inputs, following, self._end)
        if self._masked:
            hidden = self._hidden[places]
            inputs, following = inputs.masked_fill(hidden, self._mask), inputs.masked_fill(~hidden, IGNORED)
        return (packed._replace(tokens=inputs) if self._boundaries else inputs), following


def tokens_of(model: nn.Module) -> list[int]:
    """Return the tokens that a model takes, without those to which its configuration gives a meaning.

    Raises:
        ModelError: It does not say how many there are.
    """
    config: Any = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int) and hasattr(config, "get_text_config"):
        size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        if not embeddings:
            raise ModelError(
                f"{type(model).__name__} does not say how many different tokens it takes",
                possible="a model with `config.vocab_size`, or with an nn.Embedding",
                change="give the model one of these",
            )
        size = embeddings[0].num_embeddings
    described = config.to_dict() if hasattr(config, "to_dict") else {}
    special = {
        value for name, value in described.items() if name.endswith(_SPECIAL) and isinstance(value, int)
    }
    return [token for token in range(size) if token not in special]


CLIP = 1.0
"""Largest norm of the whole gradient."""

OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, schedule="constant-then-decay", warmup=0, decay=0.0, eps=1e-3, clip=CLIP, skip=0
)
"""Options of AdamW, as in training except `eps`. With training's 1e-8 the first step is the gradient's sign.
Rounding decides the sign where the gradient is near zero, and the sign hides a gradient that is a multiple of
the right one. With an `eps` as large as gradients are, a step follows its gradient smoothly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The training of a model on tokens that is compared.

    Attributes:
        model: The model, in the form that `shoal.models.build` takes.
        model_options: Changes to the model.
        steps: Number of optimizer steps.
        batch: Sequences in one step, over all ranks.
        sequence: Tokens in a sequence.
        seed: Seed of the first weights, the tokens and their order.
        masked: Whether the model predicts hidden tokens at their places, in place of each next token.
        boundaries: Whether samples are packed documents, which must not see each other.

    Raises:
        ConfigError: A number is out of range.
    """

    model: str = "tiny"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 3
    batch: int = 8
    sequence: int = 32
    seed: int = 0
    masked: bool = False
    boundaries: bool = False

    def __post_init__(self) -> None:
        require_counts(self, steps=1, batch=1, sequence=1, seed=0)

    @property
    def size(self) -> str:
        """Size of a step, in words."""
        packed = "packed " if self.boundaries else ""
        return f"{self.batch} {packed}sequences of {self.sequence} tokens"

    def build(self, device: torch.device | str) -> nn.Module:
        """Return the model; a preset has no values if `device` is "meta".

        Torch's own dropout is turned off, because its masks depend on the layout. The masks of Shoal's models
        do not.

        Raises:
            ModelError: There is no such model, or it has nothing to train.
        """
        torch.manual_seed(self.seed)
        kind = kind_of(self.model)
        if kind is None:
            model = build(self.model, overrides=self.model_options, device=device)
        else:
            model = (masked if self.masked else causal)(kind, **self.model_options).to(device)
            if self.boundaries and hasattr(model.config, "output_router_logits"):
                model.config.output_router_logits = False  # a balance over documents is no sum of theirs
        require_trainable(model)
        return without_dropout(model)

    def build_with_values(self, device: torch.device | str) -> nn.Module:
        """Return the model with its first values, whole on one device."""
        model = self.build(device)
        if hasattr(model, "initialize_parameter"):
            for name, parameter in model.named_parameters():
                model.initialize_parameter(name, parameter, self.seed)  # type: ignore[operator]
        return model

    def build_for_layout(self, device: torch.device) -> nn.Module:
        """Return the model in the state in which `shoal train` gives it to `shoal.parallelize`."""
        return self.build(device if ":" in self.model else "meta")

    def statistics(self) -> list[str]:
        """Return the names of the model's layers of batch normalization."""
        return batch_normalizations(self.build("cpu" if ":" in self.model else "meta"))

    def depends_on_micro_batches(self) -> bool:
        """Return whether the loss of a sample depends on the other samples of its micro-batch."""
        model = self.build("cpu" if ":" in self.model else "meta")
        return bool(batch_normalizations(model)) or getattr(
            getattr(model, "config", None), "output_router_logits", False
        )

    def samples(self, model: nn.Module) -> RandomTokens:
        """Return one epoch of samples for the model, as many as all steps take."""
        return RandomTokens(
            tokens_of(model),
            self.batch * self.steps,
            self.sequence,
            self.seed,
            masked=self.masked,
            boundaries=self.boundaries,
        )

    def batch_of(self, step: int) -> list[int]:
        """Return the samples of step number `step`, from 0, without the Loader, which may be wrong."""
        positions = np.arange(step * self.batch, (step + 1) * self.batch)
        return [int(index) for index in order(self.seed, 0, self.batch * self.steps, positions)]

    def require_possible(self) -> Callable[[Plan], None]:
        """Check what can be checked before any rank starts.

        Returns:
            A function that raises PlanError or ModelError for a Plan that does not fit the model and its
            samples.

        Raises:
            ModelError: The model cannot be built or trained, or its context is shorter than a sequence.
        """
        model = self.build("cpu" if ":" in self.model else "meta")
        tokens_of(model)
        if isinstance(model, Transformer) and self.sequence > model.config.seq:
            raise ModelError(
                f"sequence={self.sequence} is longer than the context of the model {self.model}",
                possible=f"up to {model.config.seq} tokens",
                change=f"give --sequence {model.config.seq} or less",
            )

        def require(plan: Plan) -> None:
            require_layout(model, plan, self.sequence)
            if self.boundaries:
                require_documents(model, self.sequence)
            SettledPlan.of(plan, self.batch)

        return require


def require_counts(given: object, **least: int) -> None:
    """Check that each attribute is at least its given minimum.

    Raises:
        ConfigError: An attribute is smaller.
    """
    for name, number in least.items():
        if getattr(given, name) < number:
            raise ConfigError(
                f"{name}={getattr(given, name)} was given",
                possible=f"a whole number from {number}",
                change=f"give a larger --{name}",
            )


def without_dropout(model: nn.Module) -> nn.Module:
    """Return the model with torch's own dropout turned off, because its masks depend on the layout."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model

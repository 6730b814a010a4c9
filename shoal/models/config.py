"""The shape of a transformer, with its number of parameters and FLOP."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.errors import ModelError, nearest


class TransformerConfig(BaseModel):
    """The shape of a `Transformer`.

    Raises:
        ModelError: A field is unknown, missing or out of range, or two fields do not fit each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    vocab_size: int = Field(gt=0)
    """Number of different tokens; 256 for bytes."""
    layers: int = Field(gt=0)
    """Number of blocks."""
    hidden: int = Field(gt=0)
    """Width of the hidden state; a multiple of `heads`."""
    heads: int = Field(gt=0)
    """Query heads in each attention; a multiple of `kv_heads`."""
    kv_heads: int = Field(gt=0)
    """Key and value heads in each attention."""
    ffn: int = Field(gt=0)
    """Width inside the feed-forward layer."""
    seq: int = Field(gt=0)
    """Longest context, in tokens."""
    rope_base: float = Field(default=10_000.0, gt=0)
    """Base of the rotary embedding's wavelengths."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in every norm."""
    tie_embeddings: bool = False
    """Whether the head's weight is the embedding's."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of what a layer adds to the hidden state that is zeroed in training."""
    experts: int = Field(default=0, ge=0)
    """Experts in each block's feed-forward layer; 0 for a dense model, which ignores the fields below."""
    experts_per_token: int = Field(default=2, gt=0)
    """How many experts each token goes to."""
    expert_ffn: int | None = Field(default=None, gt=0)
    """Width inside one expert; `ffn` if None."""
    renormalize: bool = False
    """Whether the probabilities of a token's experts are divided by their sum."""
    capacity: float | None = Field(default=None, gt=0)
    """An expert takes at most this many times an even share of each sample's choices; all of them if None."""
    balance_weight: float = Field(default=0.01, ge=0)
    """Weight of the loss that is least when the experts are chosen evenly."""
    z_weight: float = Field(default=0.0, ge=0)
    """Weight of the loss that keeps the router's logits small."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    def parameter_count(self) -> int:
        """Number of parameters of the whole model; a tied weight counts once."""
        return self._parameters(self.experts)

    def active_parameter_count(self) -> int:
        """Number of parameters that one token uses, without those of experts it does not go to."""
        return self._parameters(self.experts_per_token)

    def flops_per_token(self, seq: int) -> float:
        """Return the FLOP to train on one token of a sample of `seq` tokens: 1 part forward, 2 backward.

        6 for each parameter that takes part in a matrix product with it (the head does; the embedding's
        look-up and the experts that it does not go to do not), and `12 * layers * hidden * seq` for
        attention's two products of activations. The second term counts the full square of positions, as
        PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) and Megatron-LM (Narayanan et al. 2021,
        arXiv:2104.04473, appendix) do; a causal kernel need not compute the upper half. Recomputed work does
        not count; choices that a capacity drops do.
        """
        matrices = self.layers * self._block_matrices(self.experts_per_token) + self.vocab_size * self.hidden
        return 6.0 * matrices + 12.0 * self.layers * self.hidden * seq

    def _parameters(self, experts: int) -> int:
        norms = (2 * self.layers + 1) * self.hidden
        tables = self.vocab_size * self.hidden * (1 if self.tie_embeddings else 2)
        return self.layers * self._block_matrices(experts) + norms + tables

    def _block_matrices(self, experts: int) -> int:
        """Return the elements of a block's matrices, with so many experts if it has any."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head_dim
        if not self.experts:
            return attention + 3 * self.hidden * self.ffn
        router = self.hidden * self.experts
        return attention + router + experts * 3 * self.hidden * (self.expert_ffn or self.ffn)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_as_model_error(
        cls, fields: Any, validate: Callable[[Any], TransformerConfig]
    ) -> TransformerConfig:
        try:
            return validate(fields)
        except ValidationError as error:
            raise _model_error(error) from None

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> TransformerConfig:
        _require_multiple("hidden", self.hidden, "heads", self.heads)
        _require_multiple("heads", self.heads, "kv_heads", self.kv_heads)
        if self.head_dim % 2:
            raise ModelError(
                f"hidden={self.hidden} with heads={self.heads} gives heads of odd width {self.head_dim}, "
                "and the rotary embedding turns dims in pairs",
                possible="any `hidden` that is an even multiple of `heads`",
                change="change `hidden` or `heads`",
            )
        if self.experts:
            self._require_choosable()
        return self

    def _require_choosable(self) -> None:
        if self.experts_per_token > self.experts:
            raise ModelError(
                f"experts_per_token={self.experts_per_token} is more than experts={self.experts}",
                possible=f"experts_per_token from 1 to {self.experts}",
                change="change `experts_per_token` or `experts`",
            )
        if self.renormalize and self.experts_per_token == 1:
            raise ModelError(
                "renormalize=true with experts_per_token=1 gives every choice the weight 1, so the router "
                "learns nothing",
                possible="renormalize=false, or experts_per_token of 2 or more",
                change="change `renormalize` or `experts_per_token`",
            )


def _require_multiple(whole: str, size: int, part: str, count: int) -> None:
    if size % count:
        divisors = [str(divisor) for divisor in range(1, size + 1) if size % divisor == 0]
        raise ModelError(
            f"{whole}={size} is not a multiple of {part}={count}",
            possible=f"{part} of {', '.join(divisors)}",
            change=f"change `{part}` or `{whole}`",
        )


def _model_error(error: ValidationError) -> ModelError:
    """Return the first problem that pydantic found as a ModelError."""
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"]) or "the configuration"
    fields = list(TransformerConfig.model_fields)
    if problem["type"] == "extra_forbidden":
        return ModelError(
            f"a transformer has no field {name!r}{nearest(name, fields)}",
            possible=", ".join(fields),
            change=f"correct or remove {name!r}",
        )
    if problem["type"] == "missing":
        return ModelError(
            f"the transformer's field {name!r} is missing",
            possible=", ".join(fields),
            change=f"give {name!r}, or start from a preset",
        )
    return ModelError(
        f"the transformer's field {name!r} cannot be {problem['input']!r}",
        possible=problem["msg"].lower(),
        change=f"change {name!r}",
    )


def preset(name: str) -> TransformerConfig:
    """Return the configuration with this name.

    Raises:
        ModelError: There is no such preset.
    """
    presets = _read()
    if name not in presets:
        raise ModelError(
            f"there is no preset {name!r}{nearest(name, presets)}",
            possible=", ".join(presets),
            change="give one of these, or a factory as package.module:function",
        )
    return TransformerConfig(**presets[name])


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, from small to large."""
    return tuple(_read())


def _read() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("shoal.models").joinpath("presets.toml").read_text(encoding="utf-8"))

"""The shape of a transformer: its sizes and its variants."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from shoal.errors import ModelError, nearest

_OBJECTIVES = ("next-token", "masked", "classes")


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention whose queries, keys and values are computed from narrow ones (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        query: Width of the tensor from which queries are computed.
        keys: Width of the tensor from which keys and values are computed.
        rotary: Width that is rotated by position, beside the shape's `width`; all heads share it for keys.
    """

    query: int
    keys: int
    rotary: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a transformer.

    Attributes:
        name: Name of the model.
        layers: Number of blocks.
        hidden: Width of the hidden state.
        ffn: Width inside the feed-forward layer.
        heads: Query heads.
        kv_heads: Key and value heads; None for as many as `heads`.
        vocab: Number of tokens.
        seq: Tokens of a sample.
        gated: Whether the feed-forward layer has a gate (SwiGLU), or one activation (GELU).
        rotary: Whether queries and keys are rotated by position; if not, a table of positions is added.
        is_own: Whether it is Shoal's transformer, which keeps its angles in fp32.
        biases: Whether products have biases, and norms are LayerNorm with biases; if not, norms are RMSNorm.
        dropout: Whether training drops elements of the stream.
        tied: Whether the head's weight is the embedding's.
        causal: Whether a token attends only to those before it.
        fused_attention: Whether attention writes no scores to memory.
        fused_passes: Whether one kernel does a pass over memory, as on GPUs. On CPUs torch's RMSNorm, SwiGLU
            and rotary embedding are several operators each, and RMSNorm's keep their intermediate results in
            fp32.
        fused_norm: Whether one kernel does a norm; None for as `fused_passes` says. torch's RMSNorm is one
            kernel on GPUs, where nothing else is fused unless it is compiled.
        head_dim: Width of a head; None for hidden / heads.
        latent: Narrow tensors that queries, keys and values are computed from; None for the hidden state.
        experts: Experts in each feed-forward layer; 0 for a dense model.
        experts_per_token: Number of experts that a token goes to.
        expert_ffn: Width inside one expert; None for `ffn`.
        shared_experts: Number of further experts that every token goes to.
        dense_layers: Number of first layers, which have no experts.
        capacity: Limit on an expert's choices, as a multiple of an even share; None for no limit.
        renormalize: Whether the weights of a token's experts are divided by their sum.
        objective: "next-token"; "masked", as in BERT: predict masked tokens, and whether two sentences follow
            one another; or "classes", as in ViT: predict from the first token one of `vocab` classes.
        patch: Numbers in a patch of an image, which a product embeds; 0 for tokens, which are looked up.
    """

    name: str = "transformer"
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int | None = None
    vocab: int
    seq: int
    gated: bool = True
    rotary: bool = True
    is_own: bool = False
    biases: bool = False
    dropout: bool = False
    tied: bool = False
    causal: bool = True
    fused_attention: bool = True
    fused_passes: bool = True
    fused_norm: bool | None = None
    head_dim: int | None = None
    latent: Latent | None = None
    experts: int = 0
    experts_per_token: int = 2
    expert_ffn: int | None = None
    shared_experts: int = 0
    dense_layers: int = 0
    capacity: float | None = None
    renormalize: bool = False
    objective: str = "next-token"
    patch: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "vocab", "seq"):
            if getattr(self, name) < 1:
                raise ModelError(
                    f"the shape of {self.name} has {name}={getattr(self, name)}",
                    possible="a whole number of at least 1",
                    change=f"correct {name}",
                )
        if self.heads % self.keys:
            raise ModelError(
                f"the shape of {self.name} has {self.heads} heads and {self.keys} key-value heads",
                possible=f"kv_heads that divide {self.heads}",
                change="correct kv_heads",
            )
        if self.objective not in _OBJECTIVES:
            raise ModelError(
                f"the shape of {self.name} has objective={self.objective!r}"
                f"{nearest(self.objective, _OBJECTIVES)}",
                possible=", ".join(_OBJECTIVES),
                change="correct objective",
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ModelError(
                f"the shape of {self.name} has {self.experts_per_token} of {self.experts} experts per token",
                possible=f"experts_per_token from 1 to {self.experts}",
                change="correct experts_per_token",
            )

    @property
    def keys(self) -> int:
        """Number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def one_kernel_norm(self) -> bool:
        """Whether one kernel does a norm, and keeps its input unchanged; LayerNorm is one everywhere."""
        return self.biases or (self.fused_passes if self.fused_norm is None else self.fused_norm)

    @property
    def tokens_of_loss(self) -> int:
        """Tokens of a sample that count in the loss: with masked tokens 15 %, as BERT's authors mask."""
        return {"next-token": self.seq, "masked": round(0.15 * self.seq), "classes": 1}[self.objective]

    @property
    def expert_width(self) -> int:
        """Width inside one expert."""
        return self.expert_ffn or self.ffn

    @property
    def choices(self) -> int:
        """Pairs of a token of a sample and an expert that takes it."""
        whole = self.seq * self.experts_per_token
        return whole if self.capacity is None else round(whole * min(1.0, self.capacity))

    def replace(self, **changes: object) -> ModelShape:
        """Return a copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def shape(name: str) -> ModelShape:
    """Return the shape of a known model, by its name.

    Raises:
        ModelError: No model has this name.
    """
    own, published = _own(), _published()
    if name in own:
        return transformer_shape(own[name], name)
    if name not in published:
        raise ModelError(
            f"there is no model {name!r}{nearest(name, shape_names())}",
            possible=", ".join(shape_names()),
            change="give one of these",
        )
    return _published_shape(name, published)


def shape_names() -> tuple[str, ...]:
    """Return every shape's name: Shoal's own, then those of published models."""
    return (*_own(), *(name for name in _published() if name != "families"))


def transformer_shape(fields: Mapping[str, Any], name: str = "transformer") -> ModelShape:
    """Return the shape of Shoal's transformer.

    Args:
        fields: Fields of a `TransformerConfig`; absent ones have their defaults.
        name: Name of the shape.
    """
    return ModelShape(
        name=name,
        layers=fields["layers"],
        hidden=fields["hidden"],
        ffn=fields["ffn"],
        heads=fields["heads"],
        kv_heads=fields["kv_heads"],
        vocab=fields["vocab_size"],
        seq=fields["seq"],
        is_own=True,
        dropout=fields.get("dropout", 0.0) > 0,
        tied=fields.get("tie_embeddings", False),
        experts=fields.get("experts", 0),
        experts_per_token=fields.get("experts_per_token", 2),
        expert_ffn=fields.get("expert_ffn"),
        capacity=fields.get("capacity"),
        renormalize=fields.get("renormalize", False),
    )


def _published_shape(name: str, table: Mapping[str, dict[str, Any]]) -> ModelShape:
    fields = dict(table[name])
    family = fields.pop("like", None)
    if family is not None:
        fields = table["families"][family] | fields
    if "latent" in fields:
        fields["latent"] = Latent(**fields["latent"])
    return ModelShape(name=name, **fields)


@cache
def _own() -> dict[str, dict[str, Any]]:
    # Read as a file: an import of its package would import torch.
    return tomllib.loads(files("shoal").joinpath("models", "presets.toml").read_text("utf-8"))


@cache
def _published() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("shoal.spec.workload").joinpath("presets.toml").read_text("utf-8"))

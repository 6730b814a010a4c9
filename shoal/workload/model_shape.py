"""The shape of a transformer: sizes, and which of the field's variants it is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.errors import ModelError, nearest

__all__ = ["Latent", "ModelShape"]

_OBJECTIVES = ("next-token", "masked", "classes")


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention whose queries, keys and values come of narrow ones (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        query: Width of what queries come of.
        keys: Width of what keys and values come of.
        rotary: Width that is turned by position, beside the shape's `width`; keys share one for all heads.
    """

    query: int
    keys: int
    rotary: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a transformer.

    Attributes:
        name: Of the model.
        layers: Number of blocks.
        hidden: Width of the hidden state.
        ffn: Width inside the feed-forward layer.
        heads: Query heads.
        kv_heads: Key and value heads; None for as many as `heads`.
        vocab: Number of tokens.
        seq: Tokens of a sample.
        gated: Whether the feed-forward layer has a gate (SwiGLU), or one activation (GELU).
        rotary: Whether positions turn queries and keys; else they are a table that is added.
        layer_tables: Whether each layer makes tables of angles of its own, as Shoal's transformer does.
        biases: Whether products have biases, and norms are LayerNorm, with biases too, and not RMSNorm.
        dropout: Whether training drops elements of the stream.
        tied: Whether the head's weight is the embedding's.
        causal: Whether a token attends to those before it only.
        fused_attention: Whether no scores are written to memory.
        fused_passes: Whether one kernel does a pass over memory, as on GPUs. On CPUs torch's RMSNorm, SwiGLU
            and rotary embedding are several operators each, and RMSNorm's keep what is between in fp32.
        head_dim: Width of a head; None for hidden / heads.
        latent: How queries, keys and values come about; None for directly.
        experts: In each feed-forward layer; 0 for a dense model.
        experts_per_token: Of them, that a token goes to.
        expert_ffn: Width inside one expert; None for `ffn`.
        shared_experts: That every token goes to besides.
        dense_layers: The first ones, which have no experts.
        capacity: An expert takes at most this many times an even share of choices; None for all of them.
        renormalize: Whether the weights of a token's experts are divided by their sum.
        objective: "next-token"; "masked", as BERT: tokens that were masked and whether two sentences follow;
            or "classes", as ViT: of the first token alone, from `vocab` many.
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
    layer_tables: bool = False
    biases: bool = False
    dropout: bool = False
    tied: bool = False
    causal: bool = True
    fused_attention: bool = True
    fused_passes: bool = True
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
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def tokens_of_loss(self) -> int:
        """Tokens of a sample that the loss is about: of masked ones 15 %, as BERT's authors mask."""
        return {"next-token": self.seq, "masked": round(0.15 * self.seq), "classes": 1}[self.objective]

    @property
    def expert_width(self) -> int:
        """Inside one expert."""
        return self.expert_ffn or self.ffn

    @property
    def choices(self) -> int:
        """Pairs of a token of a sample and an expert that takes it."""
        whole = self.seq * self.experts_per_token
        return whole if self.capacity is None else round(whole * min(1.0, self.capacity))

    def replace(self, **changes: object) -> ModelShape:
        """Return a copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

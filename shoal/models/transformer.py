"""A decoder-only transformer in the shape of Llama, for one device.

Tokens are embedded; every block adds to the hidden state what its attention and then its feed-forward
layer make of the normalised hidden state; a last norm and the head give logits. No layer has a bias.
Layer by layer it computes what Hugging Face's `LlamaForCausalLM` does, so that weights carry over.

Papers: Llama (Touvron et al. 2023, arXiv:2302.13971); RMSNorm (Zhang and Sennrich 2019,
arXiv:1910.07467); rotary embedding (Su et al. 2021, arXiv:2104.09864); grouped-query attention
(Ainslie et al. 2023, arXiv:2305.13245); SwiGLU (Shazeer 2020, arXiv:2002.05202).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ModelError, nearest
from shoal.models.attention import Documents, causal_attention
from shoal.models.config import TransformerConfig
from shoal.models.dropout import Dropout, name_dropouts, normal
from shoal.models.experts import Mixture
from shoal.models.loss import LaterLogits


class Angles:
    """The angles by which rotary embedding turns each pair of dims `(i, i + head_dim / 2)` of a head.

    Neither a tuple nor a dataclass, so that what casts the inputs of blocks leaves the angles in fp32. It has
    no slots, because DeepSpeed asks for `vars()` of what a module returns.

    Args:
        cosine: Cosine of every angle, `[seq, head_dim]`, or `[batch, 1, seq, head_dim]` if samples differ,
            fp32; both dims of a pair have the same.
        sine: Sine of every angle, negative for the first dim of a pair, fp32, in the same shape.
    """

    def __init__(self, cosine: Tensor, sine: Tensor) -> None:
        self.cosine = cosine
        self.sine = sine

    def turn(self, heads: Tensor) -> Tensor:
        """Turn `[batch, heads, seq, head_dim]`, computed in fp32; shape and dtype stay."""
        # Rolled by half a head, (a, b) becomes (b, a); the sine's sign makes it (-b, a).
        rolled = heads.roll(heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * self.cosine, rolled, self.sine).to(heads.dtype)


class Rotary(nn.Module):
    """Makes the Angles of a forward, which grow with the position.

    They are made anew in each forward, once for all blocks: tens of microseconds. So there is no buffer that
    the meta device, a checkpoint or a cast to bf16 could spoil.

    Attributes:
        positions: Function from `seq` and the device to the positions `[seq]`, int64, of the input. By
            default 0 to seq - 1; it is replaced if the input is a part of the sequence.
    """

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        self.positions: Callable[[int, torch.device], Tensor] = positions_from_zero

    def forward(self, seq: int, device: torch.device, *, position_ids: Tensor | None = None) -> Angles:
        """Return the angles of an input of `seq` tokens.

        Args:
            seq: Tokens in the input.
            device: Its device.
            position_ids: Positions to turn by, `[batch, whole seq]`, of the whole samples; None for those in
                the sample.
        """
        pair = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
        frequency = self.base ** (-pair / self.head_dim)
        positions = self.positions(seq, device)
        if position_ids is not None:
            positions = position_ids[:, None, positions]
        angle = positions[..., None].float() * frequency
        cosine, sine = angle.cos(), angle.sin()
        return Angles(torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1))


class Attention(nn.Module):
    """Causal self-attention in which `heads / kv_heads` queries share one key and value.

    Attributes:
        attend: Function that mixes the values, given query `[batch, heads, seq, head_dim]`, key and value
            `[batch, kv_heads, seq, head_dim]`, and `documents`; the result has the shape of the query. By
            default `causal_attention`; it is replaced if the input is a part of the sequence.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        kv_width = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, kv_width, bias=False)
        self.value = nn.Linear(config.hidden, kv_width, bias=False)
        self.output = nn.Linear(config.hidden, config.hidden, bias=False)
        self.attend: Callable[..., Tensor] = causal_attention

    def forward(self, hidden: Tensor, angles: Angles, documents: Documents | None = None) -> Tensor:
        """Mixes `[batch, seq, hidden]` along `seq`; each position sees itself and those before it.

        With documents it sees those of its own document only.
        """
        query = angles.turn(self._split(self.query(hidden)))
        key = angles.turn(self._split(self.key(hidden)))
        value = self._split(self.value(hidden))
        mixed = self.attend(query, key, value, documents=documents)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return output

    def _split(self, projected: Tensor) -> Tensor:
        """`[batch, seq, heads * head_dim]` to `[batch, heads, seq, head_dim]`."""
        batch, seq, _ = projected.shape
        return projected.view(batch, seq, -1, self.head_dim).transpose(1, 2)


def positions_from_zero(seq: int, device: torch.device) -> Tensor:
    """0 to `seq` - 1, int64."""
    return torch.arange(seq, device=device)


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `[batch, seq, hidden]` to the same shape, each position by itself."""
        output: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return output


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to what came in."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # torch's RMSNorm computes in fp32 whatever its weight's dtype, and is fused on GPUs.
        self.attention_norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.feed_forward = Mixture(config) if config.experts else FeedForward(config)
        self.attention_dropout = Dropout(config.dropout, "attention_dropout")
        self.feed_forward_dropout = Dropout(config.dropout, "feed_forward_dropout")

    def forward(
        self,
        hidden: Tensor,
        angles: Angles,
        keys: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Maps `[batch, seq, hidden]` to the same shape; `keys` `[batch, seq]` are dropout's."""
        attended: Tensor = self.attention(self.attention_norm(hidden), angles, documents)
        mixed: Tensor = hidden + self.attention_dropout(attended, keys)
        fed: Tensor = self.feed_forward(self.feed_forward_norm(mixed))
        output: Tensor = mixed + self.feed_forward_dropout(fed, keys)
        return output


class Transformer(nn.Module):
    """The whole decoder. Call `initialize` for the weights that training starts from.

    With tied embeddings `head` is None and `forward` uses the embedding's weight in its place: two
    modules that share a parameter would come apart when a model on the meta device is materialised.

    Attributes:
        dropout_keys: Key of each token `[batch, seq]` of the next forward, from `token_keys`. Set them before
            each training forward. None: masks are drawn from torch's generator.
        most_logits: Number of logits above which the output is `LaterLogits`, if gradients are wanted; None
            for any number.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.rotary = Rotary(config.head_dim, config.rope_base)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.dropout_keys: Tensor | None = None
        self.most_logits: int | None = None
        name_dropouts(self)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor | LaterLogits:
        """Predict, at every position, the token that follows.

        Args:
            tokens: `[batch, seq]`, int64, each below `vocab_size`.
            position_ids: Position of each token in its document, `[batch, seq]`, int64, if samples are packed
                from documents that do not see each other; of the whole sample even if the tokens are a part.

        Returns:
            Logits, `[batch, seq, vocab_size]`, or what makes them.

        Raises:
            ModelError: `seq` is longer than the model's context.
        """
        if tokens.shape[-1] > self.config.seq:
            raise ModelError(
                f"a sample of {tokens.shape[-1]} tokens is longer than the model's context",
                possible=f"up to {self.config.seq} tokens",
                change="shorten the samples, or give the model a larger `seq`",
            )
        hidden = self.embed(tokens)
        angles = self.rotary(tokens.shape[-1], tokens.device, position_ids=position_ids)
        documents = None if position_ids is None else Documents(position_ids)
        for block in self.blocks:
            hidden = block(hidden, angles, self.dropout_keys, documents)
        hidden = self.norm(hidden)
        made = tokens.numel() * self.config.vocab_size
        if self.most_logits is not None and made > self.most_logits and torch.is_grad_enabled():
            return LaterLogits(hidden, self.embed.weight if self.head is None else self.head.weight)
        logits: Tensor = self.unembed(hidden) if self.head is None else self.head(hidden)
        return logits

    def unembed(self, hidden: Tensor) -> Tensor:
        """Return the logits `[batch, seq, vocab_size]`, by the embedding's weight."""
        return F.linear(hidden, self.embed.weight)

    def initialize(self, seed: int) -> None:
        """Fills every parameter in place; see `initialize_parameter`."""
        for name, parameter in self.named_parameters():
            self.initialize_parameter(name, parameter, seed)

    @torch.no_grad()
    def initialize_parameter(self, name: str, tensor: Tensor, seed: int) -> None:
        """Fills one parameter in place with values that depend on `seed`, `name` and its shape alone.

        They do not depend on the order of calls, the kind of GPU or the memory layout, so a rank can fill a
        model that was built on the meta device one bucket at a time and hold what one device would.
        Norms are 1. The rest is normal with deviation 0.02, divided by `sqrt(2 * layers)` where a layer
        adds to the hidden state, so that the sum does not grow with depth (GPT-2: Radford et al. 2019,
        section 2.3). Values are drawn in fp32 and then cast to the tensor's dtype: for a CPU by torch's
        generator, for other devices there, as `normal` says.

        Args:
            name: The parameter's name in `named_parameters()`.
            tensor: Tensor to fill: the parameter, or a view of its shape into a larger buffer.
            seed: Any integer.

        Raises:
            ModelError: The model has no such parameter, or the tensor has no memory (meta device).
        """
        if tensor.is_meta:
            raise ModelError(
                f"the parameter {name!r} is on the meta device, which holds no values",
                possible="a tensor on a real device",
                change="materialise the model first, with `model.to_empty(device=...)`",
            )
        match name.removesuffix(".weight").rpartition(".")[-1]:
            case "norm" | "attention_norm" | "feed_forward_norm":
                tensor.fill_(1.0)
                return
            case "output" | "down":
                deviation = 0.02 / math.sqrt(2 * self.config.layers)
            case "embed" | "head" | "query" | "key" | "value" | "gate" | "up" | "router":
                deviation = 0.02
            case _:
                names = [known for known, _ in self.named_parameters()]
                raise ModelError(
                    f"the transformer has no parameter {name!r}{nearest(name, names)}",
                    possible="the names in `named_parameters()`, such as " + ", ".join(names[:3]),
                    change="pass a name of this model",
                )
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        if tensor.device.type == "cpu":
            # Draw into a new tensor: draws into a given tensor depend on its memory layout.
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little"))
            drawn = torch.empty(tensor.shape, dtype=torch.float32)
            drawn.normal_(0.0, deviation, generator=generator)
        else:
            key = int.from_bytes(digest, "little", signed=True)
            drawn = normal(tensor.shape, key, tensor.device).mul_(deviation)
        tensor.copy_(drawn)

"""What a rank keeps of a micro-batch from forward to backward, for Shoal's transformer by formula.

Derived as Korthikanti et al. (arXiv:2205.05198, section 4) do, one operator after another: no dropout,
SwiGLU, rotary embedding, fused attention. With n = B S / c the tokens that a rank has of a micro-batch of B
sequences of S tokens, H hidden, F the width of the feed-forward layer, A heads of width D = H / A (as many
for keys and values), V the vocabulary, t = tp, c = cp, and r = t where tensor parallelism splits the
sequence, else 1, these are the elements, of 4 bytes in fp32 and 2 in bf16, that are kept:

    norm          3 n H / r + n / r    input, the input divided by its root mean square, output; that root
    attention     4 n H / t + n A / t  query, key, value, output; log-sum-exp
    rotary        4 D S / c            cosine and sine, for queries and for keys
    feed-forward  4 n F / t            gate, silu(gate), up, and the product of these two
    block         two norms, attention, rotary and feed-forward
    end           a norm; the logits, n V / t

In bf16 these stay in fp32: a norm's input and quotient, roots, log-sum-exp, rotary's tables, the logits.
Ulysses keeps attention's output twice, by heads for its own backward and by positions for the next layer's.
The linear layers read what is counted already. With tp > 1, 22 bytes for each of the n tokens come to these:
8 for the embedding's index; in the loss 8 for the target's index, 4 for the normalizer and 2 for masks. Of k
experts of width F for each token, with E to choose from, forward keeps 3 k n H + 4 k n F elements and 8 E +
20 k bytes a token: an expert's input, its output as it comes and as it is ordered, and 4 k n F as above. This
counts equal loads; the expert that is chosen more often makes its rank's figure larger.

Recompute keeps of a block its input alone, n H / r (full), or also the results of matrix products and of
attention (selective): with t = 1 those are 6 n H + n A + 2 n F, and else (4 n H + n A + 2 n F) / t.

`benchmarks/memory.py` measures all of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.models import TransformerConfig
from shoal.plan import Plan

__all__ = ["Activations"]

_FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class Activations:
    """What a rank keeps of a micro-batch; see the top of the file. All results are bytes but where said.

    Attributes:
        shape: The model's; its `seq` is the length of the sequences.
        plan: How it is laid out.
        microbatch: Sequences of one forward.
    """

    shape: TransformerConfig
    plan: Plan
    microbatch: int

    @property
    def width(self) -> int:
        """Bytes of an element that computes."""
        return 2 if self.plan.precision == "bf16" else _FP32

    @property
    def is_split(self) -> bool:
        """Whether tensor parallelism splits the sequence."""
        return self.plan.tp > 1 and self.plan.tensor != "plain"

    @property
    def ffn(self) -> int:
        """Width of the feed-forward layer, or of one expert."""
        return (self.shape.expert_ffn or self.shape.ffn) if self.shape.experts else self.shape.ffn

    @property
    def routed(self) -> int:
        """Feed-forward layers that a token goes through."""
        return self.shape.experts_per_token if self.shape.experts else 1

    def tokens(self) -> float:
        """Tokens of the micro-batch that the rank has, n."""
        return self.microbatch * self.shape.seq / self.plan.cp

    def hidden(self, *, split: bool = False) -> float:
        """Elements of the stream; with `split` of this rank's part."""
        parts = self.plan.tp if split and self.is_split else 1
        return self.tokens() * self.shape.hidden / parts

    def of_block(self) -> float:
        """Of a block, with the Plan's recompute."""
        stream = self.width * self.hidden(split=True)
        if self.plan.recompute == "none":
            return self.of_whole_block()
        if self.plan.recompute == "full":
            return stream
        products = 4 * self.hidden() + 2 * self.tokens() * self.routed * self.ffn
        written = 2 * self.hidden() if self.plan.tp == 1 and not self.shape.experts else 0
        if self.shape.experts:
            written = (1 + self.routed) * self.hidden() if self.plan.tp == 1 else self.hidden()
        return stream + self.width * (products / self.plan.tp + written) + self._sums()

    def of_whole_block(self) -> float:
        """All that a block's forward keeps if nothing is recomputed."""
        attention = self.width * (5 if self.plan.context == "ulysses" and self.plan.cp > 1 else 4)
        rotary = _FP32 * 4 * self.shape.head_dim * self.shape.seq / self.plan.cp
        return (
            2 * self._norm() + attention * self.hidden() / self.plan.tp + self._sums() + rotary + self._fed()
        )

    def of_end(self) -> float:
        """Of the last norm, the head and the loss, and of the embedding's index."""
        return self._norm() + self.logits() + (22 * self.tokens() if self.plan.tp > 1 else 0)

    def logits(self) -> float:
        """Of the head's output."""
        width = _FP32 if self.plan.tp == 1 else self.width
        return width * self.tokens() * self.shape.vocab_size / self.plan.tp

    def _fed(self) -> float:
        """Of the feed-forward layer."""
        shape, tokens = self.shape, self.tokens()
        if not shape.experts:
            return self.width * 4 * tokens * shape.ffn / self.plan.tp
        chosen = shape.experts_per_token
        rows = tokens * chosen * (3 * shape.hidden + 4 * self.ffn)
        return self.width * rows + tokens * (8 * shape.experts + 20 * chosen)

    def _norm(self) -> float:
        wide = 2 * _FP32 + self.width
        return wide * self.hidden(split=True) + _FP32 * self.hidden(split=True) / self.shape.hidden

    def _sums(self) -> float:
        return _FP32 * self.tokens() * self.shape.heads / self.plan.tp

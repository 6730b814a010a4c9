"""Memory of a rank by formula: states, what forward keeps for backward, and the peak of a step.

States (docs/concepts/data-parallel.md): each of the P parameters that a rank has after tensor parallelism
takes 16 bytes, 8 + 8/d, 4 + 12/d or 16/d in fp32, where d = dp * cp / replicate. In bf16 resident weights
take 2 bytes and fp32 masters 4/d besides: 18, 6 + 12/d, 2 + 16/d or 16/d. Experts are divided by ep, and d
with it.

Activations kept are derived as Korthikanti et al. (arXiv:2205.05198, section 4) do, one operator after
another, for Shoal's transformer: no dropout, SwiGLU, rotary embedding, fused attention. With n = B S / c the
tokens that a rank has of a micro-batch of B sequences of S tokens, H hidden, F the width of the feed-forward
layer, A heads of width D = H / A (as many for keys and values), V the vocabulary, t = tp, c = cp, and r = t
where tensor parallelism splits the sequence, else 1, these are the elements, of 4 bytes in fp32 and 2 in
bf16, that are kept:

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

With zero3 come the weights that stay from forward to backward: those in no block and in the last one.

The peak is the largest of four moments. Beside the states (with zero2 and zero3 less the gradients, which
come block by block) there are:

    loss            what is kept; with t = 1, 2 n V elements of fp32, the gradients of the logarithms and of
                    the logits; else n V / t, the latter alone
    head            what is kept, with the logits' gradient in the place of the logits; n H / r; V H / t for
                    the weight; if the sequence is split, n H gathered, 2 n H to be reduced, and n V / t in
                    part order
    feed-forward k  in the backward of the k-th block from the end: what the blocks before it keep; the block
                    itself whole, recomputed or not; the stream's gradient, n H / r; and the larger of
                    - 2 n F / t: gradients of product, silu(gate) and up, less the product, no longer needed
                    - the last matrix: the product's gradient n F / t, the weight's H F / t, and n H gathered
                      if the sequence is split (2 n H for several sequences)
    optimizer       the states

With zero2 and zero3, at feed-forward k, the buckets of fp32 gradients: the block's, those of the two before
it in backward, gloo's copy of the one being reduced, and this rank's shards of all before. With zero3 the
weights of two blocks, the embedding's, and until it is through, nothing of the head's.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.models import TransformerConfig
from shoal.plan import Plan

__all__ = ["Case"]

_FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class Case:
    """A model's shape under a Plan; see the top of the file. All results are bytes on one rank.

    Attributes:
        shape: The model's.
        plan: How it is laid out.
        microbatch: Sequences of one forward.
        copies: Whether the backend copies what it reduces and scatters, as gloo does.
    """

    shape: TransformerConfig
    plan: Plan
    microbatch: int
    copies: bool = True

    # -- states --------------------------------------------------------------------------------------

    def states(self) -> float:
        """Weights, gradients and Adam's state."""
        return self._states(gradients=True)

    def _states(self, *, gradients: bool) -> float:
        shape = self.shape
        dense = shape.layers * self._dense_parameters() + self._head() + self._embedding()
        experts = shape.layers * self._expert_parameters()
        total = dense * self._state_bytes(self._shards(), gradients=gradients)
        return total + experts * self._state_bytes(self._shards() / self.plan.ep, gradients=gradients)

    def _state_bytes(self, shards: float, *, gradients: bool) -> float:
        shards = max(shards, 1)
        weights = 4.0 if self._width() == _FP32 else 2.0 + 4 / shards
        match self.plan.shard:
            case "none":
                return (4.0 if self._width() == _FP32 else 6.0) + 4 + 8
            case "zero1":
                return weights + 4 + 8 / shards
            case "zero2":
                return weights + 8 / shards + (4 / shards if gradients else 0)
            case _:
                return 12 / shards + (4 / shards if gradients else 0)

    def _shards(self) -> float:
        return self.plan.dp * self.plan.cp / self.plan.replicate

    def _width(self) -> int:
        return 2 if self.plan.precision == "bf16" else _FP32

    def _dense_parameters(self) -> float:
        """Of a block, without experts."""
        shape = self.shape
        matrices = 4 * shape.hidden**2
        if shape.experts:
            return matrices / self.plan.tp + shape.hidden * (2 + shape.experts)
        return (matrices + 3 * shape.hidden * shape.ffn) / self.plan.tp + 2 * shape.hidden

    def _expert_parameters(self) -> float:
        """Of a block's experts on this rank."""
        return 3 * self.shape.experts * self.shape.hidden * self._ffn() / self.plan.ep

    def _embedding(self) -> float:
        return self.shape.vocab_size * self.shape.hidden / self.plan.tp

    def _head(self) -> float:
        return self._embedding() + self.shape.hidden

    # -- activations ---------------------------------------------------------------------------------

    def kept(self) -> float:
        """What forward keeps for backward."""
        total = self.shape.layers * self._kept_of_block() + self._norm() + self._logits()
        if self.plan.shard == "zero3":
            total += self._width() * (self._head() + self._embedding() + self._block_parameters())
        return total + (22 * self._tokens() if self.plan.tp > 1 else 0)

    def _kept_of_block(self) -> float:
        stream = self._width() * self._hidden(split=True)
        if self.plan.recompute == "none":
            return self._block()
        if self.plan.recompute == "full":
            return stream
        products = 4 * self._hidden() + 2 * self._tokens() * self._routed() * self._ffn()
        written = 2 * self._hidden() if self.plan.tp == 1 and not self.shape.experts else 0
        if self.shape.experts:
            written = (1 + self._routed()) * self._hidden() if self.plan.tp == 1 else self._hidden()
        return stream + self._width() * (products / self.plan.tp + written) + self._sums()

    def _block(self) -> float:
        """All that a block's forward would keep if nothing were recomputed."""
        attention = self._width() * (5 if self.plan.context == "ulysses" and self.plan.cp > 1 else 4)
        rotary = _FP32 * 4 * self.shape.head_dim * self.shape.seq / self.plan.cp
        return (
            2 * self._norm() + attention * self._hidden() / self.plan.tp + self._sums() + rotary + self._fed()
        )

    def _fed(self) -> float:
        """Of the feed-forward layer."""
        shape, tokens = self.shape, self._tokens()
        if not shape.experts:
            return self._width() * 4 * tokens * shape.ffn / self.plan.tp
        chosen = shape.experts_per_token
        rows = tokens * chosen * (3 * shape.hidden + 4 * self._ffn())
        return self._width() * rows + tokens * (8 * shape.experts + 20 * chosen)

    def _norm(self) -> float:
        wide = 2 * _FP32 + self._width()
        return wide * self._hidden(split=True) + _FP32 * self._hidden(split=True) / self.shape.hidden

    def _sums(self) -> float:
        return _FP32 * self._tokens() * self.shape.heads / self.plan.tp

    def _logits(self) -> float:
        width = _FP32 if self.plan.tp == 1 else self._width()
        return width * self._tokens() * self.shape.vocab_size / self.plan.tp

    def _tokens(self) -> float:
        return self.microbatch * self.shape.seq / self.plan.cp

    def _hidden(self, *, split: bool = False) -> float:
        """Elements of the stream; with `split` of this rank's part."""
        parts = self.plan.tp if split and self._is_split() else 1
        return self._tokens() * self.shape.hidden / parts

    def _is_split(self) -> bool:
        return self.plan.tp > 1 and self.plan.tensor != "plain"

    def _ffn(self) -> int:
        return (self.shape.expert_ffn or self.shape.ffn) if self.shape.experts else self.shape.ffn

    def _routed(self) -> int:
        return self.shape.experts_per_token if self.shape.experts else 1

    def _block_parameters(self) -> float:
        return self._dense_parameters() + self._expert_parameters()

    # -- the peak ------------------------------------------------------------------------------------

    def peak(self) -> tuple[float, str]:
        """The most in a step, and at which moment."""
        static = self._states(gradients=self.plan.shard in ("none", "zero1"))
        moments = {
            "loss": static + self.kept() + self._at_loss(),
            "head": static + self.kept() + self._at_head(),
            "optimizer": self.states(),
        }
        for block in range(self.shape.layers):
            moments[f"feed-forward {block}"] = static + self._at_feed_forward(block)
        name = max(moments, key=moments.__getitem__)
        return moments[name], name

    def _at_loss(self) -> float:
        return self._logits() * (2 if self.plan.tp == 1 else 1)

    def _at_head(self) -> float:
        width = self._width()
        total = width * (self._hidden(split=True) + self._embedding())
        if self._is_split():
            total += width * 3 * self._hidden() + (self._logits() if self.microbatch > 1 else 0)
        return total

    def _at_feed_forward(self, block: int) -> float:
        width, tp = self._width(), self.plan.tp
        inner = width * self._tokens() * self._routed() * self._ffn() / tp
        matrix = width * self.shape.hidden * self._ffn() / tp
        if self.shape.experts:
            matrix *= self.shape.experts / self.plan.ep
        gathered = (1 + (self.microbatch > 1)) * width * self._hidden() if self._is_split() else 0
        own = max(2 * inner, inner + matrix + gathered)
        total = (self.shape.layers - 1 - block) * self._kept_of_block() + self._block()
        if self.plan.recompute == "selective" and tp == 1:
            total += width * self._hidden()  # the last product, which nothing asks for again
        total += own + width * self._hidden(split=True)
        return total + self._gradients_at(block) + self._weights_at(block)

    def _weights_at(self, block: int) -> float:
        """With zero3, of this block, of the one that comes next, and of the embedding."""
        if self.plan.shard != "zero3":
            return 0.0
        blocks = min(2, self.shape.layers - block)
        return self._width() * (self._embedding() + blocks * self._block_parameters())

    def _gradients_at(self, block: int) -> float:
        """With zero2 and zero3: buckets not yet freed, and this rank's shards of those that are."""
        if self.plan.shard in ("none", "zero1"):
            return 0.0
        each = _FP32 * self._block_parameters()
        together = 1
        if self.plan.shard == "zero2":
            together = max(1, min(self.shape.layers, round(self.plan.bucket / each)))
        groups = [
            min(together, self.shape.layers - first) * each for first in range(0, self.shape.layers, together)
        ]
        buckets = [_FP32 * self._head(), *groups]
        current = 1 + block // together
        held = buckets[max(0, current - 2) : current + 1]
        copied = buckets[current - 1] if self.copies else 0
        return sum(held) + copied + sum(buckets[: max(0, current - 2)]) / self._shards()

"""Memory of a rank by formula: states, what forward keeps for backward, and the peak of a step.

States (docs/concepts/data-parallel.md): each of the P parameters that a rank has after tensor parallelism
takes what `state_bytes` of `shoal/parallel/piece_memory.py` says, where d = dp * cp / replicate. Experts are
divided by ep, and d with it.

Activations kept are those of `shoal/parallel/activations.py`, with its letters: n tokens of a micro-batch on
the rank, H hidden, F the width of the feed-forward layer, V the vocabulary, t = tp, and r = t where tensor
parallelism splits the sequence, else 1.

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
from shoal.parallel.activations import Activations
from shoal.parallel.piece_memory import state_bytes
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
        total = dense * state_bytes(self.plan, self._shards(), gradients=gradients)
        return total + experts * state_bytes(self.plan, self._shards() / self.plan.ep, gradients=gradients)

    def _shards(self) -> float:
        return self.plan.dp * self.plan.cp / self.plan.replicate

    def _dense_parameters(self) -> float:
        """Of a block, without experts."""
        shape = self.shape
        matrices = 4 * shape.hidden**2
        if shape.experts:
            return matrices / self.plan.tp + shape.hidden * (2 + shape.experts)
        return (matrices + 3 * shape.hidden * shape.ffn) / self.plan.tp + 2 * shape.hidden

    def _expert_parameters(self) -> float:
        """Of a block's experts on this rank."""
        return 3 * self.shape.experts * self.shape.hidden * self.activations.ffn / self.plan.ep

    def _embedding(self) -> float:
        return self.shape.vocab_size * self.shape.hidden / self.plan.tp

    def _head(self) -> float:
        return self._embedding() + self.shape.hidden

    # -- activations ---------------------------------------------------------------------------------

    @property
    def activations(self) -> Activations:
        """What a forward keeps."""
        return Activations(self.shape, self.plan, self.microbatch)

    def kept(self) -> float:
        """What forward keeps for backward."""
        total = self.shape.layers * self.activations.of_block() + self.activations.of_end()
        if self.plan.shard == "zero3":
            weights = self._head() + self._embedding() + self._block_parameters()
            total += self.activations.width * weights
        return total

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
        return self.activations.logits() * (2 if self.plan.tp == 1 else 1)

    def _at_head(self) -> float:
        kept = self.activations
        width = kept.width
        total = width * (kept.hidden(split=True) + self._embedding())
        if kept.is_split:
            total += width * 3 * kept.hidden() + (kept.logits() if self.microbatch > 1 else 0)
        return total

    def _at_feed_forward(self, block: int) -> float:
        kept = self.activations
        width, tp = kept.width, self.plan.tp
        inner = width * kept.tokens() * kept.routed * kept.ffn / tp
        matrix = width * self.shape.hidden * kept.ffn / tp
        if self.shape.experts:
            matrix *= self.shape.experts / self.plan.ep
        gathered = (1 + (self.microbatch > 1)) * width * kept.hidden() if kept.is_split else 0
        own = max(2 * inner, inner + matrix + gathered)
        total = (self.shape.layers - 1 - block) * kept.of_block() + kept.of_whole_block()
        if self.plan.recompute == "selective" and tp == 1:
            total += width * kept.hidden()  # the last product, which nothing asks for again
        total += own + width * kept.hidden(split=True)
        return total + self._gradients_at(block) + self._weights_at(block)

    def _weights_at(self, block: int) -> float:
        """With zero3, of this block, of the one that comes next, and of the embedding."""
        if self.plan.shard != "zero3":
            return 0.0
        blocks = min(2, self.shape.layers - block)
        return self.activations.width * (self._embedding() + blocks * self._block_parameters())

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

"""Memory of a rank under several Plans, measured and by formula: states, activations kept, peak.

    python benchmarks/memory.py [--layers 4] [--hidden 256] [--seq 512] [--microbatch 2]

How it is measured. A dispatch mode sees what every operator returns, in forward, backward and optimizer, and
keeps a weak reference to each storage. What is live is the sum of the sizes of the storages that still exist,
so it does not matter which thread frees one, nor that a strategy empties one. The peak is read after every
operator: what an operator allocates and frees within itself is not seen, nor what gloo holds, nor the random
generator's state (5 KB) that recompute keeps for each block. The profiler's memory events would show the
first, but they miss the free of each tensor that a thread of gloo is the last to hold. One step warms up and
makes Adam's state; the next is measured. Of several ranks the largest figure counts.

    states    live after the optimizer's step, with gradients, less the batch
    kept      live after forward, less live before it: what backward will read, and gathered weights
    peak      most that was live in a step, less the batch

States by formula are those of docs/concepts/data-parallel.md with fp32: for each of the P parameters that a
rank has after tensor parallelism, 16 bytes, 8 + 8/d, 4 + 12/d or 16/d, where d = dp * cp.

Activations by formula are derived as Korthikanti et al. (arXiv:2205.05198, section 4) do, one operator after
another, for Shoal's transformer: no dropout, SwiGLU, rotary embedding, fused attention. With n = B S / c the
tokens that a rank has of a micro-batch of B sequences of S tokens, H hidden, F the width of the feed-forward
layer, A heads of width D = H / A (as many for keys and values), V the vocabulary, t = tp, c = cp, and r = t
where tensor parallelism splits the sequence, else 1, these are the elements of 4 bytes that are kept:

    norm          3 n H / r + n / r    input, the input divided by its root mean square, output; that root
    attention     4 n H / t + n A / t  query, key, value, output; log-sum-exp
    rotary        4 D S / c            cosine and sine, for queries and for keys
    feed-forward  4 n F / t            gate, silu(gate), up, and the product of these two
    block         two norms, attention, rotary and feed-forward; with recompute=full its input alone, n H / r
    end           a norm; the logits, n V / t

The linear layers read what is counted already: a norm's output, attention's output, the product. With tp > 1,
22 bytes for each of the n tokens come to these: 8 for the embedding's index; in the loss 8 for the target's
index, 4 for the normalizer and 2 for masks. With zero3 come the weights that stay from forward to backward, 4
bytes for each parameter in no block or in the last one. A block in 16 bit with a feed-forward layer of 4H
without a gate, and norms that keep two tensors, as fused ones do, would keep 32 n H bytes: the paper's 34
less 2 for the masks of dropout.

Exits with 1 if a figure departs from its formula by more than a tenth.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shoal
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.plan import Plan
from shoal.testing import RankPool

PLANS = (
    *(f"dp={ranks},shard={shard}" for ranks in (2, 4) for shard in ("none", "zero1", "zero2", "zero3")),
    *(f"tp={ranks},tensor={tensor}" for ranks in (2, 4) for tensor in ("plain", "sequence")),
    *(f"cp={ranks},context=ring" for ranks in (2, 4)),
    "dp=2,tp=2,shard=zero3",
)
POLICIES = ("none", "full")

_WIDTH = 4  # bytes of an element in fp32
_TOLERANCE = 0.1
_SETTLE = 0.05  # seconds


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a rank; see the top of the file.

    Attributes:
        states: Weights, gradients and what the optimizer has.
        kept: From forward for backward.
        peak: In a step.
    """

    states: int
    kept: int
    peak: int


def states_by_formula(shape: TransformerConfig, plan: Plan) -> float:
    """Bytes of weights, gradients and Adam's state on a rank."""
    shards = plan.dp * plan.cp
    each = {
        "none": 16.0,
        "zero1": 8 + 8 / shards,
        "zero2": 4 + 12 / shards,
        "zero3": 16 / shards,
    }[plan.shard]
    return each * (shape.layers * _block_parameters(shape, plan.tp) + _root_parameters(shape, plan.tp))


def kept_by_formula(shape: TransformerConfig, plan: Plan, microbatch: int) -> float:
    """Bytes that a rank keeps from forward for backward."""
    tokens = microbatch * shape.seq / plan.cp
    stream = tokens / (plan.tp if plan.tensor != "plain" else 1)
    norm = stream * (3 * shape.hidden + 1)
    attention = tokens * (4 * shape.hidden + shape.heads) / plan.tp
    rotary = 4 * shape.head_dim * shape.seq / plan.cp
    feed_forward = 4 * tokens * shape.ffn / plan.tp
    block = 2 * norm + attention + rotary + feed_forward
    if plan.recompute == "full":
        block = stream * shape.hidden
    elements = shape.layers * block + norm + tokens * shape.vocab_size / plan.tp
    if plan.shard == "zero3":
        elements += _block_parameters(shape, plan.tp) + _root_parameters(shape, plan.tp)
    return _WIDTH * elements + (22 * tokens if plan.tp > 1 else 0)


def _block_parameters(shape: TransformerConfig, tp: int) -> float:
    return (4 * shape.hidden * shape.hidden + 3 * shape.hidden * shape.ffn) / tp + 2 * shape.hidden


def _root_parameters(shape: TransformerConfig, tp: int) -> float:
    return 2 * shape.vocab_size * shape.hidden / tp + shape.hidden


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operators made while it was entered, and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def bytes(self) -> int:
        """What is live now."""
        found, total = {}, 0
        for key, reference in self._storages.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                found[key] = reference
                total += storage.nbytes()
        self._storages = found
        return total

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Calls the operator, and takes up the storages that it returns."""
        result = function(*arguments, **(named or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                # While a weak reference is held, no other storage gets its address.
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self.bytes())
        return result


def measure(text: str, shape: TransformerConfig, microbatch: int) -> Memory:
    """The memory of this rank in a step under the Plan `text`."""
    torch.manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (microbatch, shape.seq + 1))
    with LiveStorages() as live:
        model = Transformer(shape)
        model.initialize(0)
        parallel = shoal.parallelize(model, text)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
        inputs, targets = (parallel.local_sequence(part).clone() for part in (tokens[:, :-1], tokens[:, 1:]))
        batch = inputs.nbytes + targets.nbytes
        for _ in range(2):
            before = _settled(live)
            live.peak = before
            loss = next_token_loss(parallel(inputs), targets)
            kept = _settled(live) - before
            loss.backward()
            del loss
            optimizer.step()
            states = _settled(live) - batch
            optimizer.zero_grad()
    return Memory(states, kept, live.peak - batch)


def _settled(live: LiveStorages) -> int:
    """The live bytes, once Python's cycles are freed and gloo's threads had time to let go of tensors."""
    gc.collect()
    time.sleep(_SETTLE)
    return live.bytes()


def largest(pool: RankPool, plan: Plan, shape: TransformerConfig, microbatch: int) -> Memory:
    """The largest figures over the ranks of a Plan."""
    ranks = pool.run(measure, plan.dp * plan.tp * plan.cp, str(plan), shape, microbatch)
    return Memory(
        max(rank.states for rank in ranks), max(rank.kept for rank in ranks), max(rank.peak for rank in ranks)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    shape = TransformerConfig(
        vocab_size=options.vocabulary,
        layers=options.layers,
        hidden=options.hidden,
        heads=4,
        kv_heads=4,
        ffn=4 * options.hidden,
        seq=options.seq,
    )
    print(
        "| Plan | recompute | states, MiB | formula | ratio | kept, MiB | formula | ratio | peak, MiB |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    departs = False
    with RankPool("gloo") as pool:
        for text in ("dp=1", *PLANS):
            for policy in POLICIES:
                plan = Plan.parse(f"{text},recompute={policy}")
                memory = largest(pool, plan, shape, options.microbatch)
                states = states_by_formula(shape, plan)
                kept = kept_by_formula(shape, plan, options.microbatch)
                ratios = memory.states / states, memory.kept / kept
                departs |= any(abs(ratio - 1) > _TOLERANCE for ratio in ratios)
                print(
                    f"| {text} | {policy} | {_mib(memory.states)} | {_mib(states)} | {ratios[0]:.3f} "
                    f"| {_mib(memory.kept)} | {_mib(kept)} | {ratios[1]:.3f} | {_mib(memory.peak)} |",
                    flush=True,
                )
    print(
        f"\n{shape.layers} layers, hidden {shape.hidden}, feed-forward {shape.ffn}, {shape.heads} heads, "
        f"vocabulary {shape.vocab_size}: {shape.parameter_count():,} parameters in fp32; micro-batch "
        f"{options.microbatch} x {shape.seq} tokens, over gloo, torch {torch.__version__}"
    )
    return 1 if departs else 0


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.2f}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--hidden", type=int, default=256, help="of 4 heads (default 256)")
    parser.add_argument("--vocabulary", type=int, default=1024, help="default 1024")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence (default 512)")
    parser.add_argument("--microbatch", type=int, default=2, help="sequences (default 2)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

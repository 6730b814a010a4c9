"""Memory of a rank under several Plans, measured and by formula: states, activations kept, peak.

    python benchmarks/memory.py [--layers 4] [--hidden 256] [--seq 512] [--microbatch 2]

How it is measured. `shoal.record.LiveStorages` counts the storages that operators return and that still
exist, after every operator: what an operator allocates and frees within itself is not seen, nor what gloo
holds, nor the random generator's state (5 KB) that recompute keeps for each block. The profiler's memory
events would show the first, but they miss the free of each tensor that a thread of gloo is the last to hold.
One step warms up and makes Adam's state; the next is measured. Of several ranks that with the highest peak
counts; with ep, where ranks get unequal numbers of rows and formulas are of even ones, the mean over ranks.

    states    live after the optimizer's step, with gradients, less the batch
    kept      live after forward, less live before it: what backward will read, and gathered weights
    peak      most that was live in a step, less the batch

The formulas are those of `shoal/predict/cost/memory/memory.py`, which also says at which moment each peak is.

Exits with 1 if a figure departs from its formula by more than a tenth.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from memory_formulas import Case
from torch import Tensor

import shoal
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.record import LiveStorages
from shoal.spec.plan import Plan
from shoal.testing import RankPool

PLANS = (
    "dp=1",
    *(f"dp={ranks},shard={shard}" for ranks in (2, 4) for shard in ("none", "zero1", "zero2", "zero3")),
    "dp=4,replicate=2,shard=zero3",
    *(f"tp={ranks},tensor={tensor}" for ranks in (2, 4) for tensor in ("plain", "sequence")),
    *(f"cp={ranks},context={context}" for ranks in (2, 4) for context in ("ring", "ulysses")),
    "cp=2,tp=2",
    "dp=2,tp=2,shard=zero3",
    *(f"dp=2,shard={shard},precision=bf16" for shard in ("none", "zero1", "zero3")),
)
EXPERT_PLANS = ("dp=1", "dp=2,ep=2", "dp=4,ep=2,shard=zero1", "dp=4,ep=4,shard=zero3")
BACKEND_PLANS = ("dp=4,shard=zero2", "tp=4", "cp=4", "cp=4,context=ulysses")
POLICIES = ("none", "selective", "full")

_TOLERANCE = 0.1
_SETTLE = 0.05  # seconds


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a rank; see the top of the file.

    Attributes:
        states: Weights, gradients and what the optimizer has.
        kept: From forward for backward.
        peak: In a step.
        resident: By how much the process's resident memory rose above that before the model, as Linux counts.
        losses: Of each step, nats per token.
    """

    states: int
    kept: int
    peak: int
    resident: int
    losses: tuple[float, ...]


def measure(text: str, shape: TransformerConfig, tokens: Tensor, steps: int = 2) -> Memory:
    """The memory of this rank in the last of `steps` steps under a Plan, on one batch `[batch, seq + 1]`."""
    torch.manual_seed(0)
    before_model = _resident("VmRSS")
    _forget_most_resident()
    losses = []
    with LiveStorages() as live:
        model = Transformer(shape)
        model.initialize(0)
        parallel = shoal.parallelize(model, text)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
        inputs, targets = (parallel.local_sequence(part).clone() for part in (tokens[:, :-1], tokens[:, 1:]))
        batch = inputs.nbytes + targets.nbytes
        for step in range(steps):
            before = _settled(live)
            live.peak = before if step + 1 == steps else sys.maxsize  # which is never passed
            loss = next_token_loss(parallel(inputs), targets)
            kept = _settled(live) - before
            loss.backward()
            losses.append(loss.item())
            del loss
            optimizer.step()
            states = _settled(live) - batch
            optimizer.zero_grad()
    resident = _resident("VmHWM") - before_model
    return Memory(states, kept, live.peak - batch, resident, tuple(losses))


def _resident(field: str) -> int:
    """Bytes that Linux counts as this process's resident memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith(field))
    return int(kibibytes) << 10


def _forget_most_resident() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _settled(live: LiveStorages) -> int:
    """The live bytes, once Python's cycles are freed and gloo's threads had time to let go of tensors."""
    gc.collect()
    time.sleep(_SETTLE)
    return live.bytes()


def figures(pool: RankPool, case: Case) -> Memory:
    """The figures of the rank with the highest peak; with ep, the mean over ranks."""
    plan, shape = case.plan, case.shape
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (case.microbatch, shape.seq + 1), generator=generator)
    ranks = pool.run(measure, plan.dp * plan.tp * plan.cp, str(plan), shape, tokens)
    if plan.ep == 1:
        return max(ranks, key=lambda rank: rank.peak)
    means = {
        name: sum(getattr(rank, name) for rank in ranks) // len(ranks) for name in ("states", "kept", "peak")
    }
    return replace(ranks[0], **means)


def print_row(case: Case, memory: Memory, label: str) -> bool:
    """Prints a row of the table; tells whether all its figures are near their formulas."""
    formula = case.memory()
    pairs = ((memory.states, formula.states), (memory.kept, formula.kept), (memory.peak, formula.peak))
    figures = " | ".join(
        f"{_mib(found)} | {_mib(expected)} | {found / expected:.3f}" for found, expected in pairs
    )
    print(f"| {label} | {case.plan.recompute} | {figures} | {formula.moment} |", flush=True)
    return all(abs(found / expected - 1) <= _TOLERANCE for found, expected in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    dense = TransformerConfig(
        vocab_size=options.vocabulary,
        layers=options.layers,
        hidden=options.hidden,
        heads=4,
        kv_heads=4,
        ffn=4 * options.hidden,
        seq=options.seq,
    )
    experts = TransformerConfig(**{**dense.model_dump(), "experts": 8, "expert_ffn": options.hidden})
    tables = (
        ("shoal", "", dense, PLANS),
        ("shoal", "experts: ", experts, EXPERT_PLANS),
        ("gloo", "gloo: ", dense, BACKEND_PLANS),
    )
    print(
        "| Plan | recompute | states, MiB | formula | ratio | kept, MiB | formula | ratio "
        "| peak, MiB | formula | ratio | peak at |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    )
    near = True
    for backend, label, shape, plans in tables:
        with RankPool(backend) as pool:
            for text in options.plans or plans:
                for policy in POLICIES:
                    plan = Plan.parse(f"{text},recompute={policy}")
                    case = Case(shape, plan, options.microbatch, copies=backend == "gloo")
                    near &= print_row(case, figures(pool, case), label + text)
    print(
        f"\n{dense.layers} layers, hidden {dense.hidden}, feed-forward {dense.ffn}, {dense.heads} heads, "
        f"vocabulary {dense.vocab_size}: {dense.parameter_count():,} parameters; with experts, 8 of width "
        f"{experts.expert_ffn}, 2 for each token: {experts.parameter_count():,}. Micro-batch "
        f"{options.microbatch} x {dense.seq} tokens; torch {torch.__version__}"
    )
    return 0 if near else 1


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.2f}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--hidden", type=int, default=256, help="of 4 heads (default 256)")
    parser.add_argument("--vocabulary", type=int, default=1024, help="default 1024")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence (default 512)")
    parser.add_argument("--microbatch", type=int, default=2, help="sequences (default 2)")
    parser.add_argument("--plans", type=lambda text: text.split(";"), help="in place of the table's, by `;`")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

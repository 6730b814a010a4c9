"""Trains on one long sequence, on one rank and on four, and compares the memory of a rank.

    python benchmarks/long_sequence.py [--seq 65536] [--layers 2] [--hidden 64] [--steps 2]

The sequence is the source of Python's standard library, as bytes. Memory is measured as
`benchmarks/memory.py` does. Activations are what a step holds beside the states: kept from forward for
backward, and the peak less the states. Resident is how far the process's resident memory rose, as Linux
counts it, with what the allocator keeps and with the buffers of gloo.

Exits with 1 if four ranks' activations, kept or at the peak, depart from a quarter of one rank's by more than
a tenth, or if a loss does not fall.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from memory import Memory, measure
from torch import Tensor

from shoal.models import TransformerConfig
from shoal.spec.plan import Plan
from shoal.testing import RankPool

PLANS = ("dp=1", "cp=4,context=ring", "cp=4,context=ulysses")

_TOLERANCE = 0.1
_PATIENCE = 3600.0  # seconds for one Plan


def text_tokens(length: int) -> Tensor:
    """The first bytes of the standard library's source, `[1, length]`, int64."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= length:
            break
    return torch.tensor(list(text[:length]))[None]


def activations(memory: Memory) -> tuple[int, int]:
    """Kept, and at the peak, in bytes."""
    return memory.kept, memory.peak - memory.states


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    shape = TransformerConfig(
        vocab_size=256,
        layers=options.layers,
        hidden=options.hidden,
        heads=4,
        kv_heads=4,
        ffn=4 * options.hidden,
        seq=options.seq,
    )
    tokens = text_tokens(options.seq + 1)
    print(
        "| Plan | states, MiB | kept, MiB | of one rank's | peak less states, MiB | of one rank's "
        "| resident, MiB | loss by step | minutes |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |"
    )
    alone: tuple[int, int] | None = None
    wrong = False
    for text in PLANS:
        plan = Plan.parse(f"{text},recompute={options.recompute}")
        began = time.monotonic()
        # Processes of its own, so that none holds what an earlier Plan allocated.
        with RankPool("gloo") as pool:
            ranks = pool.run(measure, plan.cp, str(plan), shape, tokens, options.steps, timeout=_PATIENCE)
        minutes = (time.monotonic() - began) / 60
        memory = max(ranks, key=lambda rank: rank.peak)
        held = activations(memory)
        alone = held if alone is None else alone
        shares = [mine / whole for mine, whole in zip(held, alone, strict=True)]
        losses = [sum(each) / plan.cp for each in zip(*(rank.losses for rank in ranks), strict=True)]
        wrong |= any(abs(share * plan.cp - 1) > _TOLERANCE for share in shares)
        wrong |= losses != sorted(losses, reverse=True)
        print(
            f"| {text} | {_mib(memory.states)} | {_mib(held[0])} | {shares[0]:.3f} | {_mib(held[1])} "
            f"| {shares[1]:.3f} | {_mib(max(rank.resident for rank in ranks))} "
            f"| {', '.join(f'{loss:.4f}' for loss in losses)} | {minutes:.1f} |",
            flush=True,
        )
    print(
        f"\n{options.seq:,} tokens in one sequence; {shape.layers} layers, hidden {shape.hidden}, "
        f"feed-forward {shape.ffn}, {shape.heads} heads, vocabulary {shape.vocab_size}, fp32, "
        f"recompute={options.recompute}; AdamW, {options.steps} steps on the same text; gloo, torch "
        f"{torch.__version__}"
    )
    return 1 if wrong else 0


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.1f}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seq", type=int, default=65536, help="tokens of the sequence (default 65536)")
    parser.add_argument("--layers", type=int, default=2, help="default 2")
    parser.add_argument("--hidden", type=int, default=64, help="of 4 heads (default 64)")
    parser.add_argument("--steps", type=int, default=2, help="default 2; the last is measured")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

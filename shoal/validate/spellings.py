"""The names that tables by other authors use for the words of this package.

Case, spaces and punctuation do not matter: "ZeRO-3", "zero_3" and "Zero 3" are equal. A row keeps the words
of the table's schema, which distinguish more than a Plan's: a row in fp16 is not one in bf16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

SHARDING_NAMES: Mapping[str, tuple[str, ...]] = {
    "none": ("no", "off", "false", "0", "stage 0", "zero 0", "ddp", "dp", "replicated", "no_shard"),
    "zero1": ("1", "stage 1", "distributed optimizer", "dist opt", "sharded optimizer"),
    "zero2": ("2", "stage 2", "shard_grad_op"),
    "zero3": ("3", "stage 3", "fsdp", "fsdp1", "fsdp2", "full_shard"),
    "zero3-once": ("fsdp no_sync", "fsdp2 no_sync", "full_shard no_sync"),
    "hsdp": ("hybrid_shard", "hybrid sharding", "hybrid"),
}
"""Names of shardings: the states that data-parallel ranks share; hsdp is zero3 within each node."""

RECOMPUTES: Mapping[str, tuple[str, ...]] = {
    "none": ("no", "off", "false", "0", "no ac"),
    "selective": ("sac", "selective ac", "core attention", "core_attn"),
    "per-op SAC": ("op sac", "selective op"),
    "full": (
        *("yes", "on", "true", "1", "ac", "full ac", "ckpt", "checkpointing", "activation checkpointing"),
        *("gradient checkpointing", "full recompute", "full uniform", "full block", "uniform", "block"),
    ),
}
"""Names of recompute policies."""

ATTENTIONS: Mapping[str, tuple[str, ...]] = {
    "flash": (
        *("flash 1", "flash 2", "flash 3", "flash attention", "flash attention 2", "flash attention 3"),
        *("flash attn", "flash attn 2", "flash attn 3", "fa", "fa1", "fa2", "fa3", "fused", "sdpa", "cudnn"),
        *("xformers", "memory efficient", "mem efficient", "te", "transformer engine", "flex", "triton"),
        *("ring", "ring flash"),
    ),
    "unfused": ("standard", "naive", "eager", "math", "core", "local", "vanilla", "baddbmm", "no flash"),
}
"""Names of attention kernels: whether scores are written to memory."""

PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bfloat16", "mixed", "mixed precision", "amp", "16", "bf16 mixed", "bf16 amp", "bf16/fp32"),
    "fp16": ("float16", "half", "fp16 mixed", "fp16 amp", "fp16/fp32"),
    "fp32": ("float32", "float", "single", "full", "32"),
    "tf32": ("tensorfloat32", "tensor float 32"),
    "fp8": ("float8", "fp8 mixed", "fp8 hybrid", "fp8/bf16", "bf16/fp8", "mxfp8", "te fp8"),
}
"""Names of the type that products compute in."""


def spelled(words: Mapping[str, tuple[str, ...]]) -> Callable[[str], str]:
    """Return a function that reads a cell as one of these words, given the other names of each."""
    known = {_bare(each): word for word, others in words.items() for each in (word, *others)}

    def read(cell: str) -> str:
        found = known.get(_bare(cell))
        if found is None:
            raise ValueError(f"one of {', '.join(words)}, or a usual name of one of these")
        return found

    return read


def _bare(words: str) -> str:
    return re.sub(r"[^a-z0-9]", "", words.lower())

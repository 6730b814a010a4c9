"""Guess which key of the configuration was meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

# Names that other trainers (transformers, torchtitan, Megatron, nanoGPT) use for the same setting.
_ALSO_KNOWN_AS = {
    "batch": ("batch_size", "global_batch_size", "train_batch_size"),
    "sequence": ("seq", "seq_len", "seq_length", "sequence_length", "max_length", "block_size", "context"),
    "steps": (
        "max_steps",
        "num_steps",
        "train_steps",
        "training_steps",
        "iterations",
        "max_iters",
        "train_iters",
    ),
    "seed": ("random_seed",),
    "optimizer.learning_rate": ("lr", "max_lr", "peak_lr", "base_lr", "rate"),
    "optimizer.schedule": ("lr_schedule", "lr_scheduler", "lr_scheduler_type", "lr_decay_style", "scheduler"),
    "optimizer.warmup": ("warmup_steps", "warmup_iters", "lr_warmup_steps", "num_warmup_steps"),
    "optimizer.final": ("min_lr", "min_lr_ratio", "lr_min", "final_lr"),
    "optimizer.betas": ("beta1", "beta2", "beta_1", "beta_2", "adam_beta1", "adam_beta2", "adam_betas"),
    "optimizer.eps": ("epsilon", "adam_eps", "adam_epsilon"),
    "optimizer.weight_decay": ("wd", "decay_rate", "l2"),
    "optimizer.clip": (
        "grad_clip",
        "clip_grad",
        "max_grad_norm",
        "max_norm",
        "gradient_clipping",
        "clip_norm",
    ),
    "validation.every": ("eval_every", "eval_interval", "eval_steps", "validation_interval"),
    "validation.samples": ("eval_samples", "eval_iters"),
    "checkpoint.every": ("save_every", "save_interval", "save_steps", "checkpoint_interval"),
    "checkpoint.keep": ("save_total_limit", "keep_last", "max_checkpoints"),
    "data.source": ("dataset", "data_path", "path", "files", "file", "text"),
    "record.live": ("log_interval", "logging_steps", "log_every", "log_freq"),
}


def guess_key(given: str, keys: Sequence[str]) -> str:
    """Return the text " (did you mean 'x'?)" for the most likely key, or "" if none is likely.

    The last part of a dotted key decides; the section only says where to look first. Matches are tried in
    this order: names that other trainers use, an equal name elsewhere, similar spelling.

    Args:
        given: The key, dotted.
        keys: All valid keys, dotted, including sections.
    """
    section, _, name = given.rpartition(".")
    known = [key for key, others in _ALSO_KNOWN_AS.items() if name.lower() in others and key in keys]
    same = [key for key in keys if key.rpartition(".")[2] == name.lower()]
    beside = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    alike = [beside[each] for each in difflib.get_close_matches(name, beside, n=1)]
    anywhere = {key.rpartition(".")[2]: key for key in reversed(keys)}
    far = [anywhere[each] for each in difflib.get_close_matches(name, anywhere, n=1)]
    whole = difflib.get_close_matches(given, keys, n=1, cutoff=0.8)
    found = next(iter([*known, *same, *alike, *far, *whole]), None)
    return "" if found is None else f" (did you mean {found!r}?)"

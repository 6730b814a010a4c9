"""Transformers without memory, and their traces."""

import torch

from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.trace import trace

POLICIES = ("none", "selective", "full")


def built(config):
    """A transformer without memory."""
    with torch.device("meta"):
        return Transformer(config)


def traced(model, seq, batch=2, precision="bf16"):
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return trace(model, tokens, lambda output: next_token_loss(output, tokens), precision=precision)


def configuration(**changes):
    fields = {"vocab_size": 40, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": 8}
    return TransformerConfig(**fields | changes)

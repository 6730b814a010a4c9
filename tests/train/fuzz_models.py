"""The models and the data of random trainings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fuzz_cases import SEQUENCE, Case
from torch import Tensor, nn

from shoal.data import Packed
from shoal.models import Documents, Transformer, TransformerConfig
from shoal.models.attention import causal_attention
from shoal.models.transformer import positions_from_zero

__all__ = ["IGNORED", "RandomSamples", "build"]

VOCABULARY, SAMPLES, IGNORED, END = 32, 40, -100, 0
_SHAPE = {"vocab_size": VOCABULARY, "layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24}
_EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_ffn": 12, "balance_weight": 0.05, "z_weight": 0.01}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
    "use_cache": False,
}


class RandomSamples:
    """Windows of random tokens.

    If they are masked, each has 0 to 16 targets, most have few, and many none: so workers count unlike
    numbers of targets, and some none. If they are packed, they hold documents that must not see each other.
    """

    deterministic = True
    all_targets_count = False

    def __init__(self, kind: str) -> None:
        self.is_masked, self.is_packed = "masked" in kind, "packed" in kind

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: np.ndarray) -> tuple[Any, Tensor]:
        """Return inputs and targets, `[batch, seq]` each."""
        rows = [self._row(int(index)) for index in indices]
        tokens, positions, targets = (torch.stack([row[part] for row in rows]) for part in range(3))
        return (Packed(tokens, positions) if self.is_packed else tokens), targets

    def _row(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        chance = np.random.default_rng(1000 + index)
        tokens = torch.from_numpy(chance.integers(1, VOCABULARY, SEQUENCE + 1))
        inputs, targets = tokens[:-1], tokens[1:].clone()
        positions = torch.arange(SEQUENCE)
        if self.is_packed:
            starts = np.sort(chance.choice(np.arange(1, SEQUENCE), chance.integers(1, 5), replace=False))
            for start in starts:
                positions[start:] = torch.arange(SEQUENCE - start)
                targets[start - 1] = IGNORED
        if self.is_masked:
            kept = int(chance.choice([0, 0, 0, 1, 2, SEQUENCE]))
            targets[torch.from_numpy(chance.permutation(SEQUENCE)[kept:])] = IGNORED
        return inputs, positions, targets


class Own(nn.Module):
    """A user's model: frozen, unused and 0-dim parameters, and some that few samples use.

    Samples that begin with a token of less than 5 go through `rare`: most workers have none in most steps.
    """

    def __init__(self) -> None:
        super().__init__()
        width = 16
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))
        self.rare = nn.Linear(width, width)
        self.unused = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, VOCABULARY)
        self.blocks[1].weight.requires_grad_(False)
        self.attend, self.positions = causal_attention, positions_from_zero

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        own, documents = self.positions(tokens.shape[1], tokens.device)[None], None
        if position_ids is not None:
            own, documents = position_ids[:, own[0]], Documents(position_ids)
        hidden = self.token(tokens) + self.place(own)
        for block in self.blocks:
            heads = block(hidden).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
            mixed = self.attend(*heads, documents=documents).transpose(1, 2).flatten(-2)
            hidden = hidden + self.scale * mixed
        is_rare = tokens < 3
        if is_rare.any():
            hidden = hidden + self.rare(hidden) * is_rare[..., None]
        logits: Tensor = self.head(hidden)
        return logits


def build(case: Case) -> nn.Module:
    """Return the model of a case; its first weights depend on its number."""
    torch.manual_seed(case.number)
    if case.model == "user's":
        return Own()
    if case.model == "hugging face":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**_LLAMA)).train()
    changes: dict[str, Any] = _EXPERTS if case.model == "experts" else {}
    is_tied = case.model == "tied"
    model = Transformer(TransformerConfig(**_SHAPE, **changes, seq=SEQUENCE, tie_embeddings=is_tied))
    model.initialize(case.number)
    return model

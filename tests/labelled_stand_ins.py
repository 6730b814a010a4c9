"""Labelled texts, a tokenizer as BERT's, and small models of Hugging Face for sequence classification."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

GOOD = ["fine", "lovely", "bright", "warm"]
BAD = ["poor", "dull", "cold", "grim"]
OTHER = ["a", "film", "with", "the", "story", "of", "one", "fish"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def texts(count: int, seed: int = 0) -> list[tuple[str, int]]:
    """Texts of two to nine words, of which one says the label, and labels, of which two thirds are 1."""
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        label = int(generator.random() < 2 / 3)
        words = generator.choices(OTHER, k=generator.randint(1, 8))
        words.insert(generator.randint(0, len(words)), generator.choice(GOOD if label else BAD))
        rows.append((" ".join(words), label))
    return rows


def write_tsv(path: Path, rows: list[tuple[str, Any]]) -> Path:
    """The rows under `sentence` and `label`, as in the files of SST-2."""
    lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_tokenizer(folder: Path, padding: str = "[PAD]") -> Path:
    """A folder with the files of a tokenizer with a word an id, which puts [CLS] and [SEP] around a text."""
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    special = [padding, *SPECIAL[1:]]
    vocabulary = {word: index for index, word in enumerate([*special, *GOOD, *BAD, *OTHER])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, **names}
    if padding == "[PAD]":
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


SHAPES: dict[str, dict[str, Any]] = {
    "distilbert": {
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "roberta": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0},
    "llama": {"num_key_value_heads": 2},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}


def shape(kind: str, **changes: Any) -> Any:
    """The configuration of a small model."""
    import transformers

    common = {"vocab_size": 20, "max_position_embeddings": 32}
    if kind not in ("distilbert", "gpt2"):
        common |= {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
    if kind == "gpt2":
        common = {"vocab_size": 20, "n_positions": 32}
    return transformers.AutoConfig.for_model(kind, **common, **SHAPES[kind], **changes)

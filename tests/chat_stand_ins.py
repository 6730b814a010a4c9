"""Conversations, and a tokenizer with a chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = ["fish", "swim", "in", "a", "shoal", "as", "one", "none", "?", "!"]
SPECIAL = ["<pad>", "<unk>", "<eos>", "<user>", "<assistant>", "<system>", "<end>"]
PLAIN = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<end>{% endgeneration %}"
    "{% else %}{{ message.content }}<end>{% endif %}{% endfor %}"
)
FORGETFUL = "{% for message in messages[-2:] %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations of one to three questions, each with its answer: the words backwards."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        messages = [{"role": "system", "content": "as one"}] if number % 3 == 0 else []
        for _ in range(generator.randint(1, 3)):
            words = generator.choices(WORDS, k=generator.randint(1, 4))
            messages.append({"role": "user", "content": " ".join(words)})
            messages.append({"role": "assistant", "content": " ".join(reversed(words))})
        rows.append(messages)
    return rows


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows) + "\n")
    return path


def write_tokenizer(folder: Path, template: str = PLAIN) -> Path:
    """A folder with a tokenizer of one word an id, and with a chat template if it is not empty."""
    import tokenizers

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    if template:
        about["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from shoal.data import DataConfig

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

WORDS = ["fish", "swim", "in", "a", "shoal", "that", "moves", "as", "one"]


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., DataConfig]:
    """Makes a DataConfig whose cache is the test's own."""

    def make(source: object, **fields: object) -> DataConfig:
        source = [str(one) for one in source] if isinstance(source, list) else str(source)
        return DataConfig(source=source, **{"cache": tmp_path / "cache", **fields})

    return make


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """A tokenizers file with one id a word; <unk> is 0 and <eos> is 1."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eos>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path

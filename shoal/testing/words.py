"""Text for trainings that take milliseconds: documents of a few words, drawn from a generator with a seed."""

from __future__ import annotations

import random
from pathlib import Path

_WORDS = ["shoal", "fish", "ring", "of", "the", "a", "turns", "as", "one", "with", "no", "leader"]
_LENGTH = 160


def write_words(folder: Path, documents: int = 40) -> None:
    """Make a folder with text: each document is a file of 160 words, the same ones every time."""
    folder.mkdir()
    generator = random.Random(0)
    for document in range(documents):
        text = " ".join(generator.choices(_WORDS, k=_LENGTH))
        (folder / f"document-{document:02d}.txt").write_text(text)

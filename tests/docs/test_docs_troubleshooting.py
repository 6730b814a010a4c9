"""The messages of docs/guides/troubleshooting.md are those of the source."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
VALUE = "\N{REPLACEMENT CHARACTER}"


def text_of(node):
    """What a string is made of, with VALUE for what it gets when it is printed; None if it is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = text_of(node.left), text_of(node.right)
        return None if parts == (None, None) else "".join(part or VALUE for part in parts)
    return None


@cache
def printed():
    """Every string of the library, and the strings of every statement of the native core."""
    texts = set()
    for path in (ROOT / "shoal").rglob("*.py"):
        tree = ast.parse(path.read_text())
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        texts |= {text for node in ast.walk(tree) if id(node) not in statements and (text := text_of(node))}
    for path in (each for ending in ("*.cc", "*.h") for each in (ROOT / "csrc").rglob(ending)):
        for statement in path.read_text().split(";\n"):
            literals = re.findall(r'"((?:[^"\\\n]|\\.)*)"', statement)
            texts.add(VALUE + VALUE.join(literals) + VALUE)
    return texts


def holds(text, message):
    pieces = [
        re.escape(piece) for piece in message.removeprefix("...").removesuffix("...").strip().split("...")
    ]
    return re.search(f".*{VALUE}.*".join(pieces), text, re.DOTALL) is not None


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_source(message):
    assert sum(len(piece.strip()) for piece in message.split("...")) >= 12, "too little to be known by"
    assert any(holds(text, message) for text in printed())


def test_a_message_that_was_changed_is_found():
    assert holds(f"a batch of {VALUE} has no samples", "a batch of ... has no samples")
    assert not holds(f"a batch of {VALUE} has no samples", "a batch of ... lacks samples")
    assert not holds("a batch of 4 has no samples", "a batch of ... has no samples")


def test_messages_are_told_once_and_each_has_a_remedy():
    assert len(MESSAGES) == len(set(MESSAGES)) >= 25
    for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        assert section.partition("\n")[2].partition("\n## ")[0].strip()

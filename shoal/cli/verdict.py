"""A Verdict as an object for JSON and as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shoal.cli.table import paragraph
from shoal.diagnosis import Verdict

__all__ = ["verdict_summary", "verdict_text"]


def verdict_summary(verdict: Verdict) -> dict[str, Any]:
    """Return an object for JSON; `sentences` has the verdict in words."""
    return {**asdict(verdict), "sentences": list(verdict.sentences())}


def verdict_text(summary: Mapping[str, Any]) -> str:
    """Return the verdict as lines."""
    return "\n".join(paragraph(sentence) for sentence in summary["sentences"])

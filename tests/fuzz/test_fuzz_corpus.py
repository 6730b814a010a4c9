"""Inputs that fuzzing found, and inputs that once failed: each is read, or refused by a named error."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_targets import TARGETS, survives

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_that_are_kept_are_read_or_refused_by_a_named_error(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs
    for path in inputs:
        survives(target, path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_a_seed_is_read(target: str) -> None:
    TARGETS[target]((CORPUS / target / "seed-0").read_bytes())


@pytest.mark.parametrize(
    "target",
    ["manifest", "timeline", "metrics", "run", "configuration", "cluster", "values", "workload", "channel"],
)
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b"a = [", b"[[a]]\n"])
def test_input_that_is_deep_is_refused_by_a_named_error(target: str, opening: bytes) -> None:
    survives(target, opening * 20_000)
    survives(target, (len(opening) * 20_000).to_bytes(8, "little") + opening * 20_000)

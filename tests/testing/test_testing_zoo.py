"""Every entry of the zoo trains as one device does, or is refused by a named error."""

import importlib.util
import re
from pathlib import Path

import pytest

from shoal.testing.conformance import all_cases, expected, outcomes, sampled_cases, table
from shoal.testing.zoo import ENTRIES

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "reference" / "zoo.md"


def needs_what_is_not_installed(entry):
    return entry.startswith("hf_") and importlib.util.find_spec("transformers") is None


INSTALLED = [name for name in ENTRIES if not needs_what_is_not_installed(name)]


def wrong(found):
    """What became of the cases that should have become something else."""
    return {
        str(case): f"{verdict.outcome}: {verdict.departure or verdict.reason}"
        for case, verdict in found.items()
        if verdict.outcome != ("refused" if expected(case) else "passed")
        or not verdict.reason.startswith(expected(case))
    }


@pytest.fixture(scope="module")
def found(ranks):
    return outcomes(ranks, sampled_cases(INSTALLED), ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_trains_as_one_device_does_or_is_refused_by_name(found, entry):
    if needs_what_is_not_installed(entry):
        pytest.skip("transformers is not installed")
    assert not wrong({case: verdict for case, verdict in found.items() if case.entry == entry})


@pytest.mark.long
def test_every_entry_trains_so_in_every_precision(ranks):
    assert not wrong(outcomes(ranks, all_cases(INSTALLED), ENTRIES))


def test_the_page_says_what_becomes_of_each():
    page = PAGE.read_text(encoding="utf-8")
    told = {row[0]: row for row in re.findall(r"^\| (`.+?`) \| .+? \| (.+) \|$", page, re.MULTILINE)}
    _, rows = table(all_cases(ENTRIES), ENTRIES)
    for name, _, *cells in rows:
        assert told[name][1].split(" | ") == cells, "run: python docs/generate.py"


def test_entries_are_of_many_kinds_and_say_what_is_special():
    assert len(ENTRIES) >= 25
    for name, entry in ENTRIES.items():
        assert entry.__doc__, name
        assert entry.__doc__.splitlines()[0].endswith("."), name

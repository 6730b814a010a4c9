"""Every entry of the zoo trains as one device does, or is refused by a named error."""

import importlib.util
import re
from pathlib import Path

import pytest

from shoal.testing.conformance import all_cases, expected, outcomes, table
from shoal.testing.zoo import ENTRIES

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "reference" / "zoo.md"


def needs_what_is_not_installed(entry):
    return entry.startswith("hf_") and importlib.util.find_spec("transformers") is None


@pytest.fixture(scope="module")
def found(ranks):
    entries = [name for name in ENTRIES if not needs_what_is_not_installed(name)]
    return outcomes(ranks, all_cases(entries), ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_trains_as_one_device_does_or_is_refused_by_name(found, entry):
    if needs_what_is_not_installed(entry):
        pytest.skip("transformers is not installed")
    wrong = {}
    for case in all_cases([entry]):
        wanted, outcome = expected(case), found[case]
        if (outcome.kind, outcome.text) != (wanted.kind, wanted.text):
            wrong[str(case)] = f"{outcome.kind}: {outcome.text}"
    assert not wrong


def test_the_page_says_what_became_of_each(found):
    page = PAGE.read_text(encoding="utf-8")
    told = {row[0]: row for row in re.findall(r"^\| (`.+?`) \| .+? \| (.+) \|$", page, re.MULTILINE)}
    _, rows = table(found, ENTRIES)
    for name, _, *cells in rows:
        assert told[name][1].split(" | ") == cells, "run: python docs/generate.py"


def test_entries_are_of_many_kinds_and_say_what_is_special():
    assert len(ENTRIES) >= 25
    for name, entry in ENTRIES.items():
        assert entry.__doc__, name
        assert entry.__doc__.splitlines()[0].endswith("."), name

"""Values as YAML."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.submit.kubernetes import yaml_text

yaml = pytest.importorskip("yaml")

SCALARS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["yes", "No", "null", "~", "1e3", "0x1", "a: b", "- a", "# a", "a:", "1:30", "", " a", "/"]
    ),
    st.integers(-(2**40), 2**40),
    st.booleans(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)


@given(st.dictionaries(st.text(max_size=6), VALUES, min_size=1, max_size=4))
def test_another_library_reads_what_was_written(value):
    assert yaml.safe_load(yaml_text(value)) == value

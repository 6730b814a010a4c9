"""The text of a compression, and the bytes of what it sends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.spec.plan import Compression

TEXTS = (
    "none",
    "int8",
    "int4",
    "fp8",
    "sign",
    "topk:64",
    "topk:7:2bit",
    "random:3",
    "threshold:3",
    "powersgd:2",
)


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_read_and_written(text):
    assert str(Compression.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int9", "did you mean"),
        ("int8:2", "takes no number"),
        ("topk", "topk:N sends the Nth part"),
        ("topk:1", "N from 2 to 4096"),
        ("topk:64:3bit", "topk:N:2bit"),
        ("random:64:2bit", "N from 2"),
        ("powersgd:x", "factors of rank N"),
    ],
)
def test_a_wrong_text_is_refused_with_what_is_possible(text, said):
    with pytest.raises(PlanError) as refused:
        Compression.parse(text)
    assert said in str(refused.value)


@given(st.integers(1, 100_000), st.sampled_from(["int8", "int4", "fp8", "sign", "topk:64", "topk:64:2bit"]))
def test_bytes_are_the_sum_over_blocks_and_chunks(elements, text):
    """Each block has its scale; each chunk rounds its packed positions and values up to bytes."""
    found = Compression.parse(text).payload(elements)
    bits = {"int8": 8, "int4": 4, "fp8": 8, "sign": 1}.get(text)
    if bits is not None:
        scales = 4 * len(range(0, elements, 1024))
        assert found == scales + (elements * bits + 7) // 8
        return
    expected = 0
    for begin in range(0, elements, 4096):
        kept = (min(4096, elements - begin) + 63) // 64
        expected += (12 * kept + 7) // 8 + ((2 * kept + 7) // 8 + 4 if text.endswith("2bit") else 4 * kept)
    assert found == expected

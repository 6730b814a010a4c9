"""A Workload written as JSON reads back as it was."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ModelError
from shoal.spec.workload import (
    Block,
    Keep,
    Parameters,
    Part,
    Pass,
    Saved,
    Workload,
    from_json,
    shape,
    to_json,
    workload_of,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", ["tiny-experts", "gpt3-175b", "deepseek-v3", "vit-b", "bert-base"])
def test_a_preset_reads_back_exactly(name):
    workload = workload_of(shape(name))
    read = from_json(to_json(workload))
    assert read == workload
    assert len(set(map(id, read.layers))) == len(set(map(id, workload.layers)))


@given(
    FINITE, FINITE, st.sampled_from(list(Part)), st.sampled_from(list(Keep)), st.sampled_from([None, 1, 8])
)
def test_any_number_reads_back_exactly(elements, forward, part, keep, width):
    block = Block(
        "layer",
        (Pass("norm", elements, forward, 2.5, part),),
        Parameters(1, 2, 3),
        (Saved("input", elements, part, keep, width),),
    )
    workload = Workload("model", 8, 4, block, (block, block), block, tied=True)
    assert from_json(to_json(workload)) == workload


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "blocks": [], "pieces": [0, 1]}']
)
def test_what_is_no_workload_is_refused(text):
    with pytest.raises(ModelError, match="is not a Workload"):
        from_json(text)


def test_an_unknown_field_is_refused():
    text = json.loads(to_json(workload_of(shape("tiny")))) | {"heds": 4}
    with pytest.raises(ModelError, match="heds"):
        from_json(json.dumps(text))

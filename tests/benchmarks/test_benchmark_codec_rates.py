"""The benchmark of codecs counts the bytes that its docstring says, and torch does the same work."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import codec_rates
import torch

from shoal.collectives.ctypes_core import load_core
from shoal.spec.plan import Compression

core = load_core()
if core is None:
    pytest.skip("the native core was not built", allow_module_level=True)

ELEMENTS = 3 * 4096


def works(kind, peers=False):
    vectors = codec_rates.Vectors(ELEMENTS, seed=1)
    return vectors, {work.name: work for work in vectors.works(core, None, Compression.parse(kind), peers)}


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "sign"])
def test_every_element_is_read_and_written(kind):
    payload = Compression.parse(kind).payload(ELEMENTS)
    found = {name: work.bytes - payload for name, work in works(kind)[1].items()}
    vector = 4 * ELEMENTS
    assert found == {
        "encode": vector,
        "encode, feedback": 2 * vector,
        "decode": vector,
        "decode_add": 2 * vector,
    }


def test_of_few_elements_their_cache_lines_are_read_and_written():
    vectors, found = works("topk:64")
    lines = {int(place) // 16 for place in vectors.out.nonzero()}
    payload = Compression.parse("topk:64").payload(ELEMENTS)
    assert found["decode_add"].bytes == payload + 2 * 64 * len(lines)


def test_torch_does_the_same_work():
    vectors, found = works("topk:64", peers=True)
    found["encode, feedback"].run()
    left = vectors.left.clone()
    vectors.left.zero_()
    found["encode, feedback"].peer()
    assert torch.equal(vectors.left, left)
    found["decode"].run()
    out = vectors.out.clone()
    vectors.out.fill_(1.0)
    found["decode"].peer()
    assert torch.equal(vectors.out, out)

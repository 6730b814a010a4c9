"""The native core: its arithmetic against torch's, and its own tests, plain and under sanitizers."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.collectives.ctypes_core import load_core
from shoal.collectives.enums import DTYPE_NAMES, REDUCTION_NAMES

core = load_core()
if core is None:
    pytest.skip("the native core was not built", allow_module_level=True)

DTYPES = {name: (number, getattr(torch, name)) for number, name in DTYPE_NAMES.items()}
REDUCTIONS = {name: number for number, name in REDUCTION_NAMES.items()}
NARROW = (torch.float16, torch.bfloat16)
BITWISE = ("BAND", "BOR", "BXOR")
INVALID = -1

PAIRWISE = {
    "SUM": torch.add,
    "AVG": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def vector_units() -> list[str]:
    """Those that this processor has; the widest is the one in use."""
    widest = core.vector_unit()
    try:
        return [
            name for name in ("portable", "neon", "avx2", "avx512") if core.force_vector_unit(name.encode())
        ]
    finally:
        core.force_vector_unit(widest)


def is_defined(dtype: torch.dtype, op: str) -> bool:
    return op != "AVG" if not dtype.is_floating_point else op not in BITWISE


def fold(inputs: list[torch.Tensor], op: str, divisor: int) -> torch.Tensor:
    """What `combine` promises: a fold in order, of 16-bit floats in float32, rounded once."""
    dtype = inputs[0].dtype
    wide = [each.float() if dtype in NARROW else each for each in inputs]
    if op == "AVG":
        return (functools.reduce(torch.add, wide) / divisor).to(dtype)
    return functools.reduce(PAIRWISE[op], wide).to(dtype)


def random_tensor(count: int, dtype: torch.dtype, offset: int, seed: int) -> torch.Tensor:
    """Random elements that begin `offset` elements into their storage; any bits, for integers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        values = torch.randn(count, generator=generator) * 10
    elif dtype == torch.bool:
        values = torch.randint(0, 2, (count,), generator=generator)
    else:
        limits = torch.iinfo(dtype)
        values = torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=dtype)
    return torch.cat([torch.zeros(offset, dtype=dtype), values.to(dtype)])[offset:]


def combine(output: torch.Tensor, inputs: list[torch.Tensor], op: str, divisor: int) -> int:
    name = str(output.dtype).removeprefix("torch.")
    pointers = (ctypes.c_void_p * len(inputs))(*(each.data_ptr() for each in inputs))
    return core.combine(
        DTYPES[name][0], REDUCTIONS[op], output.data_ptr(), pointers, len(inputs), output.numel(), divisor
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@st.composite
def folds(draw):
    dtype = draw(st.sampled_from([dtype for _, dtype in DTYPES.values()]))
    op = draw(st.sampled_from([op for op in REDUCTIONS if is_defined(dtype, op)]))
    count = draw(st.one_of(st.integers(0, 300), st.sampled_from([1023, 4096, 20_001])))
    offsets = draw(st.lists(st.integers(0, 5), min_size=2, max_size=6))
    in_place = draw(st.one_of(st.none(), st.integers(0, len(offsets) - 2)))
    return dtype, op, count, offsets, in_place, draw(st.integers(0, 2**31))


@pytest.mark.parametrize("unit", vector_units())
@given(case=folds())
def test_combine_gives_the_bits_of_a_fold_in_order(unit, case):
    dtype, op, count, offsets, in_place, seed = case
    first, *others = offsets
    inputs = [random_tensor(count, dtype, offset, seed + index) for index, offset in enumerate(others)]
    wanted = fold(inputs, op, divisor=len(inputs))
    output = random_tensor(count, dtype, first, 7) if in_place is None else inputs[in_place]
    widest = core.vector_unit()
    core.force_vector_unit(unit.encode())
    try:
        assert combine(output, inputs, op, len(inputs)) == 0
    finally:
        core.force_vector_unit(widest)
    assert same_bits(output, wanted)


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_the_least_and_the_greatest_of_what_has_a_nan_is_nan(name, op):
    dtype = DTYPES[name][1]
    for place in range(3):
        inputs = [torch.full((100,), float(index), dtype=dtype) for index in range(3)]
        inputs[place][::3] = math.nan
        output = torch.empty(100, dtype=dtype)
        assert combine(output, inputs, op, 1) == 0
        assert output[::3].isnan().all()
        assert not output[1::3].isnan().any()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_that_a_type_does_not_have_are_refused(name, op):
    dtype = DTYPES[name][1]
    inputs = [torch.ones(4, dtype=dtype)] * 2
    assert combine(torch.empty(4, dtype=dtype), inputs, op, 2) == (0 if is_defined(dtype, op) else INVALID)


def test_the_core_tells_the_hash_of_the_sources_that_are_here():
    root = Path(__file__).parents[2] / "csrc"
    folders = [root, *(root / name for name in ("common", "codecs", "transport", "algorithms"))]
    digest = hashlib.sha256()
    for pattern in ("*.cc", "*.h"):
        for path in sorted(str(path) for folder in folders for path in folder.glob(pattern)):
            digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    assert core.build == digest.hexdigest()[:12], "build the core again: make"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "address", "thread"])
def test_the_cores_own_tests_pass(kind, tmp_path):
    if shutil.which("make") is None or shutil.which("g++") is None:
        pytest.skip("compiling the core's tests needs make and g++")
    source = Path(__file__).parents[2] / "csrc"
    jobs = len(os.sched_getaffinity(0))
    done = subprocess.run(
        ["make", "-C", source, f"-j{jobs}", f"BUILD={tmp_path}", f"test-{kind}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]

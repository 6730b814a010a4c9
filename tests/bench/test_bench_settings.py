"""What the command line may say of a measurement, and what it is told otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.machine.bench import Settings, parse_names, parse_sizes
from shoal.units import format_bytes


def settings(**changed):
    fields = {"collectives": ("all_reduce",), "backends": ("shoal", "gloo"), "sizes": (1024,)}
    return Settings(**{**fields, **changed})


@given(first=st.integers(1, 1 << 12), last=st.integers(1 << 12, 1 << 40), factor=st.integers(2, 64))
def test_a_range_multiplies_from_its_first_size_and_ends_before_it_would_exceed_the_last(first, last, factor):
    sizes = parse_sizes(f"{first}:{last}:x{factor}")
    assert sizes == tuple(first * factor**step for step in range(len(sizes)))
    assert sizes[-1] <= last < sizes[-1] * factor


@given(st.lists(st.integers(1, 1023).map(lambda count: count << 10), min_size=1, unique=True))
def test_a_list_keeps_its_order(sizes):
    assert parse_sizes(",".join(map(format_bytes, sizes))) == tuple(sizes)


def test_a_range_doubles_unless_told_otherwise():
    assert parse_sizes("1KiB:4KiB") == (1024, 2048, 4096)


def test_a_name_given_twice_is_measured_once():
    assert parse_names("gloo, mpi,gloo") == ("gloo", "mpi")
    assert parse_sizes("1KiB,2KiB,1024") == (1024, 2048)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1KB", "did you mean '1KiB'"),
        ("64k", "did you mean '64KiB'"),
        ("many", "'many' is not a size"),
        ("", "'' is not a size"),
        ("0", "0 bytes"),
        ("2KiB:1KiB", "comes after"),
        ("1KiB:2KiB:4", "'4' is not a factor"),
        ("1KiB:2KiB:x1", "'x1' is not a factor"),
        ("1KiB:2KiB:x2:x2", "cannot be read"),
        ("1KiB:", "'' is not a size"),
    ],
)
def test_what_is_not_a_size_is_refused(text, told):
    with pytest.raises(ConfigError, match="--sizes") as caught:
        parse_sizes(text)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"collectives": ("allreduce",)}, "did you mean 'all_reduce'"),
        ({"collectives": ()}, "--collective is empty"),
        ({"backends": ("glo",)}, "did you mean 'gloo'"),
        ({"backends": ()}, "--backend is empty"),
        ({"dtype": "float23"}, "did you mean 'float32'"),
        ({"op": "summ"}, "did you mean 'sum'"),
        ({"op": "avg", "dtype": "int32"}, "--op avg"),
        ({"rounds": 0}, "--rounds 0"),
        ({"algorithm": "rign"}, "did you mean 'ring'"),
        ({"algorithm": "ring", "backends": ("gloo",)}, "for the backend shoal"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_is_nearest(changed, told):
    with pytest.raises(ConfigError) as caught:
        settings(**changed)
    assert told in str(caught.value)


def test_an_algorithm_is_for_the_collectives_that_have_it():
    both = settings(collectives=("all_reduce", "barrier"), algorithm="ring")
    assert both.algorithms == {"all_reduce": "ring"}
    assert settings().algorithms == {}

"""Values as bytes: all that ranks tell each other comes back, and nothing that is told runs code."""

import ast
import contextlib
import json
import math
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.errors import (
    CollectiveError,
    CommunicationError,
    CorruptCheckpointError,
    MissingExtraError,
    PlanError,
    UserError,
    WorkerError,
)
from shoal.spec.cluster import PRESETS, Cluster
from shoal.spec.plan import Plan
from shoal.spec.run import Run
from shoal.spec.timeline import Kind, Span
from shoal.train import Job, Resume, TrainConfig
from shoal.values import decode, encode

PACKAGE = Path(shoal.__file__).parent

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(Path, st.from_regex(r"/?[a-z]+(/[a-z]+)*", fullmatch=True))
    | st.builds(range, st.integers(0, 9), st.integers(0, 9))
    | st.sampled_from(Kind)
)
keys = (
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.frozensets(keys, max_size=3)
    ),
    max_leaves=12,
)


def typed(value):
    """A value with the types of all in it: it tells lists from tuples, and True from 1."""
    if isinstance(value, dict):
        return dict, {typed(key): typed(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, frozenset)):
        return type(value), type(value)(typed(each) for each in value)
    return type(value), value


@given(values)
def test_a_value_comes_back_with_its_types(value):
    again = decode(encode(value))
    assert typed(again) == typed(value)


@given(values, st.data())
def test_bytes_that_are_cut_or_changed_give_a_named_error_or_another_value(value, data):
    told = bytearray(encode(value))
    place = data.draw(st.integers(0, len(told) - 1))
    with pytest.raises(CommunicationError):
        decode(bytes(told[:place]))
    told[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CommunicationError):
        decode(bytes(told))


def test_what_describes_a_run_comes_back():
    config = TrainConfig(model="tiny", steps=7, data={"source": ("a", "b")}, optimizer={"learning_rate": 0.1})
    plan = Plan.parse("dp=4,tp=2,shard=zero1,microbatch=2")
    cluster = Cluster.preset(PRESETS[0])
    job = Job(
        config=config,
        plan=plan,
        path=Path("/runs/x"),
        resume=Resume(Run(Path("/runs/y")), None),
        cluster=cluster,
    )
    again = decode(encode(job))
    assert again == job
    assert again.config.model_fields_set >= config.model_fields_set
    span = Span(rank=0, lane="compute", kind=Kind.STEP, name="1", start=0.5, duration=math.pi)
    assert decode(encode([span])) == [span]


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.int8, numpy.uint16, numpy.complex64])
def test_arrays_come_back_and_can_be_written(dtype):
    array = numpy.arange(24).reshape(2, 3, 4).astype(dtype)[:, ::2]
    again = decode(encode({"array": array, "empty": array[:0]}))
    numpy.testing.assert_array_equal(again["array"], array)
    assert again["array"].dtype == array.dtype
    assert again["empty"].shape == (0, 2, 4)
    again["array"][0] = 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_tensors_come_back(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype).t()
    again = decode(encode((tensor, tensor[:0], tensor[0, 0])))
    for left, right in zip(again, (tensor, tensor[:0], tensor[0, 0]), strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    "error",
    [
        PlanError("dp=3", possible="1, 2", change="write dp=2"),
        MissingExtraError("reading", package="pyarrow", extra="parquet"),
        CollectiveError("all_reduce failed", rank=3, fault="timeout"),
        CorruptCheckpointError("step 3 is damaged"),
        WorkerError(2, "died"),
    ],
)
def test_errors_come_back_with_their_text(error):
    again = decode(encode(error))
    assert str(again) == str(error)
    assert isinstance(again, UserError if isinstance(error, MissingExtraError) else type(error))


@dataclass
class Mine:
    """A class that is not Shoal's."""

    number: int


@pytest.mark.parametrize("value", [Mine(1), len, object(), numpy.array([Mine(1)]), ValueError("x"), Path.cwd])
def test_other_classes_are_refused_by_name_before_anything_is_told(value):
    with pytest.raises(TypeError, match="told to no other process"):
        encode([value])


def bytes_of(text):
    data = json.dumps(text).encode()
    return len(data).to_bytes(8, "little") + data


@pytest.mark.parametrize(
    "text",
    [
        {"kind": "object", "class": "os:system", "fields": [["command", "true"]]},
        {"kind": "object", "class": "shoal.record.metrics:AppendFile", "fields": [["path", "x"]]},
        {"kind": "object", "class": "shoal.cli.main:main", "fields": []},
        {"kind": "object", "class": "shoal.train.__main__:world", "fields": []},
        {"kind": "object", "class": "shoal.values:json.loads", "fields": []},
        {"kind": "object", "class": "shoal.values:Path", "fields": []},
        {"kind": "error", "class": "shoal.spec.run:Run", "arguments": ["x"]},
        {"kind": "enum", "class": "shoal.spec.timeline.span:Kind", "name": "nothing"},
        {"kind": "object", "class": "shoal.spec.plan.plan:Plan", "fields": [["dp", -1]]},
        {"kind": "array", "type": "O", "shape": [1], "length": 0},
        {"kind": "array", "type": "<f8", "shape": [1 << 60], "length": 0},
        {"kind": "tensor", "type": "load", "shape": [1], "length": 0},
        {"kind": "bytes", "length": 1 << 60},
        {"kind": "bytes", "length": -1},
        {"kind": "pickle", "data": ""},
        {"no": "kind"},
    ],
)
def test_bytes_that_ask_for_more_than_values_are_refused(text):
    with pytest.raises(CommunicationError):
        decode(bytes_of(text))


def test_deep_bytes_and_pickles_are_refused():
    deep = b"[" * 100_000 + b"]" * 100_000
    for data in (len(deep).to_bytes(8, "little") + deep, pickle.dumps([1]), b""):
        with pytest.raises(CommunicationError):
            decode(data)


UNPICKLED = {
    "checkpoint/dcp.py": "files of torch.distributed.checkpoint: only named classes, unless the user says",
    "testing/check/runner.py": "a file of this user's own parent process, in a private folder",
    "data/workers.py": "pipes to this process's own children",
    "analyze/hang/flight_recorder.py": "dumps of torch's flight recorder: plain containers alone",
    "predict/planner/helper_process.py": "a pipe to this process's own child",
    "train/auto_plan.py": "pipes to and from this process's own child",
    "collectives/device_memory.py": "CUDA's handles, among ranks on one host, which share memory anyway",
}
"""The files that may unpickle, and where the bytes come from."""

FORBIDDEN = {
    *("loads", "load", "Unpickler", "_Unpickler"),  # of pickle, marshal, dill and so on
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}


def unpickling(path):
    """Names in a file that read pickles."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in {"pickle", "marshal", "dill", "cloudpickle"}:
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN:
            owner = ast.unparse(node.value)
            if owner in {"pickle", "marshal", "dill", "cloudpickle", "torch"} or (
                node.attr.endswith(("object", "object_list")) and owner in {"dist", "torch.distributed"}
            ):
                yield f"{owner}.{node.attr}"


def test_nothing_that_a_stranger_could_send_or_store_is_unpickled():
    found = {str(path.relative_to(PACKAGE)): set(unpickling(path)) for path in PACKAGE.rglob("*.py")}
    assert {path for path, names in found.items() if names} == set(UNPICKLED)

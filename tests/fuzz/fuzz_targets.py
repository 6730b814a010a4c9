"""What is fuzzed: readers of bytes that others wrote. Each reads any bytes, or refuses them by a named error.

A target takes the bytes. It fails with an exception that is not Shoal's, or when what was read is not read
equally again. It imports what it needs by itself, so that a process has little to instrument. `fuzz.py`
drives a target with new inputs, and `test_fuzz_corpus.py` with those that are kept.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.errors import ShoalError

__all__ = ["TARGETS", "survives"]

_BATCH = 64


def plan(data: bytes) -> None:
    """The text of a Plan."""
    from shoal.spec.plan import Plan, SettledPlan

    read = Plan.parse(data.decode(errors="replace"))
    assert Plan.parse(str(read)) == read
    settled = SettledPlan.of(read, _BATCH)
    assert settled.ranks == read.ranks


def manifest(data: bytes) -> None:
    """The manifest of a checkpoint, with the hash that its writer would give it."""
    from shoal.checkpoint.manifest import Manifest, _digest

    try:
        body = json.loads(data)
        body["sha256"] = _digest({name: value for name, value in body.items() if name != "sha256"})
        data = json.dumps(body).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    read = Manifest.from_json(data)
    again = Manifest.from_json(read.to_json())
    assert (again.step, again.files, again.tensors) == (read.step, read.files, read.tensors)


def timeline(data: bytes) -> None:
    """A rank's file of a timeline, and the breakdown of its steps."""
    from shoal.spec.timeline import Timeline, explain

    with _written(data, "rank-00000.jsonl") as path:
        read = Timeline.read(path.parent)
        explain(read)


def clocks(data: bytes) -> None:
    """The file of a host's clock beside a timeline of that host."""
    from shoal.spec.timeline import Timeline

    head = {"timeline": 1, "rank": 0, "host": "b", "origin_unix_ns": 10**18, "origin_monotonic_ns": 5}
    span = {"kind": "step", "lane": "compute", "name": "1", "start": 0.5, "duration": 1.0}
    with _written(data, "clock-00000.jsonl") as path:
        (path.parent / "rank-00000.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(span)}\n")
        Timeline.read(path.parent)


def metrics(data: bytes) -> None:
    """The metrics of a run."""
    from shoal.spec.run import read_metrics

    with _written(data, "metrics.jsonl") as path:
        read_metrics(path)


def run(data: bytes) -> None:
    """run.json."""
    from shoal.spec.run import Run

    with _written(data, "run.json") as path:
        assert isinstance(Run.open(path.parent).description, dict)


def configuration(data: bytes) -> None:
    """A configuration."""
    from shoal.train.config import load_config

    with _written(data, "config.toml") as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_config(path)


def cluster(data: bytes) -> None:
    """A description of machines."""
    from shoal.spec.cluster import Cluster

    with _written(data, "machines.toml") as path:
        read = Cluster.read(path)
        read.write(path)
        assert Cluster.read(path) == read


def values(data: bytes) -> None:
    """What processes tell each other."""
    import numpy  # noqa: F401
    import torch  # noqa: F401

    from shoal.values import decode, encode

    with contextlib.suppress(TypeError):
        encode(decode(data))


def workload(data: bytes) -> None:
    """A traced model."""
    from shoal.spec.workload.workload import from_json, to_json

    read = from_json(data.decode(errors="replace"))
    assert from_json(to_json(read)) == read


def channel(data: bytes) -> None:
    """A message to a parameter server."""
    from shoal.channel import Channel
    from shoal.errors import CommunicationError

    here, there = socket.socketpair()
    received = Channel.__new__(Channel)
    received.socket = here
    with here, there:
        there.sendall(data[: 1 << 16])
        there.shutdown(socket.SHUT_WR)
        try:
            received.receive_with_body()
        except (OSError, ValueError) as error:  # which end the connection of a server
            raise CommunicationError(str(error)) from error


@contextlib.contextmanager
def _written(data: bytes, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=_folder().name) as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """One folder for this process, in memory if it can be: tests watch which names come and go there."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (
        plan, manifest, timeline, clocks, metrics, run, configuration, cluster, values, workload, channel
    )
}  # fmt: skip
"""All targets by name; their corpora are the folders of these names in `corpus/`."""


def survives(target: str, data: bytes) -> None:
    """Run a target; errors of Shoal are refusals, and any other exception fails."""
    with contextlib.suppress(ShoalError):
        TARGETS[target](data)

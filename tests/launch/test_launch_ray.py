"""`shoal launch ray` on a real Ray cluster of this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launch_stand_ins import Program, shoal, steps_made

from shoal.checkpoint import checkpoints
from shoal.launch.submit import EXIT_STOPPED
from shoal.spec.run import Run

pytest.importorskip("ray")
pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent.parent
ENDLESS = ("--set", "steps=1000000", "--set", "validation.every=0", "--set", "checkpoint.every=5")
STORE = 100 << 20  # bytes of a node's object store: nothing is put there


@pytest.fixture(scope="module")
def address():
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    os.environ.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(**node)
        yield cluster.address
    finally:
        cluster.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def actors():
    """The processes of the agents' actors, the oldest first."""
    found = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if read(path).startswith(b"ray::_AgentActor")
    ]
    return sorted(found)


def read(path):
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def test_ranks_are_on_nodes_of_their_own_and_a_lost_actor_is_started_again(address, tiny_run, tmp_path):
    words = ["--address", address, "--nodes", "2", "--nproc", "1", "--", "train", *tiny_run, *ENDLESS]
    program = Program(shoal("launch", "ray", *words, "--run", "run"), tmp_path, {"PYTHONPATH": str(ROOT)})
    run = Run(tmp_path / "run")
    try:
        program.wait_until(lambda: len(checkpoints(run.checkpoints)) > 0)
        assert "on 2 cpu ranks" in program.stderr
        before = actors()
        assert len(before) == 2
        os.kill(before[-1], signal.SIGKILL)
        program.wait_until(lambda: "goes on from" in program.stderr)
        assert "was lost: its actor is gone" in program.stderr
        made = steps_made(run.path)
        program.wait_until(lambda: steps_made(run.path) > made + 3)
        program.signal(signal.SIGINT)
        assert program.end() == EXIT_STOPPED
    finally:
        program.kill()


def test_an_address_without_a_cluster_is_told(tmp_path):
    program = Program(shoal("launch", "ray", "--address", "127.0.0.1:1", "--", "train"), tmp_path)
    try:
        assert program.end() == 2
        assert "there is no Ray cluster at 127.0.0.1:1" in program.stderr
        assert "Traceback" not in program.stderr
    finally:
        program.kill()

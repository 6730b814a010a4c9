"""Where the machine has no address but ::1: what listens on loopback runs there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.spec.run import Run

SETUP = 'ip link set lo up && ip address delete 127.0.0.1/8 dev lo && exec "$@"'
TRIAL = subprocess.run(["unshare", "-n", "sh", "-c", SETUP, "sh", "true"], capture_output=True, check=False)
pytestmark = pytest.mark.skipif(TRIAL.returncode != 0, reason="no network namespace can be made here")

LIMIT = 400  # seconds

SERVES = """
from torch._C._distributed_c10d import TCPStore
from shoal.launch.hosts.agent import own_address
from shoal.launch.local.launcher import open_store
from shoal.listener import listen, loopback
from shoal.record.destinations.opening import PrometheusLogger, parse_address
assert loopback() == own_address() == "::1"
for address in ("", "::1"):
    store = open_store(address, 0)
    store.set("key", "value")
    assert TCPStore("::1", store.port, is_master=False).get("key") == b"value"
PrometheusLogger("run", parse_address("0")).close()
listen("", 0).close()
"""


def only_ipv6(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Python in a network namespace of its own."""
    return subprocess.run(
        ["unshare", "-n", "sh", "-c", SETUP, "sh", sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--nproc", "1:2"),
        ("--plan", "dp=2,exchange=server,servers=2,mirror=1"),
        ("--nodes", "1", "--nproc", "2", "--rendezvous", "[::1]:29511"),
    ],
    ids=["elastic", "servers", "nodes"],
)
def test_a_training_on_one_machine(words: tuple[str, ...], tmp_path: Path, tiny_run: list[str]) -> None:
    ended = only_ipv6(
        *("-m", "shoal", "train", *tiny_run, "--set", "steps=3", "--run", "one", *words),
        folder=tmp_path,
        SHOAL_TOKEN_FILE=str(tmp_path / "token"),
    )
    assert ended.returncode == 0, ended.stderr
    losses = [each["loss"] for each in Run.open(tmp_path / "one").metrics() if "loss" in each]
    assert len(losses) >= 3


def test_stores_of_agents_and_the_endpoint_for_prometheus(tmp_path: Path) -> None:
    ended = only_ipv6("-c", SERVES, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr

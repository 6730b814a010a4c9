"""Hosts that only WireGuard joins, as `docs/guides/encrypt.md` sets it up."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_stand_ins import Cluster, trained_on_one_host

from shoal.testing.hosts import Hosts, why_no_hosts

MISSING = [each for each in ("wg", "wireguard-go", "nft") if shutil.which(each) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts"),
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed"),
]
TUNNEL = ("10.99.0.1", "10.99.0.2")
PORT = 51820
ONLY_THE_TUNNEL = f"""
table inet only_the_tunnel {{
  chain received {{
    type filter hook input priority 0; policy accept;
    iifname "eth0" udp dport {PORT} counter accept
    iifname "eth0" counter drop
  }}
}}
"""


def output(*words: str, given: str | None = None) -> str:
    return subprocess.run(words, input=given, capture_output=True, text=True, check=True).stdout


def entering(network: Hosts, index: int) -> tuple[str, ...]:
    """The words before a command that runs on a host."""
    return "nsenter", f"--net=/proc/{network.process(index)}/ns/net"


@contextlib.contextmanager
def tunnel(network: Hosts, folder: Path) -> Iterator[None]:
    """Join two hosts by WireGuard, and let nothing else in."""
    keys = [output("wg", "genkey") for _ in TUNNEL]
    with contextlib.ExitStack() as stack:
        for index, (key, address) in enumerate(zip(keys, TUNNEL, strict=True)):
            private, other, entered = folder / f"private-{index}", 1 - index, entering(network, index)
            private.touch(mode=0o600)
            private.write_text(key)
            device = f"shoal-test-{index}"  # its control socket is shared by all namespaces
            process = subprocess.Popen(
                [*entered, "wireguard-go", "--foreground", device],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            until = time.monotonic() + 120
            while device not in output(*entered, "ip", "link"):
                assert time.monotonic() < until
                time.sleep(0.05)
            own = ["listen-port", str(PORT), "private-key", str(private)]
            peer = [
                "peer",
                output("wg", "pubkey", given=keys[other]).strip(),
                "allowed-ips",
                f"{TUNNEL[other]}/32",
            ]
            peer += ["endpoint", f"{network.addresses[other]}:{PORT}"]
            output(*entered, "wg", "set", device, *own, *peer)
            output(*entered, "ip", "address", "add", f"{address}/24", "dev", device)
            output(*entered, "ip", "link", "set", device, "up")
            output(*entered, "nft", "-f", "-", given=ONLY_THE_TUNNEL)
        yield


@pytest.mark.parametrize("plan", ["shard=zero3", "pp=2"])
def test_hosts_train_through_a_tunnel_alone(programs, tmp_path, tiny_run, plan):
    expected = trained_on_one_host(programs, tmp_path / "alone", tiny_run, 2)
    with (
        Hosts(2) as network,
        tunnel(network, tmp_path),
        Cluster(programs, tmp_path, tiny_run, "2", "--plan", plan) as cluster,
    ):
        at = f"{TUNNEL[0]}:29800"
        for index in range(2):
            host = cluster.start(at, NAMESPACE=str(network.process(index)))
            if index == 0:
                host.wait_for("this host leads")
        assert [each.end() for each in cluster.hosts] == [0, 0], cluster.told
        assert cluster.losses == pytest.approx(expected, rel=1e-4), cluster.told
        for index in range(2):
            rules = output(*entering(network, index), "nft", "list", "ruleset")
            accepted = next(line for line in rules.splitlines() if "accept" in line and "counter" in line)
            assert int(accepted.split("packets")[1].split()[0]) > 100, rules

"""Channels between launchers: who has the token gets in, and what goes through the gate arrives."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time

import pytest
from torch._C._distributed_c10d import TCPStore

from shoal.channel import ChannelRefusedError, dial
from shoal.errors import CheckpointError, ConfigError
from shoal.launch.hosts import Meeting, Peer, find_token, follow, read_token
from shoal.launch.hosts.gate import LAUNCHER, Gate, Pump, StoreDoor, store_service
from shoal.launch.hosts.memory_files import files_service
from shoal.launch.local.launcher import store_on_loopback

TOKEN = b"a token of some length"


@pytest.fixture
def gate(tmp_path):
    opened = []

    def open_gate(services):
        opened.append(Gate(socket.create_server(("127.0.0.1", 0)), TOKEN, services))
        return "127.0.0.1", opened[-1].port

    yield open_gate
    for each in opened:
        each.close()


def test_who_has_another_token_is_refused_and_learns_nothing(gate):
    served = []
    address = gate({"a kind": lambda link, asked: served.append(asked)})
    with pytest.raises(ChannelRefusedError):
        dial(address, b"another token of some length", LAUNCHER)
    with socket.create_connection(address) as stranger:  # it gets a nonce, and then nothing
        assert len(stranger.recv(1000)) == 32
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    dial(address, TOKEN, LAUNCHER).send({"kind": "a kind"})
    until = time.monotonic() + 120
    while not served and time.monotonic() < until:
        time.sleep(0.01)
    assert served == [{"kind": "a kind"}]


def test_ranks_of_another_host_use_the_store_until_their_session_ends(gate):
    with store_on_loopback() as store:
        pump, sessions = Pump(), {"one"}
        address = gate({"store": store_service(store.port, pump, sessions.__contains__)})
        door = StoreDoor(address, TOKEN, "one")
        there = TCPStore("127.0.0.1", door.port, is_master=False, wait_for_workers=False)
        there.set("key", "value" * 100_000)
        assert store.get("key") == b"value" * 100_000
        sessions.clear()
        pump.end("one")
        until = time.monotonic() + 120
        while _has(there, "key") and time.monotonic() < until:
            time.sleep(0.01)
        assert not _has(there, "key")
        with socket.create_connection(("127.0.0.1", door.port), timeout=120) as again:
            again.sendall(b"x")
            assert not again.recv(1), "it is refused"
        door.close()
        pump.close()


def test_a_connection_made_after_the_end_is_closed_and_writes_to_no_other_file(tmp_path):
    pump = Pump()
    pump.close()
    others = [(tmp_path / str(number)).open("wb") for number in range(8)]  # take the pump's old descriptors
    one, there = socket.socketpair()
    another, beyond = socket.socketpair()
    pump.add(one, another)
    pump.end("nobody")
    pump.close()
    with there, beyond:
        assert not there.recv(1)
        assert not beyond.recv(1)
    for other in others:
        other.close()
    assert not any(path.stat().st_size for path in tmp_path.iterdir())


def test_files_of_checkpoints_are_sent_and_no_others(gate, tmp_path):
    checkpoint, content = tmp_path / "memory" / "step-00000010", bytes(range(256)) * 20_000
    checkpoint.mkdir(parents=True)
    (checkpoint / "rank-00003.safetensors").write_bytes(content)
    (checkpoint / "empty.json").write_bytes(b"")
    (tmp_path / "secret.json").write_text("secret")
    address = gate({"files": files_service(tmp_path / "memory")})
    with Peer(address, TOKEN) as peer:
        found = peer.fetch("step-00000010/rank-00003.safetensors", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == content
        assert found == hashlib.sha256(content).hexdigest()
        assert peer.fetch("step-00000010/empty.json", tmp_path / "copy") == hashlib.sha256().hexdigest()
        for name in ("step-00000010/../../secret.json", "../secret.json", "/etc/passwd", "step-1/x.json"):
            with pytest.raises(CheckpointError):
                peer.fetch(name, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_the_token_is_made_once_and_must_be_its_owners_alone(tmp_path):
    given = {"SHOAL_TOKEN_FILE": str(tmp_path / "of us" / "token")}
    path = find_token(given, makes=False)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(path)
    assert find_token(given, makes=True) == path
    assert find_token(given, makes=True) == path == find_token(given, makes=False)
    assert len(read_token(path)) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        find_token(given, makes=False)


def _has(store, key):
    try:
        return store.check([key])
    except RuntimeError:  # the connection has ended
        return False


def test_a_host_with_another_token_does_not_follow(gate, tmp_path):
    (tmp_path / "token").write_text("another token of some length")
    (tmp_path / "token").chmod(0o600)
    address = gate({})
    meeting = Meeting(address=address, least=1, most=2, ranks=1, token=tmp_path / "token")
    with pytest.raises(
        ConfigError, match=f"127.0.0.1:{address[1]} has another token than this host: this host.s is in "
    ):
        follow(meeting, "nothing", {}, memory=None, nursery=None)

"""Holds each listener under a thousand connections of strangers, and keeps a line of each.

For some seconds strangers connect, and connect again as soon as they are sent away:

    silent    they send nothing
    dripping  a byte each second
    hostile   at once what looks like the beginning of a right client's bytes

Meanwhile a right client connects again and again. Lines are appended to docs/reference/doors.jsonl, from
which docs/generate.py makes the table of a page: `python tests/doors.py --seconds 60`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import resource
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from repeat import git
from torch._C._distributed_c10d import TCPStore

from shoal.channel import dial
from shoal.launch.hosts.gate import LAUNCHER
from shoal.parallel.exchange.server.protocol import SERVER

ROOT = Path(__file__).resolve().parent.parent
LINES = ROOT / "docs" / "reference" / "doors.jsonl"
TOKEN = "a token of some length"
ATTACKS = ("silent", "dripping", "hostile")
PAUSE = 0.2  # seconds between two right clients
PATIENCE = 60.0  # seconds for a right client

GREETING = b"shoal/n1" + bytes(32) + struct.pack("<6i", 0, 0, 4096, 0, 64, 1000)
"""To an aggregator: of one of 4096 hosts, which others have to come to."""

GATE = f"""
from shoal.launch.hosts.gate import Gate, StoreDoor, store_service
from shoal.launch.local.launcher import store_on_loopback
from shoal.launch.hosts.gate import Pump
from shoal.listener import listen
token = {TOKEN!r}.encode()
"""
LEADER = f"""
import sys
{GATE}
with store_on_loopback() as store:
    pump = Pump()
    gate = Gate(listen("127.0.0.1", 0), token, {{"store": store_service(store.port, pump, lambda _: True)}})
    print(gate.port, flush=True)
    sys.stdin.read()
"""
"""What the host that leads runs, in another process than the door of a host that follows."""
PROGRAMS = {
    "gate of a launcher": GATE
    + """
gate = Gate(listen("127.0.0.1", 0), token, {"ask": lambda link, asked: link.close()})
print(gate.port, flush=True)
""",
    "way to the store": GATE
    + f"LEADER = {LEADER!r}"
    + """
import subprocess
leader = subprocess.Popen([sys.executable, "-c", LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
door = StoreDoor(("127.0.0.1", int(leader.stdout.readline())), token, "session")
print(door.port, flush=True)
""",
    "parameter server": f"""
import threading
from shoal.parallel.exchange.server import Server
server = Server(0, {TOKEN!r})
threading.Thread(target=server.run, daemon=True).start()
print(server.address[1], flush=True)
""",
    "aggregator": """
from shoal.collectives import Aggregator
aggregator = Aggregator("127.0.0.1:0")
print(aggregator.address.rpartition(":")[2], flush=True)
""",
    "Prometheus": """
from shoal.record.destinations.opening import PrometheusLogger
logger = PrometheusLogger("run", ("127.0.0.1", 0))
print(logger.port, flush=True)
""",
    "pages": f"""
import os, tempfile, threading
from pathlib import Path
from shoal.web import serve
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
with tempfile.TemporaryDirectory() as folder:
    told = lambda address: print(address.partition("?")[0].strip("/").rpartition(":")[2], flush=True)
    serve(Path(folder), token={TOKEN.replace(" ", "-")!r}, say=told)
""",
}
"""By listener: a program that prints its port. It ends with its input."""


def _greet(port: int) -> None:
    greeting = b"shoal/n1" + os.urandom(32) + struct.pack("<6i", 0, 0, 2, -1, 1, 60_000)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connected:
        connected.sendall(greeting)
        assert connected.recv(8, socket.MSG_WAITALL) == b"shoal/n1"


def _enter(port: int, purpose: bytes) -> None:
    dial(("127.0.0.1", port), TOKEN.encode(), purpose, PATIENCE).close()


def _read(port: int, path: str) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN.replace(' ', '-')}"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=bearer)
    with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
        assert answer.status == 200


def _use_store(port: int) -> None:
    TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("key", "value")


@dataclass(frozen=True)
class Client:
    """A right client, and what the hostile ones send that look like it."""

    enter: Callable[[int], object]
    likeness: bytes


HELLO = b"shoal/2\n" + bytes(88)
HTTP = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
CLIENTS = {
    "gate of a launcher": Client(lambda port: _enter(port, LAUNCHER), HELLO),
    "way to the store": Client(_use_store, bytes(64)),
    "parameter server": Client(lambda port: _enter(port, SERVER), HELLO),
    "aggregator": Client(_greet, GREETING),
    "Prometheus": Client(lambda port: _read(port, "/metrics"), HTTP),
    "pages": Client(lambda port: _read(port, "/plans"), HTTP),
}


def attack(port: int, how: str, number: int, likeness: bytes) -> None:
    """Keep so many connections, until this process is ended."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, number + 100), most))
    selector = selectors.DefaultSelector()
    held: set[socket.socket] = set()
    drips = time.monotonic()

    def leave(connected: socket.socket) -> None:
        selector.unregister(connected)
        held.discard(connected)
        connected.close()

    def come() -> None:
        connected = socket.socket()
        connected.setblocking(False)
        connected.connect_ex(("127.0.0.1", port))
        selector.register(connected, selectors.EVENT_READ | selectors.EVENT_WRITE)
        held.add(connected)

    for _ in range(number):
        come()
    print("they come", flush=True)
    while True:
        while len(held) < number:
            come()
        for key, events in selector.select(0.05):
            assert isinstance(key.fileobj, socket.socket)
            try:
                if events & selectors.EVENT_WRITE:
                    selector.modify(key.fileobj, selectors.EVENT_READ)
                    if how == "hostile":
                        if likeness[:8] == GREETING[:8]:  # each of another session
                            likeness = likeness[:8] + os.urandom(32) + likeness[40:]
                        key.fileobj.send(likeness)
                if events & selectors.EVENT_READ and not key.fileobj.recv(1 << 16):
                    leave(key.fileobj)
            except OSError:
                leave(key.fileobj)
        if how == "dripping" and time.monotonic() > drips:
            drips = time.monotonic() + 1
            for connected in list(held):
                with contextlib.suppress(OSError):
                    connected.send(b"x")
        time.sleep(0.01)


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A program of Python, which is ended after the context."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w") as said:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=environment,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def used(pid: int) -> tuple[int, float, int]:
    """Threads, MiB of memory and descriptors of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    numbers = {name: int(found) for name, found in re.findall(r"^(Threads|VmRSS):\s+(\d+)", status, re.M)}
    return numbers["Threads"], numbers["VmRSS"] / 1024, len(os.listdir(f"/proc/{pid}/fd"))


def hold(listener: str, how: str, number: int, seconds: float) -> dict[str, Any]:
    """Hold a listener under strangers, and return what it took and how right clients fared."""
    client = CLIENTS[listener]
    program = f"import sys\n{PROGRAMS[listener]}\nsys.stdin.read()\n"
    with running("-c", program) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        client.enter(port)
        before = most = used(server.pid)
        took, failed = [], 0
        with running(__file__, "--attack", listener, how, str(port), str(number)) as strangers:
            assert strangers.stdout is not None
            assert strangers.stdout.readline() == "they come\n"
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                began = time.monotonic()
                try:
                    client.enter(port)
                    took.append(time.monotonic() - began)
                except (OSError, RuntimeError):
                    failed += 1
                most = tuple(map(max, most, used(server.pid)))  # type: ignore[assignment]
                time.sleep(PAUSE)
    return {
        "listener": listener,
        "strangers": how,
        "number": number,
        "seconds": seconds,
        "threads": [before[0], most[0]],
        "mib": [round(before[1]), round(most[1])],
        "descriptors": [before[2], most[2]],
        "served": len(took),
        "failed": failed,
        "slowest": round(max(took, default=0.0), 2),
    }


def main() -> int:
    """Hold each listener under each kind of strangers; return 1 if a right client was not served."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--number", type=int, default=1000, help="strangers at a time")
    parser.add_argument("--listener", action="append", choices=PROGRAMS, help="by default all")
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack is not None:
        listener, how, port, number = arguments.attack
        attack(int(port), how, int(number), CLIENTS[listener].likeness)
    is_green = True
    for listener in arguments.listener or PROGRAMS:
        for how in ATTACKS:
            found = hold(listener, how, arguments.number, arguments.seconds)
            changed = "+" if git("status", "--porcelain") else ""
            about = {
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
                "commit": git("rev-parse", "--short=8", "HEAD") + changed,
                "machine": f"{os.cpu_count()} cores, torch {torch.__version__}",
            }
            print(json.dumps(found), flush=True)
            with LINES.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**about, **found}) + "\n")
            is_green &= not found["failed"]
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())

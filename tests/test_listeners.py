"""Every listener stands in SECURITY.md, and a training on one machine listens on loopback alone."""

from __future__ import annotations

import ast
import ipaddress
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parents[1]


def listening(path: Path) -> Iterator[str]:
    """The calls in a Python file that open a port."""
    text = path.read_text(encoding="utf-8")
    has_sockets = re.search(r"^(import|from) socket\b", text, re.M)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        named = {each.arg: ast.unparse(each.value) for each in node.keywords}
        is_server = name in {"create_server", "start_server", "create_datagram_endpoint"} or name.endswith(
            ("HTTPServer", "TCPServer", "UDPServer", "WSGIServer")
        )
        is_bound = has_sockets and name in {"bind", "listen"}
        is_store = name == "TCPStore" and named.get("is_master") != "False"
        # Without a store of its own, torch's init_process_group lets rank 0 serve one on every interface.
        is_group = name == "init_process_group" and not {"store", "init_method"} & set(named)
        if is_server or is_bound or is_store or is_group:
            yield ast.unparse(node)


def test_security_md_lists_the_files_that_open_ports() -> None:
    found = {
        str(path.relative_to(ROOT)) for path in (ROOT / "shoal").rglob("*.py") if any(listening(path))
    } | {
        str(path.relative_to(ROOT))
        for path in (ROOT / "csrc").rglob("*.cc")
        if "tests" not in path.parts and re.search(r"\b(bind|listen)\(\w+\.number", path.read_text())
    }
    ports = (ROOT / "SECURITY.md").read_text().partition("## Ports")[2].partition("\n## ")[0]
    assert found == set(re.findall(r"`((?:shoal|csrc)/[\w/]+\.(?:py|cc))`", ports))


SAMPLES = {
    "from socket import socket\nsocket().bind(('', 0))": 1,
    "import socket\nsocket.create_server(('', 0))": 1,
    "from http.server import ThreadingHTTPServer as T, HTTPServer\nHTTPServer(('', 0), None)": 1,
    "TCPStore('h', 1, is_master=True)": 1,
    "TCPStore('h', 1, is_master=False)": 0,
    "dist.init_process_group('gloo')": 1,
    "dist.init_process_group('gloo', store=store)": 0,
    "inspect.signature(f).bind(1)": 0,
}


@pytest.mark.parametrize("code", SAMPLES)
def test_the_search_knows_what_opens_a_port(code: str, tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(code)
    assert len(list(listening(path))) == SAMPLES[code]


def open_ports(pids: set[str]) -> set[tuple[str, str]]:
    """Addresses and ports where processes listen or wait for packets, of TCP and UDP."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(link))
            except OSError:
                continue  # closed by now
    found = set()
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and f"socket:[{fields[9]}]" in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                turned = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add((str(ipaddress.ip_address(turned)), fields[1].rpartition(":")[2]))
    return found


def with_children(pid: str) -> set[str]:
    """A process and all below it."""
    try:
        below = [
            child
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return set()
    return {pid}.union(*map(with_children, below))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_training_on_one_machine_listens_on_loopback_alone(tmp_path: Path) -> None:
    plan = "dp=2,exchange=server,servers=1"
    settings = ("steps=4", "batch=4", "sequence=16", "record.prometheus=0", "data.source=" + __file__)
    command = [sys.executable, "-m", "shoal", "train", "--plan", plan, "--run", str(tmp_path / "run")]
    for setting in settings:
        command += ["--set", setting]
    found: set[tuple[str, str]] = set()
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as train:
        while train.poll() is None:
            found |= open_ports(with_children(str(train.pid)))
            time.sleep(0.1)
        assert train.stderr is not None
        assert train.returncode == 0, train.stderr.read()
    assert len(found) > 2  # the store, the server, Prometheus
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in found), found

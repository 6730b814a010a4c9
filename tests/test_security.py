"""Listeners stand in SECURITY.md; a training listens on loopback alone, and tells nobody its secrets."""

from __future__ import annotations

import ast
import ipaddress
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parents[1]


def listening(path: Path) -> Iterator[str]:
    """The calls in a Python file that open a port."""
    text = path.read_text(encoding="utf-8")
    has_sockets = re.search(r"^(import|from) (socket|shoal\.listener)\b", text, re.M)
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


SECRETS = {name: f"secret-{name}" for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")} | {
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret-OTEL"
}


@dataclass(frozen=True)
class Trained:
    """A training that ended, and what could be seen of it meanwhile."""

    run: Path
    told: str
    ports: set[tuple[str, str]]
    arguments: set[bytes]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two workers, a parameter server and an endpoint for Prometheus, with secrets in the environment."""
    run = tmp_path_factory.mktemp("secure") / "run"
    plan = "dp=2,exchange=server,servers=1"
    settings = ("steps=4", "batch=4", "sequence=16", "record.prometheus=0", "data.source=" + __file__)
    command = [sys.executable, "-m", "shoal", "train", "--plan", plan, "--run", str(run)]
    for setting in settings:
        command += ["--set", setting]
    ports: set[tuple[str, str]] = set()
    arguments: set[bytes] = set()
    with (run.parent / "told").open("w+") as told:
        environment = {**os.environ, **SECRETS, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=told, stderr=told, env=environment) as train:
            while train.poll() is None:
                pids = with_children(str(train.pid))
                ports |= open_ports(pids)
                arguments |= set(map(arguments_of, pids))
                time.sleep(0.1)
        told.seek(0)
        text = told.read()
    assert train.returncode == 0, text
    return Trained(run, text, ports, arguments)


def arguments_of(pid: str) -> bytes:
    """The arguments of a process, which every user of its host may read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_training_on_one_machine_listens_on_loopback_alone(trained: Trained) -> None:
    assert len(trained.ports) > 2  # the store, the server, Prometheus
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in trained.ports), trained.ports


def test_secrets_are_in_no_arguments_output_or_file_that_others_can_read(trained: Trained) -> None:
    token = json.loads((trained.run / "servers.json").read_text())["token"]
    assert len(token) >= 32
    hidden = [*SECRETS.values(), "secret-OTEL", token]
    assert stat.S_IMODE(trained.run.stat().st_mode) == 0o700
    assert stat.S_IMODE((trained.run / "servers.json").stat().st_mode) == 0o600
    files = {path: path.read_bytes() for path in trained.run.rglob("*") if path.is_file()}
    assert {path.name for path in files} > {"run.json", "metrics.jsonl", "servers.json"}
    for secret in hidden:
        assert [path.name for path, content in files.items() if secret.encode() in content] == [
            "servers.json"
        ] * (secret == token)
        assert secret not in trained.told
        assert not any(secret.encode() in words for words in trained.arguments)

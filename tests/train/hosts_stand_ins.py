"""Runs on several hosts: each host is a `shoal train --nodes` of its own, on loopback or in a namespace."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from program_stand_ins import Programs

from shoal.spec.run import Run

STEPS, FAULT, HOLD = 12, 6, 9
DEADLINE = 400.0

# The schedule is called at the beginning of each step, on every rank. A fault waits for the file "go". With
# HOLD, a later step waits for that text in the run's list of members, such as '"came"'.
FAULTS = f"""
import os, signal, sys, threading, time
from pathlib import Path

def wait_for(condition):
    until = time.monotonic() + 200
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)

def members():
    try:
        return Path("one/members.jsonl").read_text()
    except OSError:
        return ""

def parent_of(process):
    lines = Path(f"/proc/{{process}}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("PPid:")))

def print_without_end():
    while True:
        print("all work and no play", flush=True)

def begin(step, steps):
    print("step", step, "begins", flush=True)
    member, is_first = os.environ.get("SHOAL_MEMBER"), os.environ.get("SHOAL_AFTER") == "-1"
    fault = os.environ.get("FAULT", "")
    if step == {FAULT} and is_first and fault and member == os.environ.get("WHO"):
        Path("faulty").touch()
        wait_for(Path("go").exists)
        launcher = parent_of(int(os.environ["SHOAL_LAUNCHER"]))  # that is the nursery
        if fault == "kill host":
            os.kill(launcher, signal.SIGKILL)
            time.sleep(60)
        if fault == "stop host":
            os.kill(launcher, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "leave host":
            os.kill(launcher, signal.SIGTERM)
            time.sleep(0.5)
        if fault == "print and fail":
            threading.Thread(target=print_without_end, daemon=True).start()
    if step == {HOLD} and member == os.environ.get("WHO") and fault == "print and fail":
        raise ValueError("enough is said")
    if step == {FAULT} and is_first and member == os.environ.get("WHO"):
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if step == {HOLD} and os.environ.get("HOLD"):
        Path("held").touch()
        wait_for(lambda: os.environ["HOLD"] in members())
        time.sleep(0.5)  # what follows from it, such as a signal, may be on its way
    return 1.0
"""
IN_NAMESPACE = """
import os, sys
from shoal.testing.hosts import enter_host
enter_host(int(os.environ["NAMESPACE"]))
from shoal.cli.main import main
sys.exit(main())
"""


class OneHost:
    """A launcher, as if it were on a host of its own; in a namespace if the environment names one."""

    def __init__(
        self, programs: Programs, folder: Path, name: str, words: list[str], environment: dict[str, str]
    ) -> None:
        self.name = name
        self._out = folder / f"{name}.out"
        given = {**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_HOST_ID": name, **environment}
        program = environment.get("PROGRAM", "shoal.cli.main")
        module = "in_namespace_at_home" if "NAMESPACE" in environment else program
        with self._out.open("w") as out:
            outputs = out.fileno(), out.fileno()
            self.process = programs.start(module, ["train", *words], given, outputs, folder)

    @property
    def told(self) -> str:
        return self._out.read_text()

    def wait_for(self, text: str) -> None:
        until = time.monotonic() + DEADLINE
        while text not in self.told:
            assert time.monotonic() < until, self.told
            assert self.process.poll() is None, self.told
            time.sleep(0.05)

    def end(self) -> int:
        until = time.monotonic() + DEADLINE
        while (code := self.process.poll()) is None:
            assert time.monotonic() < until, self.told
            time.sleep(0.02)
        return code


class Cluster:
    """Hosts of one run; the first leads. A context manager that ends all of them."""

    def __init__(
        self, programs: Programs, folder: Path, tiny_run: list[str], nodes: str, *words: str, ranks: int = 1
    ) -> None:
        (folder / "faults_at_home.py").write_text(FAULTS)
        (folder / "in_namespace_at_home.py").write_text(IN_NAMESPACE)
        self.folder, self._programs = folder, programs
        own = ["--set", f"steps={STEPS}", "--set", "optimizer.schedule=faults_at_home:begin", "--run", "one"]
        self._words = [*tiny_run, *own, "--nodes", nodes, "--nproc", str(ranks), *words]
        self.hosts: list[OneHost] = []

    def start(self, at: str, *words: str, fault: str = "", who: str = "", **environment: str) -> OneHost:
        """Start a host that meets the others at an address."""
        name = f"host-{len(self.hosts)}"
        given = {"FAULT": fault, "WHO": who, "SHOAL_TOKEN_FILE": str(self.folder / "token"), **environment}
        host = OneHost(self._programs, self.folder, name, [*self._words, *words, "--rendezvous", at], given)
        self.hosts.append(host)
        return host

    def wait_for(self, name: str) -> None:
        """Wait for a file in the folder."""
        until = time.monotonic() + DEADLINE
        while not (self.folder / name).exists():
            assert time.monotonic() < until, self.told
            assert any(host.process.poll() is None for host in self.hosts), self.told
            time.sleep(0.02)

    def go(self) -> None:
        """Let faults happen."""
        (self.folder / "go").touch()

    @property
    def members(self) -> str:
        """The run's list of members that were lost, left and came."""
        return self.run.members_file.read_text()

    @property
    def run(self) -> Run:
        return Run.open(self.folder / "one")

    @property
    def losses(self) -> dict[int, float]:
        return {each["step"]: each["loss"] for each in self.run.metrics() if "loss" in each}

    @property
    def told(self) -> str:
        return "\n".join(f"--- {host.name}\n{host.told}" for host in self.hosts)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            if host.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(host.process.pid, signal.SIGCONT)
                    os.killpg(host.process.pid, signal.SIGKILL)
            host.process.wait()


def trained_on_one_host(
    programs: Programs, folder: Path, tiny_run: list[str], ranks: int, *words: str
) -> dict[int, float]:
    """The losses of the same run without hosts and without faults."""
    folder.mkdir(exist_ok=True)
    (folder / "faults_at_home.py").write_text(FAULTS)
    own = ["--set", f"steps={STEPS}", "--set", "optimizer.schedule=faults_at_home:begin", "--run", "one"]
    ended = programs.run(["train", *tiny_run, *own, "--nproc", str(ranks), *words], folder, seconds=DEADLINE)
    assert ended.returncode == 0, ended.stderr
    return {each["step"]: each["loss"] for each in Run.open(folder / "one").metrics() if "loss" in each}

"""Kills, cuts off, stops and misleads one of three hosts that train together: `python tests/lost_hosts.py`.

Each host is a `shoal train --nodes` with one rank, in a network namespace of its own (shoal.testing.hosts),
with its own host name, boot id and clock; all see the same directory unless the case says otherwise. The
first host started leads. Some steps into the training the case happens; some cases end once the others have
gone on. A line of each is kept in docs/reference/lost-hosts.jsonl, from which docs/generate.py makes the
table of a page: what a host said first from then on, and when, and what became of the training.

Takes root on Linux, and `cc`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from repeat import ROOT, git
from stops import family, read

from shoal.errors import ShoalError
from shoal.spec.run import Run
from shoal.testing.hosts import Hosts

LINES = ROOT / "docs" / "reference" / "lost-hosts.jsonl"
MARK, PORT, PATIENCE = "SHOAL_TEST_MARK", 29800, 240.0
STEPS, BEFORE, MORE = 120, 10, 10
NAMES = ("one", "two", "three")

CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long *offset;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    offset = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME && offset) now->tv_sec += *offset;
    return code;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
"""A library that moves a host's clock by as many seconds as a file says."""

MODEL = """
import time
from pathlib import Path

from shoal.models import Transformer, TransformerConfig

def model():
    sizes = dict(layers=1, hidden=HIDDEN, heads=2, kv_heads=1, ffn=64, seq=64)
    made = Transformer(TransformerConfig(vocab_size=400, **sizes))
    made.register_forward_pre_hook(wait)
    return made

def wait(*_):
    time.sleep(0.05)
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.05)
"""

OLDER = """
import sys
import shoal.launch.hosts.follower
sys.modules["shoal.launch.hosts.follower"].release = lambda: "0.0.9"
from shoal.cli.main import main
sys.exit(main())
"""


class Computer:
    """A host, and the command that trains on it."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster, self.index, self.mark = cluster, index, uuid.uuid4().hex
        self.lines: list[tuple[float, str]] = []
        folder = cluster.folder / f"host-{index}"
        folder.mkdir()
        self.boot, self.offset = folder / "boot", folder / "offset"
        self.boot.write_text(f"{uuid.uuid4()}\n")
        self.offset.write_bytes(bytes(8))
        self.process: subprocess.Popen[str] | None = None
        self.began = 0.0

    def start(self, *words: str, program: Sequence[str] = ("-m", "shoal"), own_folder: bool = False) -> None:
        """Start the command; `own_folder` puts a directory of the host in the place of the run's."""
        cluster = self.cluster
        inside = f"mount --bind {self.boot} /proc/sys/kernel/random/boot_id; hostname {NAMES[self.index]}; "
        inside += f"mount -t tmpfs none {cluster.runs}; " * own_folder
        network = f"--net=/proc/{cluster.network.process(self.index)}/ns/net"
        space = ["nsenter", network, "unshare", "--mount", "--uts", "sh", "-c", f'{inside} exec "$@"', "sh"]
        at = f"{cluster.network.addresses[0]}:{PORT}"
        given = [
            "--run",
            str(cluster.runs / "run"),
            "--nproc",
            "1",
            "--rendezvous",
            at,
            *cluster.words,
            *words,
        ]
        environment = {
            **os.environ,
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(cluster.folder), str(ROOT)]),
            "SHOAL_TOKEN_FILE": str(cluster.folder / "token"),
            "CLOCK_OFFSET": str(self.offset),
            "LD_PRELOAD": str(cluster.clock),
        }
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*space, sys.executable, *program, "train", *given],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def signal(self, number: int, whom: str) -> None:
        """Send a signal to the launcher, to the ranks, or to all processes of the host."""
        assert self.process is not None
        everyone = family(self.mark)
        whole = {"launcher": [self.process.pid], "all": everyone}
        for each in whole.get(whom) or [each for each in everyone if is_rank(each)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)

    def move_clock(self, seconds: int) -> None:
        """Move the clock of all its processes."""
        with self.offset.open("r+b") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))

    def wait_for(self, text: str) -> None:
        """Wait until it has said a text."""
        wait_until(lambda: any(text in line for _, line in self.lines), self.cluster)

    def code(self, until: float) -> int | None:
        """Return its exit code; None if it has not ended at a time."""
        assert self.process is not None
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def _listen(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))


class Cluster:
    """Three hosts, their network, and the directory that they share. A context manager."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.folder, self.runs, self.clock = folder, folder / "runs", folder / "clock.so"
        self.runs.mkdir()
        (folder / "clock.c").write_text(CLOCK)
        library = ["cc", "-shared", "-fPIC", "-o", str(self.clock), str(folder / "clock.c"), "-ldl"]
        subprocess.run(library, check=True)
        (folder / "lost_hosts_slow.py").write_text(MODEL.replace("HIDDEN", str(case.hidden)))
        (folder / "lost_hosts_older.py").write_text(OLDER)
        settings = ["batch=6", "sequence=64", f"steps={STEPS}", "device=cpu", "model=lost_hosts_slow:model"]
        settings += [
            "validation.samples=8",
            "validation.every=0",
            "checkpoint.every=50",
            f"timeout={case.timeout}",
        ]
        self.words = ["--nodes", case.nodes, "--plan", "shard=zero1", *case.words]
        self.words += [word for setting in settings for word in ("--set", setting)]
        self.network = Hosts(3)
        self.computers = [Computer(self, index) for index in range(3)]

    @property
    def run(self) -> Run:
        return Run(self.runs / "run")

    @property
    def steps(self) -> list[int]:
        """The steps of the metrics, as they were written."""
        try:
            return [values["step"] for values in self.run.metrics() if "loss" in values]
        except ShoalError:
            return []

    @property
    def ranks(self) -> int:
        """How many ranks train: those that began, and those that have come."""
        began = [re.search(r"on (\d+) cpu rank", line) for _, line in self.computers[0].lines]
        came = 0
        with contextlib.suppress(FileNotFoundError):
            lines = [json.loads(line) for line in self.run.members_file.read_text().splitlines()]
            came = sum(len(line["members"]) for line in lines if line["event"] == "came")
        return came + next((int(match[1]) for match in began if match), 0)

    def wait_for_steps(self, number: int) -> None:
        """Wait until so many steps are made."""
        wait_until(lambda: len(self.steps) >= number, self)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.computers:
            for process in family(each.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            boot = each.boot.read_text().partition("-")[0]
            for folder in Path("/dev/shm").glob(f"shoal-members-*-{boot}-*"):
                shutil.rmtree(folder, ignore_errors=True)
        self.network.close()


@dataclass(frozen=True, slots=True)
class Case:
    """What happens to the hosts.

    Attributes:
        does: For people.
        happens: Does it to a training of the hosts.
        says: What the first line that a host says from then on has to match; "" if none is to be said.
        codes: The right exit codes of the hosts: None for one that is not waited for.
        ends: Undoes it, once the others have made more steps, or after some seconds in which they have not.
        usual: Lines that are said in any case.
        steps: Whether all steps have to be made.
        first: How many hosts train before it happens.
        nodes, words, timeout, hidden: Of the training.
    """

    does: str
    happens: Callable[[Cluster], object]
    says: str
    codes: tuple[int | None, ...] = (0, 0, 0)
    ends: Callable[[Cluster], object] | None = None
    usual: str = "this host has ranks|hosts are there"
    steps: bool = True
    first: int = 3
    nodes: str = "1:3"
    words: tuple[str, ...] = ()
    timeout: int = 10
    hidden: int = 32


def signalled(index: int, number: int, whom: str) -> Callable[[Cluster], object]:
    """Return what sends a signal to a host."""
    return lambda cluster: cluster.computers[index].signal(number, whom)


def joined(index: int, *words: str, **how: Any) -> Callable[[Cluster], object]:
    """Return what starts one more host."""
    return lambda cluster: cluster.computers[index].start(*words, **how)


def joined_for_another_run(cluster: Cluster) -> None:
    """Start a host for another run."""
    cluster.computers[2].start("--run", str(cluster.runs / "two"))


def other_token(cluster: Cluster) -> None:
    """Start a host with another token."""
    (cluster.folder / "other").write_text("another token that is as long as a right one has to be\n")
    (cluster.folder / "other").chmod(0o600)
    cluster.computers[2].start(program=("-c", OTHER_TOKEN.format(str(cluster.folder / "other"))))


OTHER_TOKEN = """
import os, sys
os.environ["SHOAL_TOKEN_FILE"] = {!r}
from shoal.cli.main import main
sys.exit(main())
"""


def drain(cluster: Cluster) -> None:
    """Drain the rank of the last host, by the command."""
    command = [sys.executable, "-m", "shoal", "drain", str(cluster.run.path), "2"]
    subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr)


KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
ENDED, GONE = r"host 10\.77\.0\.2 \(two\) ended", "launcher of the host that leads has ended"
AGAIN = joined(0, "--resume", "auto")
UNTIL = ", until the others have gone on"
FIXED: dict[str, Any] = {"first": 2, "nodes": "3"}
CASES = {
    "kill a launcher": Case(
        "SIGKILL to the launcher of a follower", signalled(1, KILL, "launcher"), ENDED, (0, -9, 0)
    ),
    "kill ranks": Case(
        "SIGKILL to the rank of a follower", signalled(1, KILL, "ranks"), "rank 1 failed .*killed by SIGKILL"
    ),
    "kill a host": Case(
        "SIGKILL to all processes of a follower", signalled(1, KILL, "all"), ENDED, (0, -9, 0)
    ),
    "kill the leader's launcher": Case(
        "SIGKILL to the launcher of the leader, which is started again after 30 s with `--resume auto`",
        signalled(0, KILL, "launcher"),
        GONE,
        ends=AGAIN,
    ),
    "kill the leader's ranks": Case(
        "SIGKILL to the rank of the leader", signalled(0, KILL, "ranks"), "rank 0 failed.*killed by SIGKILL"
    ),
    "kill the leader": Case(
        "SIGKILL to all processes of the leader, which is started again after 30 s with `--resume auto`",
        signalled(0, KILL, "all"),
        GONE,
        ends=AGAIN,
    ),
    "cut a follower": Case(
        f"nothing reaches or leaves a follower{UNTIL}",
        lambda cluster: cluster.network.cut(1),
        "silent for 15 s",
        ends=lambda cluster: cluster.network.heal(1),
    ),
    "cut the leader": Case(
        "nothing reaches or leaves the leader, for 30 s",
        lambda cluster: cluster.network.cut(0),
        "silent|cannot be reached",
        ends=lambda cluster: cluster.network.heal(0),
    ),
    "cut between followers": Case(
        "two followers cannot reach each other, and both reach the leader",
        lambda cluster: cluster.network.part(1, 2),
        "cannot reach each other",
        (0, 1, 0),
    ),
    "cut one way": Case(
        "a follower hears, and is not heard", lambda cluster: cluster.network.mute(1), "silent", (0, None, 0)
    ),
    "stop a follower": Case(
        f"SIGSTOP to all processes of a follower{UNTIL}",
        signalled(1, STOP, "all"),
        "silent|stopped",
        ends=signalled(1, CONT, "all"),
    ),
    "stop the leader": Case(
        "SIGSTOP to all processes of the leader, for 30 s",
        signalled(0, STOP, "all"),
        "silent|stopped",
        ends=signalled(0, CONT, "all"),
    ),
    "join late": Case(
        "a third host starts while two train", joined(2), "rank 2 is there|ranks 2 to 2", first=2, usual="^$"
    ),
    "drain": Case("`shoal drain RUN 2`", drain, "asks rank 2 to leave"),
    "clock ahead": Case(
        "the clock of a follower jumps an hour ahead",
        lambda cluster: cluster.computers[1].move_clock(3600),
        "",
    ),
    "clock back": Case(
        "the clock of the leader jumps an hour back",
        lambda cluster: cluster.computers[0].move_clock(-3600),
        "",
    ),
    "slow link": Case(
        "the link of a follower falls to 1 Mbit/s, and the model is larger",
        lambda cluster: cluster.network.limit(1, 1e6),
        "did not complete, though every rank came to it: if the link is slow, `timeout`",
        (1, 1, 1),
        hidden=1024,
        steps=False,
    ),
    "own folder": Case(
        "`--nodes 3`: the third host has another directory where the others have the run",
        joined(2, own_folder=True),
        "does not see|share",
        (2, 2, 2),
        steps=False,
        **FIXED,
    ),
    "other version": Case(
        "`--nodes 3`: the third host has another version of Shoal",
        joined(2, program=("-m", "lost_hosts_older")),
        "it has Shoal 0.0.9, and the host that leads has",
        (None, None, 2),
        steps=False,
        **FIXED,
    ),
    "other Plan": Case(
        "`--nodes 3`: the third host is given another Plan",
        joined(2, "--plan", "shard=zero3"),
        'it was given plan="shard=zero3", and the host that leads "shard=zero1"',
        (None, None, 2),
        steps=False,
        **FIXED,
    ),
    "other token": Case(
        "`--nodes 3`: the third host has another token",
        other_token,
        "token",
        (None, None, 2),
        steps=False,
        **FIXED,
    ),
    "other run": Case(
        "`--nodes 3`: the third host is given another run, and the address of this one",
        joined_for_another_run,
        "it was started for the run",
        (None, None, 2),
        steps=False,
        **FIXED,
    ),
}


def is_rank(process: int) -> bool:
    """Return whether a process is a rank, by the name that it gives itself."""
    return read(process, "comm").startswith("shoal-rank-")


def wait_until(condition: Callable[[], bool], cluster: Cluster, seconds: float = PATIENCE) -> None:
    """Wait for a condition, or until all commands have ended."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        started = [each.process for each in cluster.computers if each.process is not None]
        if all(process.poll() is not None for process in started):
            return
        time.sleep(0.05)


def is_notice(line: str) -> bool:
    """Return whether a line is none of the progress, the settings and the summary of a training."""
    return line.startswith("shoal: ") or "Warning" in line or "Traceback" in line


def become_of(name: str) -> dict[str, Any]:
    """Make a case; return what became of it."""
    case = CASES[name]
    with (
        tempfile.TemporaryDirectory(prefix="shoal-hosts-") as directory,
        Cluster(case, Path(directory)) as cluster,
    ):
        leader, *others = cluster.computers
        leader.start()
        leader.wait_for("this host leads")
        for number, each in enumerate(others[: case.first - 1], 2):
            each.start()
            leader.wait_for(f"{number} of 3 hosts")
        (cluster.folder / "go").touch()
        if case.nodes != "3":
            wait_until(lambda: cluster.ranks == case.first, cluster)
            cluster.wait_for_steps(len(cluster.steps) + BEFORE)
        before, began = len(cluster.steps), time.monotonic()
        case.happens(cluster)
        if case.ends is not None:
            wait_until(lambda: len(cluster.steps) >= before + MORE, cluster, 30.0)
            case.ends(cluster)
        until = began + PATIENCE
        codes = [None] * 3
        for index in sorted(range(3), key=lambda index: case.codes[index] is None):
            wait = until if case.codes[index] is not None else time.monotonic()
            codes[index] = cluster.computers[index].code(wait)
        seconds = time.monotonic() - began
        time.sleep(0.5)  # for their last lines
        told = [
            (round(when - began, 1), NAMES[each.index], line.replace(str(cluster.folder), ""))
            for each in cluster.computers
            for when, line in each.lines
            if when >= began and is_notice(line) and not re.search(case.usual, line)
        ]
        steps = cluster.steps
        everything = {NAMES[each.index]: each.lines for each in cluster.computers}
    print(name, json.dumps(everything, indent=1), file=sys.stderr, flush=True)
    after, who, first = min(told, default=(0.0, "", ""))
    return {
        "case": name,
        "does": case.does,
        "said": first,
        "by": who,
        "after": after,
        "seconds": round(seconds, 1),
        "codes": codes,
        "steps": len(set(steps)),
        "back": sum(later <= earlier for earlier, later in pairwise(steps)),
        "right": (bool(re.search(case.says, first)) if case.says else not first)
        and tuple(codes) == case.codes
        and (not case.steps or set(steps) == set(range(1, STEPS + 1))),
        "commit": git("rev-parse", "--short=8", "HEAD"),
    }


def main() -> int:
    """Make the cases; return 1 if one is not as it has to be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--lines", type=Path, default=LINES, help="the file that the lines are kept in")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the processes of the case
    kept = [json.loads(each) for each in given.lines.open()] if given.lines.exists() else []
    is_right = True
    for name in given.case:
        line = become_of(name)
        print(json.dumps(line), flush=True)
        is_right &= line["right"]
        kept = [each for each in kept if each["case"] != name] + [line]
        given.lines.write_text("".join(json.dumps(each) + "\n" for each in kept), encoding="utf-8")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

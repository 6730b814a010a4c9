"""The launcher of a host that follows: it starts and watches its ranks as the host that leads tells it.

If the link to that host ends, or nothing came for `SILENCE` seconds, all ranks here end at once: they could
not go on without the store, and must not seem to. The launcher then tries to join again, as a new host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from shoal.channel import Channel, ChannelBusyError, ChannelRefusedError, ChannelStrangerError, dial
from shoal.errors import CommunicationError, ConfigError
from shoal.launch.elastic import member_environments
from shoal.launch.gate import LAUNCHER, Gate, StoreDoor
from shoal.launch.host import BEAT, SILENCE, answers
from shoal.launch.hosts import Meeting, surroundings
from shoal.launch.launcher import END, TERMINAL, listen_for
from shoal.launch.local_ranks import LocalRanks
from shoal.launch.members import WAIT
from shoal.launch.membership import AFTER
from shoal.launch.memory_files import files_service
from shoal.launch.nursery import Nursery
from shoal.launch.outcome import Outcome
from shoal.launch.relay import Relay
from shoal.launch.stopping import StopRequest, signals_noted
from shoal.launch.token import read_token
from shoal.release import release
from shoal.scratch import scratch_folder
from shoal.signals import stopped_early
from shoal.submit import EXIT_STOPPED

_LOOK = 0.02  # seconds between looks at ranks and messages
_PAUSE = 0.5  # seconds between two tries to reach the host that leads


def follow(
    meeting: Meeting,
    module: str,
    environment: Mapping[str, str],
    *,
    memory: Path | None,
    nursery: Nursery | None,
) -> int:
    """Run the ranks of this host, as the host tells that leads; return the exit code that it tells.

    Args:
        meeting: The hosts.
        module: The module that is run as each rank; its one argument is the file of the job.
        environment: What the ranks get beside this process's environment.
        memory: The folder of checkpoints in this host's memory; None if there is none.
        nursery: The Nursery that ranks are forked from; None to start a program for each.

    Raises:
        CommunicationError: The host that leads cannot be reached, or is gone.
        ConfigError: It has another token.
    """
    known = _Known(memory)
    at = f"{meeting.address[0]}:{meeting.address[1]}"
    waiting = _Waiting(f"the host that leads, at {at}")
    why = "nothing listens there"
    since = time.monotonic()
    with signals_noted() as signals:
        while time.monotonic() - since < WAIT and not signals:
            if not meeting.token.exists():
                waiting.say(f"there is no {meeting.token}: it makes this file; copy it to this host")
                time.sleep(_PAUSE)
                continue
            token = read_token(meeting.token)
            try:
                link = dial(meeting.address, token, LAUNCHER)
            except ChannelBusyError:  # it prepares the data, which may take long
                waiting.say("it is there, and prepares its data")
                since = time.monotonic()
                continue
            except (ChannelRefusedError, ChannelStrangerError):
                raise ConfigError(
                    f"{at} has another token than this host: this host's is in {meeting.token}",
                    possible="the token that the host that leads has",
                    change="copy the file of that host to this one, or give each run its own --rendezvous",
                ) from None
            except OSError as error:
                why = str(error) if why == "nothing listens there" else why
                waiting.say(str(error))
                time.sleep(_PAUSE)
                continue
            waiting.is_over()
            told = _Following(meeting, module, environment, known, nursery, link, token).run(signals)
            if isinstance(told, int):
                return told
            why, since = told, time.monotonic()
            print(
                f"shoal: {why}; the ranks here are ended, and this host tries to join again", file=sys.stderr
            )
    if signals and not known.leader:
        print(stopped_early(signals[0].name), file=sys.stderr, flush=True)
        return EXIT_STOPPED
    raise CommunicationError(
        f"the host that leads the run, {at}, is gone: {why}. Start the run again on all hosts, with "
        "--resume auto"
    )


@final
class _Waiting:
    """Says what this host waits for, once for each reason."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said: set[str] = set()

    def say(self, why: str) -> None:
        """Say why it waits, unless that was said."""
        if why not in self._said:
            print(f"shoal: waits for {self._what}, up to {WAIT:g} s: {why}", file=sys.stderr, flush=True)
        self._said.add(why)

    def is_over(self) -> None:
        """Forget what was said: a later wait is another one."""
        self._said.clear()


@final
class _Known:
    """What stays when the link ends: the checkpoints in this host's memory, if they are of the run.

    Attributes:
        leader: The run that this host has had ranks of; empty for none.
    """

    def __init__(self, memory: Path | None) -> None:
        self.memory = memory
        self.leader = ""

    def meet(self, leader: str, *, resumes: bool) -> None:
        """Take note of who leads; drop checkpoints of another run."""
        if self.memory is not None and leader != self.leader and not resumes:
            for path in self.memory.iterdir():
                shutil.rmtree(path, ignore_errors=True)
        self.leader = leader


@final
class _Following:
    """The time between joining and the end of the link."""

    def __init__(
        self,
        meeting: Meeting,
        module: str,
        environment: Mapping[str, str],
        known: _Known,
        nursery: Nursery | None,
        link: Channel,
        token: bytes,
    ) -> None:
        self._meeting, self._module, self._environment = meeting, module, environment
        self._known, self._nursery, self._link, self._token = known, nursery, link, token
        self._address = str(link.socket.getsockname()[0])
        listening = socket.create_server((self._address, 0), family=link.socket.family)
        services = {} if known.memory is None else {"files": files_service(known.memory)}
        self._gate = Gate(listening, token, services)
        self._told: queue.Queue[Mapping[str, Any] | OSError] = queue.Queue()
        self._is_ended = threading.Event()
        self._ranks: LocalRanks | None = None
        self._relay = Relay()
        self._reported: set[int] = set()
        self._stopped: list[int] = []

    def run(self, signals: list[signal.Signals]) -> int | str:
        """Follow; return the exit code that the other host told, or why the link ended."""
        link = self._link
        stop = StopRequest(signals, self._meeting.grace)
        link.limit(SILENCE)
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name="shoal-follow", daemon=True).start()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            folder = stack.enter_context(scratch_folder())
            meeting = self._meeting
            about = {"ranks": meeting.ranks, "run": meeting.run, "settings": dict(meeting.settings)}
            about |= {"name": socket.gethostname(), "port": self._gate.port, "version": release()}
            self._tell(kind="host", **about)
            while True:
                self._wait()
                while not self._told.empty():
                    told = self._told.get()
                    if isinstance(told, OSError):
                        if isinstance(told, TimeoutError):
                            self._tell(closes=f"it heard nothing from the host that leads for {SILENCE:g} s")
                        return _why(told, self._meeting.address)
                    if told["do"] == "lost":
                        return f"the host that leads went on without this one: {told['why']}"
                    if told["do"] == "end":
                        return self._end(int(told["code"]), str(told["why"]))
                    self._obey(told, folder, stack)
                if self._ranks is None:
                    if signals:
                        print(stopped_early(signals[0].name), file=sys.stderr, flush=True)
                        return EXIT_STOPPED
                    continue
                before = stop.signal
                stop.pass_on(self._ranks)
                if stop.signal is not before:
                    self._tell(leaves=True)
                if stop.is_late:
                    self._ranks.signal(signal.SIGKILL)
                self._report(self._ranks, folder)

    def _wait(self) -> None:
        if self._ranks is None:
            time.sleep(_LOOK)
        else:
            self._ranks.listen(_LOOK)

    def _obey(self, told: Mapping[str, Any], folder: Path, stack: contextlib.ExitStack) -> None:
        if told["do"] == "stand by":
            print("shoal: this host stands by", file=sys.stderr, flush=True)
        elif told["do"] == "begin":
            self._begin(told, folder, stack)
        elif told["do"] == "more":
            self._relay.shown()
        elif told["do"] == "reach":
            threading.Thread(
                target=self._reach, args=[told["addresses"]], name="shoal-reach", daemon=True
            ).start()
        elif self._ranks is not None and told["do"] == "signal":
            self._ranks.signal(int(told["number"]), [int(rank) for rank in told["ranks"]])
        elif self._ranks is not None and told["do"] == "start":
            self._start_again(self._ranks, int(told["rank"]), dict(told["changes"]), folder)

    def _reach(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Tell which launchers of other hosts this host cannot reach."""
        self._tell(apart=[[host, port] for host, port in addresses if not answers((host, port))])

    def _begin(self, told: Mapping[str, Any], folder: Path, stack: contextlib.ExitStack) -> None:
        numbers = range(*told["numbers"])
        self._known.meet(str(told["leader"]), resumes=bool(told["resumes"]))
        job = folder / "job"
        job.write_bytes(bytes.fromhex(told["job"]))
        door = StoreDoor(self._meeting.address, self._token, str(told["session"]))
        stack.callback(door.close)
        around = surroundings(self._address, self._gate.port, self._meeting)
        around |= {**self._environment, AFTER: str(told["after"])}
        environments = member_environments(
            str(folder), numbers, int(told["ranks"]), door.port, around, self._nursery
        )
        for each in environments.values():
            each.pop(TERMINAL, None)  # its ranks' lines go to another terminal too: no place for a bar
        command = [sys.executable, "-m", self._module, str(job)]
        logs = Path(told["run"]) / "log"
        ranks = LocalRanks(command, environments, logs, self._nursery, relay=self._relay)
        self._ranks = stack.enter_context(ranks)
        names = f"{numbers.start} to {numbers.stop - 1}"
        print(f"shoal: this host has ranks {names} of the run {told['run']}", file=sys.stderr, flush=True)

    def _start_again(self, ranks: LocalRanks, rank: int, changes: Mapping[str, str], folder: Path) -> None:
        for outcome in folder.glob(f"rank-{rank:05d}.json"):
            outcome.unlink()
        ranks.start_again(rank, changes)
        self._reported.discard(rank)

    def _report(self, ranks: LocalRanks, folder: Path) -> None:
        """Tell what the ranks print, which have ended, and how, and which are stopped."""
        if lines := self._relay.take():
            self._tell(lines=lines)
        codes = {rank: code for rank, code in ranks.exit_codes().items() if rank not in self._reported}
        if codes:
            outcomes = {each.rank: dataclasses.asdict(each) for each in Outcome.read_all(folder)}
            self._tell(ended={str(rank): [code, outcomes.get(rank)] for rank, code in codes.items()})
            self._reported.update(codes)
        if (stopped := ranks.stopped()) != self._stopped:
            self._stopped = stopped
            self._tell(stopped=stopped)

    def _end(self, code: int, why: str) -> int:
        """End the ranks that are left, and return the exit code."""
        if self._ranks is not None:
            self._ranks.signal(signal.SIGTERM)
            listen_for(self._ranks, END)
            self._ranks.end()
            self._tell(lines=self._relay.take_all(), last=True)
        if why:
            print(f"shoal: the run has ended on this host: {why}", file=sys.stderr, flush=True)
        return code

    def _tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # then the thread that listens fails too
            self._link.send(message)

    def _listen(self) -> None:
        try:
            while True:
                if message := self._link.receive():
                    self._told.put(message)
        except OSError as error:
            self._told.put(error)

    def _beat(self) -> None:
        while not self._is_ended.wait(BEAT):
            self._tell()

    def _close(self) -> None:
        self._is_ended.set()
        self._gate.close()
        self._link.close()


def _why(error: OSError, address: tuple[str, int]) -> str:
    """Return what the end of the link says of the host that leads."""
    if isinstance(error, TimeoutError):
        return f"the host that leads was silent for {SILENCE:g} s"
    is_there = answers(address)
    if is_there is False:
        return "the launcher of the host that leads has ended"
    what = "its launcher is there" if is_there else "it does not answer"
    return f"the link to the host that leads was lost, and {what}: {error}"

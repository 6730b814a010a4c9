"""The launcher of a host that follows: it starts and watches its ranks as the launcher tells it that leads.

If the link to that one ends, or nothing came for `SILENCE` seconds, all ranks here end: they could not go on
by themselves, and must not seem to. A host of `shoal train --nodes` then tries to join again, as a new host.
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from shoal.channel import Channel, ChannelBusyError, ChannelRefusedError, ChannelStrangerError, dial
from shoal.errors import CommunicationError, ConfigError
from shoal.launch.elastic.elastic import member_environments
from shoal.launch.elastic.elastic_launcher import WAIT
from shoal.launch.elastic.elastic_rank import AFTER
from shoal.launch.elastic.host import BEAT, SILENCE, answers
from shoal.launch.hosts.gate import LAUNCHER, Gate, StoreDoor, read_token
from shoal.launch.hosts.leader import Meeting, surroundings
from shoal.launch.hosts.memory_files import files_service
from shoal.launch.local.fork_server import Nursery
from shoal.launch.local.launcher import END, TERMINAL, listen_for
from shoal.launch.local.local_ranks import LocalRanks
from shoal.launch.local.outcome import Outcome
from shoal.launch.local.output import Relay, Terminal
from shoal.launch.local.signals import StopRequest, signals_noted
from shoal.launch.submit import EXIT_STOPPED
from shoal.release import release
from shoal.scratch import scratch_folder
from shoal.signals import stopped_early

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
    follower = _Follower(meeting, module, environment, memory, nursery)
    at = f"{meeting.address[0]}:{meeting.address[1]}"
    waits, said = f"waits for the host that leads, at {at}, up to {WAIT:g} s:", set[str]()
    why = "nothing listens there"
    since = time.monotonic()
    with signals_noted() as signals:
        while time.monotonic() - since < WAIT and not signals:
            if not meeting.token.exists():
                _say_once(
                    said, f"{waits} there is no {meeting.token}: it makes this file; copy it to this host"
                )
                time.sleep(_PAUSE)
                continue
            token = read_token(meeting.token)
            try:
                link = dial(meeting.address, token, LAUNCHER)
            except ChannelBusyError:  # it prepares the data, which may take long
                _say_once(said, f"{waits} it is there, and prepares its data")
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
                _say_once(said, f"{waits} {error}")
                time.sleep(_PAUSE)
                continue
            said.clear()  # a later wait is another one
            ended = follower.follow(link, token, signals)
            if isinstance(ended, int):
                return ended
            why, since = _why(ended, meeting.address), time.monotonic()
            print(
                f"shoal: {why}; the ranks here are ended, and this host tries to join again", file=sys.stderr
            )
    if signals and not follower.leader:
        print(stopped_early(signals[0].name), file=sys.stderr, flush=True)
        return EXIT_STOPPED
    raise CommunicationError(
        f"the host that leads the run, {at}, is gone: {why}. Start the run again on all hosts, with "
        "--resume auto"
    )


def _say_once(said: set[str], text: str) -> None:
    if text not in said:
        print(f"shoal: {text}", file=sys.stderr, flush=True)
    said.add(text)


@final
class _Follower:
    """What stays when a link ends: what this host was started with, and the checkpoints in its memory.

    Args:
        meeting: As for `follow`, as are the others.

    Attributes:
        leader: The run that this host has had ranks of; empty for none.
    """

    def __init__(
        self,
        meeting: Meeting,
        module: str,
        environment: Mapping[str, str],
        memory: Path | None,
        nursery: Nursery | None,
    ) -> None:
        self._meeting, self._module, self._environment = meeting, module, environment
        self._memory, self._nursery = memory, nursery
        self.leader = ""

    def follow(self, link: Channel, token: bytes, signals: list[signal.Signals]) -> int | OSError:
        """Follow over a link, which is closed then; see `Following.run`."""
        address, meeting = str(link.socket.getsockname()[0]), self._meeting
        listening = socket.create_server((address, 0), family=link.socket.family)
        services = {} if self._memory is None else {"files": files_service(self._memory)}
        gate = Gate(listening, token, services)
        about = {"ranks": meeting.ranks, "run": meeting.run, "settings": dict(meeting.settings)}
        about |= {"name": socket.gethostname(), "port": gate.port, "version": release()}
        begin = partial(self._begin, token, surroundings(address, gate.port, meeting))
        try:
            return Following(link, about, begin, meeting.grace).run(signals)
        finally:
            gate.close()
            link.close()

    def _begin(
        self,
        token: bytes,
        around: Mapping[str, str],
        told: Mapping[str, Any],
        folder: Path,
        relay: Relay,
        stack: contextlib.ExitStack,
    ) -> LocalRanks:
        numbers = range(*told["numbers"])
        self._meet(str(told["leader"]), resumes=bool(told["resumes"]))
        job = folder / "job"
        job.write_bytes(bytes.fromhex(told["job"]))
        door = StoreDoor(self._meeting.address, token, str(told["session"]))
        stack.callback(door.close)
        around = {**around, **self._environment, AFTER: str(told["after"])}
        environments = member_environments(
            str(folder), numbers, int(told["ranks"]), door.port, around, self._nursery
        )
        for each in environments.values():
            each.pop(TERMINAL, None)  # its ranks' lines go to another terminal too: no place for a bar
        names = f"{numbers.start} to {numbers.stop - 1}"
        print(f"shoal: this host has ranks {names} of the run {told['run']}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", self._module, str(job)]
        logs = Path(told["run"]) / "log"
        return LocalRanks(command, environments, logs, self._nursery, [Terminal(), relay])

    def _meet(self, leader: str, *, resumes: bool) -> None:
        """Take note of who leads; drop checkpoints of another run."""
        if self._memory is not None and leader != self.leader and not resumes:
            for path in self._memory.iterdir():
                shutil.rmtree(path, ignore_errors=True)
        self.leader = leader


Begin = Callable[[Mapping[str, Any], Path, Relay, contextlib.ExitStack], LocalRanks]
"""Starts the ranks that a message tells of. It gets the message, a folder for outcomes, a Relay for what the
ranks print, and a stack that closes what it opens besides."""


@final
class Following:
    """The time between joining and the end of the link.

    Args:
        link: The link, which the caller closes.
        about: What this host tells of itself first; see `Host.introduce`.
        begin: Starts the ranks.
        grace: Seconds from a signal until the system ends this process; None if it does not.
        alone: Seconds for the ranks to save once the link has ended; 0 to end them at once.
    """

    def __init__(
        self,
        link: Channel,
        about: Mapping[str, Any],
        begin: Begin,
        grace: float | None,
        alone: float = 0.0,
    ) -> None:
        self._link, self._about, self._begin, self._grace = link, about, begin, grace
        self._alone = alone
        self._told: queue.Queue[Mapping[str, Any] | OSError] = queue.Queue()
        self._is_ended = threading.Event()
        self._ranks: LocalRanks | None = None
        self._relay = Relay()
        self._reported: set[int] = set()
        self._stopped: list[int] = []

    def run(self, signals: list[signal.Signals]) -> int | OSError:
        """Follow; return the exit code that the other launcher tells, or how the link ended."""
        ended = self._follow(signals)
        if isinstance(ended, int):
            self._tell(lines=self._relay.take_all(), last=True)
        return ended

    def _follow(self, signals: list[signal.Signals]) -> int | OSError:
        stop = StopRequest(signals, self._grace)
        self._link.limit(SILENCE)
        self._tell(kind="host", **self._about)
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name="shoal-follow", daemon=True).start()
        with contextlib.ExitStack() as stack:
            stack.callback(self._is_ended.set)
            folder = stack.enter_context(scratch_folder())
            while True:
                self._wait()
                while not self._told.empty():
                    told = self._told.get()
                    if isinstance(told, OSError):
                        return self._end_alone(told)
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
            self._ranks = stack.enter_context(self._begin(told, folder, self._relay, stack))
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
            ended = {str(rank): [code, outcomes.get(rank)] for rank, code in codes.items()}
            hangs = {path.name: path.read_text() for path in folder.glob("verdict-*")}
            self._tell(ended=ended, hangs=hangs)
            self._reported.update(codes)
        if (stopped := ranks.stopped()) != self._stopped:
            self._stopped = stopped
            self._tell(stopped=stopped)

    def _end(self, code: int, why: str) -> int:
        """End the ranks that are left, and return the exit code."""
        if self._ranks is not None:
            self._ranks.signal(signal.SIGTERM)
            listen_for(self._ranks, END)
        if why:
            print(f"shoal: the run has ended on this host: {why}", file=sys.stderr, flush=True)
        return code

    def _end_alone(self, error: OSError) -> OSError:
        """Let the ranks save for a while, if they may, and return how the link ended."""
        if isinstance(error, TimeoutError):
            self._tell(closes=f"it heard nothing from the host that leads for {SILENCE:g} s")
        if self._ranks is not None and self._alone:
            self._ranks.signal(signal.SIGTERM)
            listen_for(self._ranks, self._alone)
        return error

    def _tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # then the thread that listens fails too
            self._link.send(message)

    def _listen(self) -> None:
        try:
            while True:
                message = self._link.receive()
                if message.get("do") == "lost":
                    raise _LeftOutError(f"the host that leads went on without this one: {message['why']}")
                if message:
                    self._told.put(message)
        except OSError as error:
            self._told.put(error)

    def _beat(self) -> None:
        while not self._is_ended.wait(BEAT):
            self._tell()


@final
class _LeftOutError(ConnectionError):
    """The host that leads does without this one."""


def _why(error: OSError, address: tuple[str, int]) -> str:
    """Return what the end of the link says of the host that leads."""
    if isinstance(error, _LeftOutError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"the host that leads was silent for {SILENCE:g} s"
    is_there = answers(address)
    if is_there is False:
        return "the launcher of the host that leads has ended"
    what = "its launcher is there" if is_there else "it does not answer"
    return f"the link to the host that leads was lost, and {what}: {error}"

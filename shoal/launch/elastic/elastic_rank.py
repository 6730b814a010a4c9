"""Which processes train together, where ranks may be lost and come: generations of members.

A member is a process, with a number that it keeps. A generation is a list of members; a member's place in it
is its rank. One launcher alone makes generations, and puts each into the store of the ranks:

    launcher                               members
      generation 0: members 0, 1, 2 ------> form a group, train
      member 1 dies
      generation 1: members 0, 2 ---------> leave the group at once, form another, go on from the newest state
      starts member 1 again
             <----------------------------- member 1 is ready
      generation 2: members 0, 1, 2 ------> finish their step, save, form another group, go on

Where a backend reports no lost rank, as NCCL, no process can leave its group. All start again instead:

    launcher                               members
      member 1 dies
      generation 1: no members -----------> end at once, with `EXIT_AGAIN`
      starts all again
             <----------------------------- members 0, 1, 2 are ready
      generation 2: members 0, 1, 2 ------> form a group, go on from the newest state
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn, final

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.errors import CommunicationError
from shoal.launch.elastic.roster import (
    NEWEST,
    OVER,
    PREFIX,
    STARTS_AGAIN,
    Generation,
    broken_key,
    generation_key,
    here_key,
    peer_key,
    ready_key,
    waited_key,
)
from shoal.launch.local.outcome import EXIT_AGAIN
from shoal.launch.local.world import reports_failures

MEMBER = "SHOAL_MEMBER"
"""Environment variable: the number of a member. It is set where members may be lost and come."""

AFTER = "SHOAL_AFTER"
"""Environment variable: the generation that was newest when the member was started; "-1" for none."""

PEER = "SHOAL_PEER"
"""Environment variable: address and port at which the launcher of this host serves files to others."""

_LOOK = 0.02  # seconds between two looks at the store of a member that waits
_WATCH = 0.05  # seconds between two looks while it trains
_STAND_BY = 0.1  # seconds between two looks while others train without it
# A group that is formed without a member that is being started ends again once the member is there.
_WORTH = 0.25  # part of a step for which the others wait for such a member,
_WORTH_AT_MOST = 5.0  # and the most seconds


@final
class Membership:
    """A member's side: knows the newest generation, and ends the communication of one that is broken.

    Attributes:
        member: The number of this process.
        generation: The generation that this process is in, once `next` was called.
        step_seconds: Seconds of its last step; 0 before there is one.
        steps: Steps that are made, as far as it knows; -1 before there is one.
        starts_again: Whether this process ends if its generation is broken, since its group raises no errors.

    Args:
        member: The number of this process.
        connect: Returns a connection to the store of the ranks; each call returns another one.
        after: The generation that was newest when the process was started; -1 for none.
        abort: Ends all communication of this process, from another thread.
        failure: Returns why a group has failed that raises no errors: "TIMEOUT" if it waited too long, other
            text for another reason, "" if it has not failed.
    """

    def __init__(
        self,
        member: int,
        connect: Callable[[], Store],
        after: int,
        abort: Callable[[], object],
        failure: Callable[[], str] = lambda: "",
    ) -> None:
        self.member = member
        self.generation = Generation(after, ())
        self.step_seconds = 0.0
        self.steps = -1
        self.starts_again = False
        self._store = PrefixStore(PREFIX, connect())
        self._abort = abort
        self._failure = failure
        self._reported: int | None = None  # the generation whose failure the watch has reported
        self._newer: Generation | None = None
        self._after = self._entered = after
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="shoal-membership", daemon=True)

    @classmethod
    def found(
        cls, environment: Mapping[str, str], abort: Callable[[], object], failure: Callable[[], str]
    ) -> Membership | None:
        """Return the membership that the environment describes; None if this process is no member."""
        if MEMBER not in environment:
            return None
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])

        def connect() -> Store:
            return TCPStore(host, port, is_master=False, wait_for_workers=False)

        return cls(int(environment[MEMBER]), connect, int(environment[AFTER]), abort, failure)

    @property
    def is_due(self) -> bool:
        """Whether there is a newer generation, so that training should stop after this step."""
        return self._newer is not None

    def ready(self) -> None:
        """Tell the launcher that this process can train, and begin to watch."""
        self._store.set(peer_key(self.member), os.environ.get(PEER, ""))
        self._store.set(ready_key(self.member), "")
        self._thread.start()

    def next(
        self, seconds: float, is_asked_to_leave: Callable[[], bool] = lambda: False
    ) -> Generation | None:
        """Enter the newest generation with this member, once all members of a newer one are here.

        So no member forms a group and waits in vain for others that have gone to a newer generation. If lost
        members are being started again, it waits a part of a step for the generation that has them.

        Args:
            seconds: Time to wait for it.
            is_asked_to_leave: Whether this member is to wait no longer, if it has never been in a generation.

        Returns:
            The generation; None if none came in time, or none will come.
        """
        until = time.monotonic() + seconds
        waits_until = time.monotonic() + min(_WORTH * self.step_seconds, _WORTH_AT_MOST)
        while time.monotonic() < until and not self._store.check([OVER]):
            own = self.generation
            if self.member in own.members and own.number != self._entered and self._is_here(own):
                self._entered = own.number
                return own
            # A launcher that passes a signal on makes no generation after that.
            is_asked = self._entered == self._after and is_asked_to_leave()
            newest = self._newest()
            if is_asked and (newest is None or self.member not in newest.members):
                return None
            is_awaited = newest is not None and newest.is_broken and newest.starting
            if is_awaited and time.monotonic() < waits_until:
                time.sleep(_LOOK)
                continue
            if newest is not None and newest.number > own.number:
                with self._lock:
                    self.generation, self._newer = newest, None
                self._store.set(here_key(newest.number, self.member), "")
                until = time.monotonic() + seconds
                continue
            time.sleep(_LOOK)
        return None

    def begin(self, backend: str) -> None:
        """Note the backend of the group that this process is about to form.

        Raises:
            CommunicationError: A member of the generation is lost already, and the group would wait for it.
        """
        with self._lock:
            self.starts_again = not reports_failures(backend)
            if self.starts_again and self._newer is not None and self._newer.is_broken:
                self.starts_again = False
                raise CommunicationError("another rank was lost before the ranks connected")
        if self.starts_again:
            self._store.set(STARTS_AGAIN, "")

    def leave(self) -> None:
        """Note that this process has left its group, and that nothing of it is left."""
        self.starts_again = False

    def wait_for_end(self, seconds: float) -> None:
        """Wait for the watch to end this process, if the launcher notes that another is lost."""
        self._is_closed.wait(seconds)

    def stand_by(self, is_asked_to_leave: Callable[[], bool]) -> None:
        """Return once there is a newer generation, or none will come, or this member is asked to leave."""
        while not (self.is_due or is_asked_to_leave() or self._store.check([OVER])):
            time.sleep(_STAND_BY)

    def peers(self) -> list[str]:
        """Return where the launchers of this generation's members serve files, if they do."""
        told = [self._store.get(peer_key(member)).decode() for member in self.generation.members]
        return list(dict.fromkeys(filter(None, told)))

    def tell_broken(self) -> None:
        """Tell the launcher that the group of this generation has failed, after how many steps."""
        with contextlib.suppress(RuntimeError):  # the launcher is gone, and this process ends with it
            self._store.compare_set(broken_key(self.generation.number), "", str(self.steps))

    def leads_next(self, seconds: float) -> bool:
        """Wait for the next generation, and return whether this member is the first of those that stay.

        Args:
            seconds: Time to wait for it.
        """
        until = time.monotonic() + seconds
        while self._newer is None and time.monotonic() < until and not self._store.check([OVER]):
            time.sleep(_LOOK)
        newer = self._newer
        if newer is None:
            return False
        came = zip(newer.members, newer.since, strict=True)
        stay = [member for member, since in came if since <= self._entered]
        return stay[:1] == [self.member]

    def close(self) -> None:
        """End the watch."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        """Note newer generations; end the communication of one that is broken, or this process with it."""
        with contextlib.suppress(RuntimeError):  # the launcher is gone, and this process ends with it
            while not self._is_closed.wait(_WATCH):
                self._look_for_failure()
                known = max(each.number for each in (self.generation, self._newer) if each is not None)
                if not self._store.check([generation_key(known + 1)]):
                    continue
                newest = self._newest()
                with self._lock:
                    if newest is None or newest.number <= self.generation.number:
                        continue
                    is_known = self._newer is not None and self._newer.number == newest.number
                    self._newer = newest
                    if newest.is_broken and not is_known and self._entered == self.generation.number:
                        (_end if self.starts_again else self._abort)()

    def _look_for_failure(self) -> None:
        """Report a failure of this generation's group that only a watchdog knows of."""
        number = self.generation.number
        if not self.starts_again or self._reported == number or not (failure := self._failure()):
            return
        self._reported = number
        if failure == "TIMEOUT":
            self._store.set(waited_key(number, self.member), "")
        self.tell_broken()

    def _is_here(self, generation: Generation) -> bool:
        return bool(self._store.check([here_key(generation.number, member) for member in generation.members]))

    def _newest(self) -> Generation | None:
        if not self._store.check([NEWEST]):
            return None
        number = int(self._store.get(NEWEST))
        told = json.loads(self._store.get(generation_key(number)))
        members, since = tuple(told["members"]), tuple(told["since"])
        return Generation(number, members, since, bool(told["is_broken"]), int(told["starting"]))


def _end() -> NoReturn:
    """End this process without a look at its device or its groups, which may wait for ever."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(EXIT_AGAIN)

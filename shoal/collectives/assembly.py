"""Exchange of texts between the ranks of a new group, through the store."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from shoal.errors import CollectiveError
from shoal.proc import process_state

_SHORTEST_PAUSE = 2e-4
"""Seconds between the first two looks at the store; later pauses are longer."""

_PAUSE_PER_RANK = 1e-4
"""Seconds per rank by which the longest pause grows: the store serves 10,000 looks a second at most."""

_SECONDS_PER_LOOK_AT_PEERS = 0.5

_SAID = "said "
"""Prefix of a text that a rank tells; a text without it is the reason why the rank gave up."""


class Assembly:
    """The ranks of a new group, which tell each other one text for each subject.

    Each rank puts its text into the store and adds one to a count. The rank that makes the count full puts
    all texts together, and the others take them from there: a few requests a rank, however many ranks there
    are. No rank waits in the store, because the store warns of each wait that ends without a result.

    Args:
        store: The ranks' common store, for this group alone.
        rank: This process within the group.
        size: Ranks in the group.
        timeout: Time limit for all ranks to come.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._timeout = timeout
        self._processes: Mapping[int, int] = {}
        self._told: set[str] = set()
        # A group that ended may have left its keys in the store: each rank counts how often it came.
        self._round = store.add(f"rounds/{rank}", 1)

    def tell(self, subject: str, text: str) -> list[str]:
        """Tell all ranks a text, and return theirs.

        Args:
            subject: What the texts are about, equal on all ranks. Use each subject once.
            text: This rank's text.

        Returns:
            Each rank's text.

        Raises:
            CollectiveError: A rank gave up, ended, or did not come in time; or the store did not answer.
        """
        self._told.add(subject)
        try:
            told = self._gather(subject, _SAID + text)
        except CollectiveError:
            raise
        except RuntimeError as error:  # the stores raise this
            raise CollectiveError(f"the group did not form: {error}", fault="peer lost") from error
        for rank, each in enumerate(told):
            if not each.startswith(_SAID):
                raise CollectiveError(f"the group did not form: rank {rank}: {each}", rank=rank)
        return [each.removeprefix(_SAID) for each in told]

    def watch(self, processes: Mapping[int, int]) -> None:
        """Watch for the end of these ranks' processes, which are on this host."""
        self._processes = processes

    def give_up(self, reason: str, subjects: Sequence[str]) -> None:
        """Tell the others why this rank will not come, for each subject that it has not told yet."""
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            for subject in subjects:
                if subject not in self._told:
                    self._told.add(subject)
                    self._put(subject, reason)

    def _gather(self, subject: str, text: str) -> list[str]:
        if self._put(subject, text):
            return self._put_together(subject)
        everyone = self._key(subject, "everyone")
        pause, longest = _SHORTEST_PAUSE, max(2e-3, _PAUSE_PER_RANK * self._size)
        look = time.monotonic() + _SECONDS_PER_LOOK_AT_PEERS
        while not self._store.check([everyone]):
            now = time.monotonic()
            if now > min(look, self._deadline):
                look = now + _SECONDS_PER_LOOK_AT_PEERS
                if self._look_at_peers(subject):
                    return self._put_together(subject)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        told: list[str] = json.loads(self._store.get(everyone))
        return told

    def _put(self, subject: str, text: str) -> bool:
        """Put this rank's text into the store; return whether all ranks have put theirs."""
        self._store.set(self._key(subject, self._rank), text)
        return bool(self._store.add(self._key(subject, "count"), 1) == self._size)

    def _put_together(self, subject: str) -> list[str]:
        keys = [self._key(subject, rank) for rank in range(self._size)]
        told = [each.decode() for each in self._store.multi_get(keys)]
        self._store.set(self._key(subject, "everyone"), json.dumps(told))
        return told

    def _look_at_peers(self, subject: str) -> bool:
        """Return whether all ranks have told; the last one may have ended before it put the texts together.

        Raises:
            CollectiveError: A rank ended, or time ran out.
        """
        ended = [rank for rank, pid in self._processes.items() if not process_state(pid)]
        is_late = time.monotonic() > self._deadline
        if not ended and not is_late:
            return False
        missing = [rank for rank in range(self._size) if not self._store.check([self._key(subject, rank)])]
        for rank in ended:
            if rank in missing:
                raise CollectiveError(
                    f"the group did not form: rank {rank} (process {self._processes[rank]}) ended",
                    rank=rank,
                    fault="peer lost",
                )
        if missing and is_late:
            names = ("ranks " if len(missing) > 1 else "rank ") + ", ".join(map(str, missing))
            raise CollectiveError(
                f"the group did not form: {names} of {self._size} did not come within "
                f"{self._timeout.total_seconds():g} s",
                rank=missing[0],
                fault="timeout",
            )
        return not missing

    def _key(self, subject: str, name: object) -> str:
        return f"{self._round}/{subject}/{name}"

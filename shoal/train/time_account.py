"""The time that the first rank of a run spends, as it writes it into the run's events.

A rank is always in one part of its work: `start` until its first step, then `steps`, or what it does between
steps. See `shoal.run.account` for the parts, and `shoal.run.events` for the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from shoal.run import Account, Ledger, Run, read_events, write_event

_SOON = 1.0  # seconds: lines come no sooner than this after each other
_SHARE = 1e-3  # of the run's age that passes between two lines, so that a long run has few


@final
class TimeAccount:
    """Account for the time of a group of ranks, from when it formed.

    Args:
        run: The run.
        launched: When the command that started the ranks began, in seconds since the epoch.
        ranks: Number of processes.
        is_writer: Whether this rank writes; the others account for nothing.
        told: Called with the account of the whole run, whenever there is a new one.
    """

    def __init__(
        self,
        run: Run,
        launched: float,
        ranks: int,
        is_writer: bool,
        told: Callable[[Account], object] = lambda account: None,
    ) -> None:
        self._file = run.events_file
        self._is_writer = is_writer
        self._told = told
        # Clocks of the system may be set while training goes on; the difference to this one may not change.
        self._offset = time.time() - time.perf_counter()
        self._at = self._written = time.perf_counter()
        self._part = "start"
        self._seconds: dict[str, float] = {}
        self._step = 0
        self._has_stepped = False
        self._is_closed = not is_writer
        self._ledger = Ledger(read_events([run.events_file, run.members_file]) if is_writer else ())
        self._write("began", launched=launched, ranks=ranks)
        now = self._ledger.account()
        self._began = time.time() if now is None else now.began

    @property
    def account(self) -> Account | None:
        """The account of the whole run up to the last event; None on ranks that do not write."""
        return self._ledger.account()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Give the time within this context to a part, unless an error breaks it off."""
        before = self._switch(name)
        yield
        self._switch(before)

    def loaded(self, step: int) -> None:
        """Note that the ranks hold the state after a step, and train from now on."""
        self._switch("other")
        self._step = step
        self._write("loaded", step=step)

    def stepped(self, step: int, compiling: float) -> None:
        """Note that a step was finished, of which compiling took some seconds; write what is due."""
        self._switch(self._part)
        self._step = step
        if compiling:
            moved = min(compiling, self._seconds.get("steps", 0.0))
            self._seconds["steps"] = self._seconds.get("steps", 0.0) - moved
            self._seconds["compile"] = self._seconds.get("compile", 0.0) + moved
        age = self._at + self._offset - self._began
        # The first step tells that ranks train again, should they be lost soon.
        if not self._has_stepped or self._at - self._written >= max(_SOON, _SHARE * age):
            self._flush()
        self._has_stepped = True

    def failed(self, error: BaseException) -> None:
        """Note that training failed: the part that the error broke off, such as a step, is lost."""
        if self._is_closed:
            return
        self._flush()
        self._write("failed", reason=f"{type(error).__name__}: {error}")
        self._is_closed = True

    def close(self, reason: str) -> None:
        """Write and tell what is left, and that these ranks end, unless they failed."""
        if self._is_closed:
            return
        self.write()
        self._write("ended", reason=reason)
        self._is_closed = True

    def write(self) -> None:
        """Write and tell what is known up to now."""
        if not self._is_closed:
            self._switch(self._part)
            self._flush()

    def leave(self) -> None:
        """Write what is left: the ranks go on in another group."""
        self.write()
        self._is_closed = True

    def _switch(self, part: str) -> str:
        """Give the time since the last call to the part before; return that part."""
        now = time.perf_counter()
        before = self._part
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._at
        self._at, self._part = now, part
        return before

    def _flush(self) -> None:
        """Write how the time between the last line and the last change of parts was spent."""
        self._written = self._at
        told: Mapping[str, Any] = {name: round(seconds, 6) for name, seconds in self._seconds.items()}
        self._seconds = {}
        self._write("spent", at=self._at, step=self._step, seconds=told)
        if (now := self._ledger.account()) is not None:
            self._told(now)

    def _write(self, event: str, *, at: float | None = None, **values: Any) -> None:
        if self._is_writer:
            moment = (time.perf_counter() if at is None else at) + self._offset
            self._ledger.take(write_event(self._file, event, at=moment, **values))

"""Why members of a training have failed, as their outcomes, their exit codes and this launcher say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

from shoal.errors import WorkerError
from shoal.hang import HangVerdict
from shoal.launch.ended import exit_code_after_signal
from shoal.launch.outcome import Outcome, root_cause
from shoal.submit import EXIT_STOPPED


@final
class Causes:
    """The causes of failures.

    Args:
        folder: Where members leave their outcomes, and verdicts on hangs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._given_up: dict[int, str] = {}  # members that the launcher ends, and why
        self._told: HangVerdict | None = None

    def give_up(self, member: int, why: str) -> None:
        """Note why the launcher ends a member."""
        self._given_up.setdefault(member, f"its process {why}, and was ended")

    def forget(self, member: int) -> None:
        """Forget what is known of a member, which is started again."""
        for outcome in self._folder.glob(f"rank-{member:05d}.json"):
            outcome.unlink()
        self._given_up.pop(member, None)

    def of(self, failed: Mapping[int, int]) -> WorkerError:
        """Return the failure that came first of those of some members.

        Args:
            failed: Their exit codes.
        """
        outcomes = [outcome for outcome in Outcome.read_all(self._folder) if outcome.rank in failed]
        given_up = next((member for member in failed if member in self._given_up), None)
        if given_up is not None and not any(outcome.error for outcome in outcomes):
            return WorkerError(given_up, self._given_up[given_up], exit_code=1)
        return root_cause(outcomes, failed)

    def after_signal(self, codes: Mapping[int, int], name: str) -> int:
        """Return the exit code of a training that a signal has ended.

        Args:
            codes: The exit code of each member that was there when it came.
            name: The name of the signal.

        Raises:
            WorkerError: Members have trained, and none has saved the state.
        """
        outcomes = Outcome.read_all(self._folder)
        early = {each.rank for each in outcomes if each.is_early}
        trained = [member for member in codes if member not in early]
        members = [member for member in trained if codes[member] == EXIT_STOPPED] or trained or list(codes)
        return exit_code_after_signal([each for each in outcomes if each.rank in members], members, name)

    def hang_of(self, member: int) -> str:
        """Return a colon and why a member hangs; "" unless the ranks that waited for it have found out."""
        verdict = self._newest_verdict()
        return f": {verdict.text}" if verdict is not None and verdict.ranks == (member,) else ""

    def newest_hang(self) -> str:
        """Return a colon and what ranks waited for last; "" if none has found out."""
        verdict = self._newest_verdict()
        return f": {verdict.text}" if verdict is not None else ""

    def new_hang(self) -> str:
        """Return what `newest_hang` does; "" if that was returned before."""
        before, self._told = self._told, self._newest_verdict()
        return self.newest_hang() if self._told != before else ""

    def _newest_verdict(self) -> HangVerdict | None:
        files = sorted(self._folder.glob("verdict-*"), key=lambda path: path.stat().st_mtime)
        return HangVerdict.read(files[-1]) if files else None

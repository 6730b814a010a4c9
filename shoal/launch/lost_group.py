"""Groups of ranks that fail although no rank has ended: whether another group can go on, and with whom."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

from shoal.launch.causes import Causes
from shoal.launch.host import Host
from shoal.launch.linked_hosts import LinkedHosts
from shoal.launch.roster import Roster

_MENDED = 5.0  # seconds in which the failure of a group shows its cause, such as a process that ends


@final
class LostGroup:
    """The newest group, once it has failed and no member of it has ended.

    Args:
        roster: The generations.
        causes: What is known of failures.
        timeout: Seconds that members wait for another in a collective.
        linked: The hosts, if there are several.
    """

    def __init__(self, roster: Roster, causes: Causes, timeout: float, linked: LinkedHosts | None) -> None:
        self._roster, self._causes, self._linked, self._timeout = roster, causes, linked, timeout
        self._since: float | None = None
        self._waited = 0  # members that have waited too long
        self._steps = -2  # that were made when the group before was lost

    def forget(self) -> None:
        """Take note that the newest group has not failed, or that its failure has a cause."""
        self._since = None

    def is_unexplained(self) -> bool:
        """Return whether it has failed for so long that no cause will show; hosts are asked meanwhile."""
        now, (waited, _) = time.monotonic(), self._roster.waited()
        if self._since is None and self._linked is not None:
            self._linked.ask_whom_they_reach()
        if self._since is None or waited != self._waited:
            self._since, self._waited = now, waited
        return now - self._since > _MENDED and (self._linked is None or self._linked.is_heard)

    def hanging(self) -> Sequence[int]:
        """Return the members for which the others have waited too long."""
        return self._roster.waited()[1]

    def apart(self) -> tuple[Host, Host] | None:
        """Return a host that cannot reach another one, and this one; None if all reach each other."""
        return None if self._linked is None else self._linked.apart()

    def why_stuck(self, restarts: int) -> str:
        """Return why no other group may be formed; "" if one may.

        Args:
            restarts: How often that is allowed.
        """
        before, self._steps = self._steps, self._roster.steps_when_broken()
        if self._steps > before and restarts:
            return ""
        when = f"after step {self._steps}" if self._steps > 0 else "before the first step"
        if self._steps <= before:
            lost = f"twice {when}, without a step between"
        else:
            lost = f"{when}, and no restart is left"
        return (
            f"the ranks have lost each other {lost}. A rank waits at most timeout={self._timeout:g} s in a "
            f"collective: give a larger one if the network is slow{self._causes.newest_hang()}"
        )

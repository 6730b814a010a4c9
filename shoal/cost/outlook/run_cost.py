"""Where the wall clock of a run went, and what it costs: so far, and up to its last step.

Devices are paid for while ranks run: not while the run waits for its next command. What is to go is taken to
lose as large a share to failures, saves and validations as the run did so far; see
`shoal.run.Account.seconds_left`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.cluster import Cluster, dollars
from shoal.run import Account

_HOUR = 3600.0


def account_summary(
    account: Account | None, description: Mapping[str, Any], cluster: Cluster | None = None
) -> dict[str, Any] | None:
    """Return the account of a run and its cost as an object for JSON; what is not known is None.

    Args:
        account: The account; None for a run without events.
        description: The content of run.json, which says how many steps are to be made.
        cluster: The machines, which may have a price.
    """
    if account is None:
        return None
    config = description.get("config")
    steps = config.get("steps") if isinstance(config, Mapping) else None
    to_make = max(0, steps - account.step) if isinstance(steps, int) else None
    seconds = account.seconds_left(to_make) if to_make else 0.0 if to_make == 0 else math.nan
    left = seconds if math.isfinite(seconds) else None
    return {
        "began": account.began,
        "wall_seconds": account.wall,
        "goodput": account.goodput,
        "step_seconds": account.steps,
        "lost_seconds": dict(account.lost),
        "launches": account.launches,
        "failures": account.failures,
        "device_hours": account.device_seconds / _HOUR,
        "dollars": _dollars(cluster, account.device_seconds),
        "steps_left": to_make,
        "seconds_left": left,
        "device_hours_left": None if left is None else left * account.ranks / _HOUR,
        "dollars_left": None if left is None else _dollars(cluster, left * account.ranks),
    }


def _dollars(cluster: Cluster | None, device_seconds: float) -> float | None:
    if cluster is None or not cluster.price:
        return None
    return dollars(cluster, device_seconds, devices=1)

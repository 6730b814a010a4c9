"""Read the measurements that `shoal probe --json` printed, so that new rules can be fitted to old ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import DataError
from shoal.plan.group import Group
from shoal.probe.measurements import (
    AttentionTime,
    CollectiveTime,
    HostRates,
    Measurements,
    PassTime,
    ProductTime,
    SendTime,
    SynchronisationTime,
)
from shoal.probe.sheet import Sheet
from shoal.workload import Attention


def read_measurements(path: str | Path) -> tuple[Measurements, Sheet]:
    """Return the measurements of a probe, and the facts about its machine.

    Raises:
        DataError: The file cannot be read, or `shoal probe --json` did not write it.
    """
    try:
        read = json.loads(Path(path).read_text("utf-8"))
        return _measurements(read["measurements"]), Sheet(**_tuples(read["sheet"]))
    except OSError as error:
        raise _refused(path, str(error.strerror)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(path, f"{type(error).__name__}: {error}") from None


def _refused(path: str | Path, reason: str) -> DataError:
    return DataError(
        f"the measurements in {path} cannot be read: {reason}",
        possible="a file with the output of `shoal probe --json`",
        change="correct the path, or probe again",
    )


def _measurements(read: Mapping[str, Any]) -> Measurements:
    lists: dict[str, Callable[[Any], Any]] = {
        "products": lambda each: ProductTime(**each),
        "passes": lambda each: PassTime(**each),
        "attention": lambda each: AttentionTime(**{**each, "attention": Attention(**each["attention"])}),
        "links": _link,
        "synchronisations": lambda each: SynchronisationTime(**each),
        "hosts": lambda each: HostRates(
            each["pairing"], {int(host): rate for host, rate in each["rates"].items()}
        ),
    }
    made = {name: tuple(map(make, read[name])) for name, make in lists.items()}
    return Measurements(**{**_tuples(read), **made})


def _link(read: Mapping[str, Any]) -> CollectiveTime | SendTime:
    if "distance" in read:
        return SendTime(**read)
    return CollectiveTime(**{**read, "group": Group(**read["group"])})


def _tuples(read: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}

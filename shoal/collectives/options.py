"""How a group communicates, where it is not left to the measured table."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.collectives.table import Table
from shoal.collectives.table_file import built_in_table, load_table
from shoal.cost import ALGORITHMS, COLLECTIVES, require_name
from shoal.errors import CollectiveError, ConfigError

__all__ = ["Options", "require_same"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `init_process_group` and `new_group` take as `pg_options` for the backend "shoal".

    Attributes:
        algorithms: For a collective, the algorithm that it always uses, such as {"all_reduce": "ring"}. One
            that works only within a host is passed over where there are several.
        table: What each algorithm costs on this machine; the rest is chosen by it.
        streams: TCP connections between two ranks of different hosts.
        heartbeat: Seconds without a sign of life after which a peer counts as stopped.
        direct_reads: Whether ranks of a host read each other's memory, where the system lets them; otherwise
            they copy what is not in shared buffers.
        debug: Whether ranks tell each other what they call, so that a mismatch is reported, not hung on.
    """

    algorithms: Mapping[str, str] = field(default_factory=dict)
    table: Table = field(default_factory=built_in_table)
    streams: int = 2
    heartbeat: float = 5.0
    direct_reads: bool = True
    debug: bool = False

    def __post_init__(self) -> None:
        for collective, name in self.algorithms.items():
            require_name("a collective", collective, COLLECTIVES)
            offered = sorted({key[1] for key in ALGORITHMS if key[0] == collective})
            require_name(f"an algorithm of {collective}", name, offered)
        for name, value in (("streams", self.streams), ("heartbeat", self.heartbeat)):
            if value <= 0:
                raise ConfigError(
                    f"{name}={value} cannot work", possible="more than 0", change=f"set another {name}"
                )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Options:
        """What the environment says.

        SHOAL_ALGORITHMS (all_reduce=ring,broadcast=chain), SHOAL_TABLE (a file that `shoal bench --calibrate`
        wrote), SHOAL_STREAMS, SHOAL_HEARTBEAT (seconds), SHOAL_DIRECT_READS (0) and SHOAL_DEBUG (1).

        Raises:
            ConfigError: One of these cannot be used.
        """
        algorithms = {}
        for pair in filter(None, environment.get("SHOAL_ALGORITHMS", "").split(",")):
            collective, _, name = pair.partition("=")
            algorithms[collective.strip()] = name.strip()
        return cls(
            algorithms=algorithms,
            table=load_table(Path(file)) if (file := environment.get("SHOAL_TABLE")) else built_in_table(),
            streams=int(_number(environment, "SHOAL_STREAMS", cls.streams)),
            heartbeat=_number(environment, "SHOAL_HEARTBEAT", cls.heartbeat),
            direct_reads=environment.get("SHOAL_DIRECT_READS", "1") != "0",
            debug=environment.get("SHOAL_DEBUG", "0") not in ("", "0"),
        )

    def fingerprint(self, build: str) -> str:
        """What has to be the same on all ranks of a group, as a short text without spaces.

        Args:
            build: Of the native core, as `Core` has it.
        """
        shared = (
            sorted(self.algorithms.items()),
            sorted(self.table.entries.items()),
            self.streams,
            self.debug,
        )
        return f"{build}/{hashlib.sha256(repr(shared).encode()).hexdigest()[:16]}"


def require_same(fingerprints: Sequence[str], rank: int) -> None:
    """Checks that the ranks of a group have one build of the core, and the same options.

    Args:
        fingerprints: By rank, as `Options.fingerprint` gives them.
        rank: This one.

    Raises:
        CollectiveError: One has another.
    """
    own, _, _ = fingerprints[rank].partition("/")
    for other, fingerprint in enumerate(fingerprints):
        build, _, _ = fingerprint.partition("/")
        if build != own:
            raise CollectiveError(
                f"the group did not form: rank {other} has another build of the core than rank {rank} "
                f"({build}, {own})\n  possible: cores built from the same sources on all ranks\n"
                "  change: install the same Shoal on all hosts, or build it there from the same sources",
                rank=other,
                fault="mismatch",
            )
        if fingerprint != fingerprints[rank]:
            raise CollectiveError(
                f"the group did not form: rank {other} has other options than rank {rank} "
                "(SHOAL_ALGORITHMS, SHOAL_TABLE, SHOAL_STREAMS, SHOAL_DEBUG, or Options)",
                rank=other,
                fault="mismatch",
            )


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environment.get(name) or default)
    except ValueError:
        raise ConfigError(
            f"{name}={environment[name]!r} is not a number",
            possible="a number above 0",
            change=f"set {name} to one",
        ) from None

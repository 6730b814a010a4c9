"""`shoal bench --calibrate`: measures the table of algorithms on the ranks of the bench."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch.distributed as dist

from shoal.collectives.calibrate import calibrate
from shoal.collectives.ctypes_core import load_core
from shoal.collectives.group import ProcessGroup
from shoal.collectives.options import Options
from shoal.collectives.table import built_in_table, save_table
from shoal.machine.bench.contestants.contestant import TorchGroup
from shoal.machine.bench.measure import measure
from shoal.machine.bench.report import describe
from shoal.machine.bench.settings import Ranks, Settings
from shoal.predict.cost import COLLECTIVES

_ROUNDS = 3


def write_table(settings: Settings, ranks: Ranks, file: Path) -> None:
    """Time every algorithm on the ranks, and write the table on rank 0; every rank calls this.

    Args:
        settings: The collectives and the sizes to measure.
        ranks: This rank and the number of ranks.
        file: The file to write.
    """
    group = _Group(ranks)
    collectives = tuple(name for name in settings.collectives if name in COLLECTIVES)
    table = calibrate(group, built_in_table(), collectives, settings.sizes)
    if ranks.rank == 0:
        where = f"{ranks.count} ranks on {group.hosts} host{'s' * (group.hosts > 1)}"
        save_table(table, file, f"shoal bench --calibrate: {where}\n{describe()}")
        print(f"table written to {file}; set SHOAL_TABLE={file}, and every group uses it", file=sys.stderr)


class _Group:
    """A `TimedGroup` of the bench's ranks, which uses one algorithm at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        core = load_core()
        assert core is not None, "the bench formed a group of backend shoal"
        self._one_shot_bytes = core.one_shot_bytes
        self._contestants: dict[tuple[str, str], TorchGroup] = {}
        self.ranks = ranks.count
        self.aggregated = bool(Options.from_environment().aggregator)
        group = self._form({})
        self.hosts, self.turns = group.hosts, group.turns
        self.level = "shared-memory" if self.hosts == 1 else "network"

    def run(self, collective: str, algorithm: str, nbytes: int) -> float | None:
        """See `TimedGroup.run`."""
        if algorithm == "one-shot" and self._slot_bytes(collective, nbytes) > self._one_shot_bytes:
            return None
        key = collective, algorithm
        if key not in self._contestants:
            self._contestants[key] = TorchGroup("shoal", self._form({collective: algorithm}))
        settings = Settings(collectives=(collective,), backends=("shoal",), sizes=(nbytes,), rounds=_ROUNDS)
        ((row,),) = list(measure(settings, {"shoal": self._contestants[key]}, self._ranks))
        return statistics.median(row.seconds) if row.seconds else None

    def _slot_bytes(self, collective: str, nbytes: int) -> float:
        return nbytes / self.ranks if collective in ("all_gather", "gather") else nbytes

    @staticmethod
    def _form(algorithms: dict[str, str]) -> ProcessGroup:
        options = Options(algorithms=algorithms, aggregator=Options.from_environment().aggregator)
        group = dist.new_group(backend="shoal", pg_options=options)
        assert isinstance(group, ProcessGroup)
        return group

"""Measures collectives: any backend, any size, checked, in interleaved rounds.

Nouns: Settings (what to measure), Collective (the buffers and the bus factor of one collective), Contestant
(an implementation of all collectives), Row (the measurements of one contestant at one size), Machine (the
facts about the machine). `shoal bench` starts the ranks; on each rank `run` measures, and rank 0 reports.
"""

from shoal.machine.bench.collective import COLLECTIVES, Collective, Extent, Row, ratio
from shoal.machine.bench.report import Machine, describe
from shoal.machine.bench.settings import BACKENDS, DTYPES, OPERATORS, Settings, parse_names, parse_sizes

__all__ = [
    "BACKENDS",
    "COLLECTIVES",
    "DTYPES",
    "OPERATORS",
    "Collective",
    "Extent",
    "Machine",
    "Row",
    "Settings",
    "describe",
    "parse_names",
    "parse_sizes",
    "ratio",
]

"""Replay: a measured Timeline as a graph of work and collectives, played again with changes.

Nouns: Graph (programs of `Work`, `Arrive` and `Await`, joined by `Collective`), Played, WhatIf. `graph_of`
    makes the graph of a Timeline, `play` gives the times, `what_if` replays it without this and that, and
    `critical_path` says what bounds it. Imports no torch.
"""

from shoal.analyze.replay.graph import (
    Arrive,
    Await,
    Collective,
    Event,
    Graph,
    OnPath,
    Played,
    Work,
    critical_path,
    play,
)
from shoal.analyze.replay.what_if import Saving, WhatIf, graph_of, what_if

__all__ = [
    "Arrive",
    "Await",
    "Collective",
    "Event",
    "Graph",
    "OnPath",
    "Played",
    "Saving",
    "WhatIf",
    "Work",
    "critical_path",
    "graph_of",
    "play",
    "what_if",
]

"""Replay: a measured Timeline as a graph of work and collectives, played again with changes.

Nouns: Graph (programs of `Work`, `Arrive` and `Await`, joined by `Collective`), Played. `graph_of` makes the
    graph of a Timeline, `play` gives the times. `shoal what-if` and tests of verdicts use it. Imports no
    torch.
"""

from shoal.replay.graph import Arrive, Await, Collective, Event, Graph, Work
from shoal.replay.measured import graph_of
from shoal.replay.play import Played, play

__all__ = ["Arrive", "Await", "Collective", "Event", "Graph", "Played", "Work", "graph_of", "play"]

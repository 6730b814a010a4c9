"""Schedules played against the clock.

`simulate` plays a Plan's steps: the schedule's table and the costs of blocks, collectives and links make a
`Simulation`, which has a Timeline as a run would record it; `traffic_of` says what a rank exchanges, and how.
`measured_timeline` is what a run recorded, as it is explained; `mark_bubbles` says which idle time its
pipeline schedule forced, `stage_times` how long each stage works. Imports no torch.
"""

from shoal.simulate.bubble import mark_bubbles
from shoal.simulate.measured import measured_timeline, recorded_cluster
from shoal.simulate.simulation import Simulation, simulate
from shoal.simulate.stage_times import StageTimes, stage_times
from shoal.simulate.traffic import Communication, Traffic, traffic_of

__all__ = [
    "Communication",
    "Simulation",
    "StageTimes",
    "Traffic",
    "mark_bubbles",
    "measured_timeline",
    "recorded_cluster",
    "simulate",
    "stage_times",
    "traffic_of",
]

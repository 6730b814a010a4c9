"""Schedules played against the clock.

`measured_timeline` is what a run recorded, as it is explained; `mark_bubbles` says which idle time its
pipeline schedule forced, `stage_times` how long each stage works. Imports no torch.
"""

from shoal.simulate.bubble import mark_bubbles
from shoal.simulate.measured import measured_timeline
from shoal.simulate.stage_times import StageTimes, stage_times

__all__ = ["StageTimes", "mark_bubbles", "measured_timeline", "stage_times"]

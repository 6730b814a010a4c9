"""Schedules played against the clock.

`mark_bubbles` says of a measured Timeline which idle time its pipeline schedule forced. Imports no torch.
"""

from shoal.simulate.bubble import mark_bubbles

__all__ = ["mark_bubbles"]

"""Receivers of the values of steps that are not files of the run; one file each, each with its package.

`Destinations` opens those that a run asks for, each in a thread of its own (`QueuedLogger`).
"""

from shoal.record.destinations.opening import Destinations, QueuedLogger

__all__ = ["Destinations", "QueuedLogger"]

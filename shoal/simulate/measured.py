"""The Timeline of a run, as it is explained."""

from __future__ import annotations

from shoal.run import Run
from shoal.simulate.bubble import mark_bubbles
from shoal.timeline import Timeline

__all__ = ["measured_timeline"]


def measured_timeline(run: Run) -> Timeline:
    """What the ranks recorded of the steps under the Plan that the run has now, with its bubbles marked.

    A run that goes on under another Plan, or on other ranks, says so in its `since_step`: averages over
    several layouts would be true of none.

    Raises:
        ShoalError: A file of the run is malformed.
    """
    timeline = Timeline.read(run.timeline)
    since: int | None = run.description.get("since_step")
    return mark_bubbles(timeline if since is None else timeline.since_step(since))

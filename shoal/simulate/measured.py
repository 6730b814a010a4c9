"""What a run recorded: its Timeline as it is explained, and the machines that it was predicted on."""

from __future__ import annotations

from shoal.cluster import Cluster
from shoal.run import Run
from shoal.simulate.bubble import mark_bubbles
from shoal.timeline import Timeline

__all__ = ["measured_timeline", "recorded_cluster"]


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


def recorded_cluster(run: Run) -> Cluster | None:
    """The machines that a run was told it is on, or that its Plan was chosen for; None if it was not told.

    Raises:
        ClusterError: The description cannot be.
        ShoalError: run.json is malformed.
    """
    described = run.description.get("cluster")
    return None if described is None else Cluster.of(described, f"the cluster of {run.path}")

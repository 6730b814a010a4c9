"""Reading of a recorded run: its Timeline, ready to be explained, and its Cluster."""

from __future__ import annotations

from shoal.cluster import Cluster
from shoal.run import Run
from shoal.simulate.bubble import mark_bubbles
from shoal.timeline import Timeline


def measured_timeline(run: Run) -> Timeline:
    """Return the Timeline of the steps under the run's present Plan, with bubbles marked.

    A run that continued under another Plan, or on other ranks, names the first step of the present layout in
    `since_step`: averages over several layouts would describe none of them.

    Raises:
        ShoalError: A file of the run is malformed.
    """
    timeline = Timeline.read(run.timeline)
    since: int | None = run.description.get("since_step")
    return mark_bubbles(timeline if since is None else timeline.since_step(since))


def recorded_cluster(run: Run) -> Cluster | None:
    """Return the Cluster that a run was given, or that its Plan was chosen for; None if it had none.

    Raises:
        ClusterError: The description of the Cluster is invalid.
        ShoalError: run.json is malformed.
    """
    described = run.description.get("cluster")
    return None if described is None else Cluster.of(described, f"the cluster of {run.path}")

"""A simulated step as a picture: the forwards and backwards of each place along the pipeline."""

from __future__ import annotations

from dataclasses import replace

from shoal.plan.schedules.draw import Panel, draw_panels
from shoal.simulate.simulation import Simulation
from shoal.units import format_seconds


def picture(simulation: Simulation, title: str) -> str:
    """Return the first step as SVG, with the bubble that the breakdown has.

    Rows end where the step ends. What no box covers is bubble, exposed communication or the optimizer.

    Args:
        simulation: The simulated steps.
        title: Description of the picture, for readers who cannot see it.
    """
    breakdown, pace = simulation.breakdown, simulation._pace
    played = replace(
        simulation.played,
        starts=tuple(tuple(pace * start for start in row) for row in simulation.played.starts),
        stops=tuple(tuple(pace * stop for stop in row) for row in simulation.played.stops),
    )
    schedule, parts = played.schedule, breakdown.parts
    stages = f", {schedule.virtual} stages each" if schedule.virtual > 1 else ""
    caption = (
        f"{schedule.ranks} ranks{stages}, {schedule.microbatches} micro-batches: a step of "
        f"{format_seconds(parts.wall)}, bubble {parts.bubble / parts.wall:.1%}, exposed communication "
        f"{parts.exposed_communication / parts.wall:.1%}"
    )
    panel = Panel(
        played=played,
        caption=caption,
        ideal=max(each.parts.wall - each.parts.bubble for each in breakdown.ranks),
        end=parts.wall,
        label=format_seconds,
    )
    return draw_panels([panel], title)

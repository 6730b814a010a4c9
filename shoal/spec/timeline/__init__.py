"""Timelines: recorded or predicted spans of steps, on lanes of ranks.

Nouns: Span, Timeline, Breakdown. The recorder and the simulator write Timelines; `explain` sums one up into a
    Breakdown of the time; `write_chrome_trace` writes one for Perfetto. The report, the pages and the
    comparison of predicted with measured use these.
"""

from shoal.spec.timeline.breakdown import Breakdown, CollectiveFigures, Parts, RankBreakdown, explain
from shoal.spec.timeline.intervals import Meeting, meetings
from shoal.spec.timeline.series import NamedCollective, named_collectives
from shoal.spec.timeline.span import Kind, Lane, Purpose, Span
from shoal.spec.timeline.timeline import Timeline, chrome_trace, write_chrome_trace

__all__ = [
    "Breakdown",
    "CollectiveFigures",
    "Kind",
    "Lane",
    "Meeting",
    "NamedCollective",
    "Parts",
    "Purpose",
    "RankBreakdown",
    "Span",
    "Timeline",
    "chrome_trace",
    "explain",
    "meetings",
    "named_collectives",
    "write_chrome_trace",
]

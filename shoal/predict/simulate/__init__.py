"""Simulation of a Plan's schedule in time.

`simulate` plays a Plan's steps: the schedule's table and the costs of blocks, collectives and links make a
`Simulation`, which has a Timeline like that of a recorded run. `traffic_of` lists what a rank communicates,
and by which algorithm. `measured_timeline` reads the Timeline of a run, `mark_bubbles` marks the idle time
that its pipeline schedule forced, `stage_times` says how long each stage works, and `picture` draws a step.
`course_of` simulates workers that are not equally fast. `failure_courses` play long runs whose nodes fail.
`Prediction` is of a run.
Imports no torch.
"""

from shoal.predict.simulate.async_workers import Course, Meeting, Uneven, course_of, meeting_of, uneven_course
from shoal.predict.simulate.bubble import (
    StageTimes,
    mark_bubbles,
    measured_timeline,
    recorded_cluster,
    stage_times,
)
from shoal.predict.simulate.engine import BUBBLE
from shoal.predict.simulate.failures import (
    LOSSES,
    Courses,
    FailureCourse,
    FailureModel,
    Tail,
    failure_course,
    failure_courses,
)
from shoal.predict.simulate.prediction import Prediction, kinds_compared
from shoal.predict.simulate.simulation import Simulation, picture, simulate
from shoal.predict.simulate.step_time import played_parts, played_passes, played_seconds
from shoal.predict.simulate.traffic import Communication, Traffic, traffic_of

__all__ = [
    "BUBBLE",
    "LOSSES",
    "Communication",
    "Course",
    "Courses",
    "FailureCourse",
    "FailureModel",
    "Meeting",
    "Prediction",
    "Simulation",
    "StageTimes",
    "Tail",
    "Traffic",
    "Uneven",
    "course_of",
    "failure_course",
    "failure_courses",
    "kinds_compared",
    "mark_bubbles",
    "measured_timeline",
    "meeting_of",
    "picture",
    "played_parts",
    "played_passes",
    "played_seconds",
    "recorded_cluster",
    "simulate",
    "stage_times",
    "traffic_of",
    "uneven_course",
]

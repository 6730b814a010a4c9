"""The program that sends signals to trainings in each phase."""

from __future__ import annotations

import pytest
import stops


@pytest.mark.long
@pytest.mark.parametrize("launcher", stops.LAUNCHERS)
@pytest.mark.parametrize(
    ("phase", "name"), [("data", "SIGTERM"), ("step", "SIGUSR1"), ("validation", "SIGHUP")]
)
def test_a_signal_to_every_process_loses_no_step(launcher, phase, name):
    line = stops.become_of(launcher, phase, "every process", name)
    assert line["right"], line

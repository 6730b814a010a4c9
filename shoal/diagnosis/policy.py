"""The thresholds of a verdict. `docs/concepts/verdict.md` explains them and prints this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The thresholds of a verdict.

    Attributes:
        warm_up: Steps at the start of the timeline that are not judged.
        fewest_steps: Steps that a verdict needs after these; with fewer it abstains.
        most_steps: The last steps of the timeline that are judged, if no first step is given.
        bottleneck: Share of the step from which on a part other than compute is the bottleneck.
        late: Share of the step by which a rank's own work must exceed that of its peers, in the median step,
            to call the rank a persistent straggler.
        late_stage: The same share where no other rank does the same work, so that stages are compared.
        late_link: Share of the step that slow transfers must cost together.
        late_step: Share of the step by which one step must exceed the rank's typical excess to be a late
            step.
        late_cost: Share of the window's time that late steps must cost together.
        noise_cost: The same share where late steps are irregular or fewer than three: a busy machine has
            such steps too.
        certainty: Number of standard errors by which an excess must differ from zero.
        spike: Number of standard deviations by which a late step must differ from the typical step.
        held_up: Share of the excess in which other ranks must be idle, because this rank has not arrived.
        explained: Share of the excess that one phase must explain to be its cause.
        chance: Probability with which random pauses of the machine would hit one phase only, in all late
            steps; if it is larger, the machine is the cause and not the phase.
        proportional: Ratio of the relative excesses of forward and backward from which on both are slow, so
            that the machine is slow and not a phase.
        late_often: Share of the judged steps from which on late steps are persistent.
        periodic: Autocorrelation from which on late steps are periodic.
        slow_link: Ratio of transfer times, to the same transfer in other groups, from which on a link is
            slow.
        slow_predicted: The same ratio where a transfer has only a prediction to be held to, which may be
            wrong itself.
        least_predicted: Seconds that such a transfer must be predicted to take at least: the latency of
            shorter ones is the host's.
        whole: Share of the collectives of which all members must be found in the timeline.
    """

    warm_up: int = 2
    fewest_steps: int = 20
    most_steps: int = 200
    bottleneck: float = 0.10
    late: float = 0.05
    late_stage: float = 0.08
    late_link: float = 0.03
    late_step: float = 0.08
    late_cost: float = 0.03
    noise_cost: float = 0.06
    certainty: float = 4.0
    spike: float = 3.5
    held_up: float = 0.3
    explained: float = 0.5
    chance: float = 0.05
    proportional: float = 0.4
    late_often: float = 0.7
    periodic: float = 0.4
    slow_link: float = 1.3
    slow_predicted: float = 2.0
    least_predicted: float = 0.0005
    whole: float = 0.9


POLICY = Policy()
"""The thresholds that `shoal report` uses."""

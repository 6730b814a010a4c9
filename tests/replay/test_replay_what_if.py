"""Replays: of a measured timeline they give its times, and of one with a known delay what the delay costs."""

from statistics import fmean

import pytest

from shoal.analyze.diagnosis import Cause
from shoal.analyze.diagnosis.compute_time import PHASES
from shoal.analyze.replay import (
    Arrive,
    Await,
    Collective,
    Graph,
    Work,
    critical_path,
    graph_of,
    play,
    what_if,
)
from shoal.errors import ShoalError
from shoal.predict.simulate import mark_bubbles
from shoal.spec.timeline import Timeline
from shoal.testing.delays import Delay, Jitter, Layout, delayed_timeline

STEADY = Jitter([[dict.fromkeys(PHASES, 1.0)]])
UNSTEADY = Jitter([[dict.fromkeys(PHASES, 1 + (step * 7 % 5) / 20) for step in range(11)] for _ in range(4)])
LAYOUTS = (Layout(2), Layout(4), Layout(2, 2), Layout(2, 1, 2), Layout(1, 2, 2))
DELAY = 0.1 * 0.099  # seconds: a tenth of the undisturbed step of the played training


def measured(timeline, graph):
    ends = [timeline.step(rank, graph.steps[-1]).stop for rank in timeline.ranks]
    return max(ends) - min(timeline.step(rank, graph.steps[0]).start for rank in timeline.ranks)


def saved(found, kind):
    return {each.what: each.seconds for each in found.savings if each.kind == kind}


# --- playing ---------------------------------------------------------------------------------------------


def test_a_collective_begins_when_the_last_has_arrived_and_the_one_before_has_ended():
    collectives = [
        Collective("all_reduce:0", "", 0, 0, (0, 1), {0: 4.0, 1: 4.0}),
        Collective("all_reduce:1", "", 0, 0, (0, 1), {0: 1.0, 1: 2.0}, after=0),
    ]
    programs = {
        0: [
            Work("forward", "", 0, 1.0),
            Arrive(0),
            Work("backward", "", 0, 1.0),
            Arrive(1),
            Await(0),
            Await(1),
        ],
        1: [Work("forward", "", 0, 3.0), Arrive(0), Arrive(1), Await(1), Work("optimizer", "", 0, 1.0)],
    }
    played = play(Graph(programs, {0: 0.0, 1: 0.0}, collectives, (0,)))
    assert played.begins == [3.0, 7.0]
    assert played.ends == [{0: 7.0, 1: 7.0}, {0: 8.0, 1: 9.0}]
    assert played.stops[0][-1] == 8.0
    assert played.seconds == 10.0
    path = {(part.rank, part.what): part.seconds for part in critical_path(played)}
    assert path == {(1, "forward"): 3.0, (None, "all_reduce"): 6.0, (1, "optimizer"): 1.0}


def test_ranks_that_wait_for_each_other_in_a_circle_are_an_error():
    collectives = [Collective(str(each), "", 0, 0, (0, 1), {0: 0.0, 1: 0.0}) for each in range(2)]
    programs = {0: [Arrive(0), Await(0), Arrive(1)], 1: [Arrive(1), Await(1), Arrive(0)]}
    with pytest.raises(ShoalError, match="never ends"):
        play(Graph(programs, {0: 0.0, 1: 0.0}, collectives, (0,)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_replay_without_a_change_has_the_measured_times(layout):
    timeline = mark_bubbles(delayed_timeline(layout, 12, UNSTEADY, 3, Delay(0, Cause.BACKWARD, 0.3)))
    graph = graph_of(timeline)
    assert graph.steps == tuple(range(3, 13))
    played = play(graph)
    assert played.seconds == pytest.approx(measured(timeline, graph), rel=1e-4)
    for rank in timeline.ranks:
        assert played.stops[rank][-1] == pytest.approx(timeline.step(rank, 12).stop, rel=1e-4)
    assert sum(part.seconds for part in critical_path(played)) == pytest.approx(played.seconds, rel=0.01)


def test_a_timeline_without_one_rank_replays_as_measured():
    whole = delayed_timeline(Layout(4), 10, UNSTEADY, 0)
    timeline = Timeline(span for span in whole if span.rank != 3)
    graph = graph_of(timeline)
    assert play(graph).seconds == pytest.approx(measured(timeline, graph), rel=1e-4)


def test_the_longest_row_of_steps_is_replayed():
    timeline = delayed_timeline(Layout(2), 12, STEADY, 0)
    assert graph_of(timeline, [2, 3, 5, 6, 7, 9]).steps == (5, 6, 7)
    with pytest.raises(ShoalError, match="nothing to replay"):
        graph_of(timeline, [99])


# --- what if ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", [Cause.LOADER, Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER])
def test_without_the_slow_rank_its_delay_is_saved_and_without_others_nothing(cause):
    found = what_if(delayed_timeline(Layout(4), 12, STEADY, 0, Delay(2, cause, 0.1)))
    by_rank = saved(found, "rank")
    assert by_rank.pop("rank 2 works as its peers do") == pytest.approx(DELAY, rel=0.03)
    assert max(by_rank.values()) < 0.02 * DELAY
    assert found.replayed == pytest.approx(found.seconds, rel=1e-4)
    # In the ideal all four do a quarter of the delay each.
    assert found.ideal == pytest.approx(found.seconds - 0.75 * DELAY, rel=0.01)
    assert found.slowdown == pytest.approx(found.seconds / found.ideal)
    on_rank = [part.rank for part in found.path if part.seconds > 0.1 * found.seconds]
    assert set(on_rank) == {2}


def test_a_slow_link_costs_what_its_transfers_take_longer():
    layout, delay = Layout(2, 2), Delay(3, Cause.LINK, 0.1)
    slow, clean = (what_if(delayed_timeline(layout, 12, STEADY, 0, each)).seconds for each in (delay, None))
    by_group = saved(what_if(delayed_timeline(layout, 12, STEADY, 0, delay)), "link")
    slowest = sorted(by_group, key=lambda what: -by_group[what])[:2]
    assert slowest == sorted(slowest, key=lambda what: -by_group[what])
    assert {what.split(" are")[0] for what in slowest} == {
        "transfers among ranks 2, 3",
        "transfers among ranks 1, 3",
    }
    assert sum(by_group.values()) == pytest.approx(slow - clean, rel=0.2)


def test_a_slow_stage_costs_what_it_takes_longer_than_the_others():
    layout = Layout(1, 1, 2)
    clean = what_if(mark_bubbles(delayed_timeline(layout, 12, STEADY, 0)))
    slow = what_if(mark_bubbles(delayed_timeline(layout, 12, STEADY, 0, Delay(1, Cause.FORWARD, 0.2))))
    cost = saved(slow, "stage")["stage 1 works as the other stages do"]
    assert cost == pytest.approx(slow.seconds - clean.seconds, rel=0.1)
    assert fmean(saved(clean, "stage").values()) < 0.02 * cost


def test_transfers_and_waits_cost_at_most_what_is_exposed():
    found = what_if(delayed_timeline(Layout(2, 2), 12, STEADY, 0))
    network = saved(found, "network")["all transfers take no time"]
    waits = saved(found, "wait")
    assert max(waits.values()) <= network * 1.001
    assert network == pytest.approx(8 * 0.0005 + 0.006 + 0.0002, rel=0.2)
    assert saved(found, "work")["no data wait"] == pytest.approx(
        0.003, rel=0.01
    )  # the loader's and the copy's

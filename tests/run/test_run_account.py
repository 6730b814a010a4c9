"""The account of a run: every second of its wall clock has one cause, whatever happened to the run."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.predict.cost.outlook import account_summary
from shoal.spec.cluster import Cluster
from shoal.spec.run import CAUSES, FollowedAccount, Ledger, Run, account, read_events, write_event


def began(time, launched, ranks=2):
    return {"time": time, "event": "began", "launched": launched, "ranks": ranks}


def spent(time, step, **seconds):
    return {"time": time, "event": "spent", "step": step, "seconds": seconds}


def loaded(time, step):
    return {"time": time, "event": "loaded", "step": step}


def event(time, name):
    return {"time": time, "event": name}


# A run of 10 steps of a second, which saves step 4, loses a rank in step 7, and is resumed 20 s later.
BROKEN = [
    began(102, launched=100),
    loaded(104, 0),
    spent(112, 6, start=0.5, load=0.5, steps=7, compile=1, save=0.5, validation=0.25, other=0.25),
    event(113.5, "failed"),
    event(114, "failed"),  # the launcher notes it too
    event(115, "ended"),
    began(138, launched=135),
    loaded(140, 4),
    spent(147, 10, start=0.5, load=1.5, steps=6, other=1),
    event(147, "ended"),
    event(148, "ended"),
]


def test_each_second_of_a_run_that_failed_and_went_on_has_its_cause():
    found = Ledger(BROKEN).account()
    assert (found.began, found.wall) == (100, 48)
    steps = 7 * 4 / 6 + 6
    assert found.steps == pytest.approx(steps)
    assert {name: seconds for name, seconds in found.lost.items() if seconds} == pytest.approx(
        {
            "start": 2 + 0.5,
            "compile": 1,
            "load": 0.5 + 1.5,
            "save": 0.5,
            "validation": 0.25,
            "detection": 1.5,
            "recovery": 1.5 + 3 + 0.5,
            "repeated": 7 * 2 / 6,
            "waiting": 20,
            "other": 0.25 + 1 + 1,
        }
    )
    assert (found.step, found.count, found.failures, found.launches) == (10, 10, 1, 2)
    assert found.device_seconds == pytest.approx(2 * (48 - 20))
    assert found.goodput == pytest.approx(steps / 48)


def test_steps_that_nobody_wrote_down_count_if_the_next_ranks_hold_their_result():
    killed = [began(1, 0), loaded(1, 0), spent(11, 10, steps=10), event(14.5, "lost"), began(15, 0, ranks=1)]
    kept = Ledger([*killed, loaded(15, 13), spent(16, 14, steps=1)]).account()
    assert kept.steps == pytest.approx(14)
    assert kept.lost["detection"] == pytest.approx(0.5)
    older = Ledger([*killed, loaded(15, 8), spent(16, 9, steps=1)]).account()
    assert (older.steps, older.lost["repeated"], older.lost["detection"]) == pytest.approx((9, 2, 3.5))
    assert kept.device_seconds == pytest.approx(2 * 14.5 + 1.5)


def test_a_run_that_was_killed_at_once_waits_until_its_next_command():
    found = Ledger([began(1, 0), loaded(1, 0), spent(5, 4, steps=4), began(30, 27), spent(31, 5, steps=1)])
    told = found.account()
    assert (told.lost["waiting"], told.lost["recovery"], told.failures, told.launches) == (22, 3, 1, 2)


def test_a_failure_before_the_first_step_is_no_failure_of_the_machines():
    found = Ledger([began(3, 0), event(5, "failed"), event(6, "ended"), began(12, 10)]).account()
    assert (found.failures, found.lost["start"], found.lost["recovery"]) == (0, 3, 3)


@st.composite
def stories(draw):
    """Events in any order, with times that may go back."""
    kinds = st.sampled_from(["began", "loaded", "spent", "failed", "lost", "ended", "left", "other"])
    times = st.floats(0, 1000, allow_nan=False)
    parts = st.dictionaries(st.sampled_from([*CAUSES, "steps", "unknown"]), st.floats(0, 50), max_size=4)
    return [
        {
            "time": draw(times),
            "event": draw(kinds),
            "launched": draw(times),
            "ranks": draw(st.integers(0, 9)),
            "step": draw(st.integers(0, 50)),
            "seconds": draw(parts),
        }
        for _ in range(draw(st.integers(0, 12)))
    ]


@given(stories())
def test_whatever_is_told_the_parts_sum_to_the_wall_clock(told):
    found = Ledger(sorted(told, key=lambda each: each["time"])).account()
    if found is not None:
        assert found.steps + sum(found.lost.values()) == pytest.approx(found.wall, abs=1e-6)
        assert min(found.steps, *found.lost.values()) >= -1e-9
        assert 0 <= found.count <= max(found.step, found.count)


@pytest.mark.parametrize(
    "wrong",
    [
        {"event": "spent", "step": 9, "seconds": {"steps": -1}},
        {"event": "spent", "step": 9, "seconds": {"steps": math.nan}},
        {"event": "spent", "step": -9, "seconds": {}},
        {"event": "spent", "step": 9, "seconds": [1]},
        {"event": "began", "launched": -math.inf, "ranks": 1},
        {"event": "began", "launched": 1, "ranks": -1},
        {"event": "loaded", "step": "x"},
        {"event": "loaded"},
        {"event": 3},
        {},
    ],
)
def test_an_event_that_is_malformed_changes_nothing(wrong):
    assert Ledger([*BROKEN, {"time": 149, **wrong}]).account() == Ledger(BROKEN).account()


def test_events_are_read_whole_from_both_files_and_as_they_come(tmp_path):
    run = Run.create(tmp_path / "one", {"config": {"steps": 12}})
    assert account(run) is None
    followed = FollowedAccount(run)
    assert followed.look() is None
    for told in BROKEN[:5]:
        values = {name: value for name, value in told.items() if name not in ("time", "event")}
        write_event(run.events_file, told["event"], at=told["time"], **values)
    with run.events_file.open("a") as file:
        file.write('{"time": 1, "ev')  # torn by a process that was killed
    assert followed.look() == account(run) == Ledger(BROKEN[:5]).account()
    for told in BROKEN[5:]:
        values = {name: value for name, value in told.items() if name not in ("time", "event")}
        write_event(run.events_file, told["event"], at=told["time"], **values)
    assert account(run.path) == followed.look() == Ledger(BROKEN).account()
    run.members_file.write_text(json.dumps({"time": 110, "event": "lost", "members": [1]}) + "\n[1]\nnull\n")
    assert len(read_events([run.events_file, run.members_file])) == len(BROKEN) + 1


def test_the_cost_to_go_loses_as_much_as_the_cost_so_far():
    cluster = Cluster.parse("dgx-h100:8").replace(price=3.0)
    found = account_summary(Ledger(BROKEN).account(), {"config": {"steps": 30}}, cluster)
    assert found["device_hours"] == pytest.approx(2 * 28 / 3600)
    assert found["dollars"] == pytest.approx(3 * 2 * 28 / 3600)
    left = 20 * (48 - 2.5 - 1 - 20) / 10  # without start, compile and waiting
    assert found["seconds_left"] == pytest.approx(left)
    assert found["dollars_left"] == pytest.approx(3 * 2 * left / 3600)
    unknown = account_summary(Ledger(BROKEN).account(), {}, cluster.replace(price=0.0))
    assert unknown["dollars"] is unknown["seconds_left"] is unknown["dollars_left"] is None
    assert account_summary(None, {}) is None

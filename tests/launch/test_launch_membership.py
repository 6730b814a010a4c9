"""Generations of members: the launcher makes them, and all members enter the same ones."""

from __future__ import annotations

import random
import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore

from shoal.errors import CommunicationError
from shoal.launch.elastic import elastic_rank as module
from shoal.launch.elastic.elastic_rank import Membership
from shoal.launch.elastic.roster import Roster


def members_of(store, count, after=-1, abort=lambda: None):
    return [Membership(member, lambda: store, after, abort) for member in range(count)]


def entered(memberships, seconds=10):
    """What each member enters, if all look at once."""
    found = {}
    threads = [
        threading.Thread(target=lambda each=each: found.update({each.member: each.next(seconds)}))
        for each in memberships
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_members_enter_a_generation_together():
    store = HashStore()
    roster, members = Roster(store), members_of(store, 3)
    roster.announce([0, 1, 2], is_broken=False)
    found = entered(members)
    assert {each.number for each in found.values()} == {0}
    roster.announce([2, 0], is_broken=True)
    assert entered([members[0]], 0.1)[0] is None  # member 2 is not here yet
    found = entered([members[0], members[2]])
    assert [found[member].members.index(member) for member in (0, 2)] == [1, 0]


def test_members_that_come_at_any_time_do_not_enter_different_generations():
    """Members are slow, and generations follow each other: whoever enters one finds all its members there."""
    generator = random.Random(0)
    store, log, lock = HashStore(), [], threading.Lock()
    roster, members = Roster(store), members_of(store, 4)
    last = 12

    def live(membership):
        own = random.Random(membership.member)
        while membership.generation.number < last:
            found = membership.next(20)
            assert found is not None
            with lock:
                log.append((found.number, membership.member))
            time.sleep(own.random() * 0.03)

    threads = [threading.Thread(target=live, args=[each]) for each in members]
    for thread in threads:
        thread.start()
    for _ in range(last + 1):
        roster.announce([0, 1, 2, 3], is_broken=False)
        time.sleep(generator.random() * 0.05)
    for thread in threads:
        thread.join()
    by_generation = {number: {member for each, member in log if each == number} for number, _ in log}
    assert all(found == {0, 1, 2, 3} for found in by_generation.values())
    assert last in by_generation


def test_members_that_others_wait_for_are_known():
    store = HashStore()
    roster, members = Roster(store), members_of(store, 3)
    roster.announce([0, 1, 2], is_broken=False)
    assert roster.absent() == []  # nobody waits yet
    assert entered([members[1]], 0.05)[1] is None
    assert roster.absent() == [0, 2]
    assert all(entered(members).values())
    assert roster.absent() == []
    roster.announce([0, 2], is_broken=True)
    assert entered([members[0]], 0.05)[0] is None
    assert roster.absent() == [2]


def test_members_do_not_wait_for_a_generation_after_the_end():
    store = HashStore()
    roster, members = Roster(store), members_of(store, 2)
    roster.announce([0, 1], is_broken=False)
    assert all(entered(members).values())
    roster.end()
    assert entered(members, seconds=600) == {0: None, 1: None}
    assert not members[0].leads_next(600)


def test_a_member_that_has_never_trained_may_leave_while_it_waits():
    store = HashStore()
    roster = Roster(store)
    roster.announce([0], is_broken=False)
    late, stays = Membership(1, lambda: store, 0, lambda: None), members_of(store, 1)[0]
    assert late.next(60, lambda: True) is None
    roster.announce([0, 1], is_broken=False)
    stays.next(0.1)  # it is here
    assert late.next(10, lambda: True).number == 1  # the others wait for it
    roster.announce([0], is_broken=True)
    began = time.monotonic()
    assert late.next(0.2, lambda: True) is None
    assert time.monotonic() - began > 0.2  # it has state


def test_a_broken_generation_ends_communication_once_and_one_that_grows_does_not():
    store, aborted = HashStore(), []
    roster = Roster(store)
    (member,) = members_of(store, 1, abort=lambda: aborted.append(1))
    roster.announce([0], is_broken=False)
    member.ready()
    assert roster.is_ready(0)
    assert member.next(10).number == 0
    roster.announce([0], is_broken=False)
    until = time.monotonic() + 120
    while not member.is_due and time.monotonic() < until:
        time.sleep(0.01)
    assert member.is_due
    assert not aborted
    assert member.next(10).number == 1
    assert not member.is_due
    roster.announce([0], is_broken=True)
    assert member.leads_next(10)
    until = time.monotonic() + 120
    while not aborted and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(aborted) == 1
    member.close()


def test_a_member_stands_by_until_members_change_or_it_is_asked_to_leave_or_all_is_over():
    store = HashStore()
    roster = Roster(store)
    (member,) = members_of(store, 1)
    roster.announce([0], is_broken=False)
    member.ready()
    member.next(10)
    asked = iter([False, False, True])
    member.stand_by(lambda: next(asked))
    assert not member.is_due
    threading.Timer(0.2, roster.announce, [[0]], {"is_broken": False}).start()
    member.stand_by(lambda: False)
    assert member.is_due
    assert member.next(10).number == 1
    roster.end()
    member.stand_by(lambda: False)
    member.close()


def test_of_a_generation_with_a_member_that_is_started_again_the_first_that_stayed_leads():
    """The launcher may be quick enough that nobody sees a generation without it."""
    store = HashStore()
    roster, members = Roster(store), members_of(store, 3)
    roster.announce([0, 1, 2], is_broken=False)
    assert all(entered(members).values())
    roster.expect(0)
    roster.announce([0, 1, 2], is_broken=True)
    again = Membership(0, lambda: store, 0, lambda: None)
    for member in (again, *members[1:]):
        member.ready()
    assert [member.leads_next(10) for member in (again, *members[1:])] == [False, True, False]
    for member in (again, *members[1:]):
        member.close()


@pytest.mark.parametrize(("seconds", "starting", "number"), [(1000.0, 1, 2), (0.0, 1, 1), (1000.0, 0, 1)])
def test_a_member_whose_steps_take_long_waits_for_those_that_are_started_again(seconds, starting, number):
    store = HashStore()
    roster, members = Roster(store), members_of(store, 2)
    roster.announce([0, 1], is_broken=False)
    assert all(entered(members).values())
    stays = members[0]
    stays.step_seconds = seconds
    roster.announce([0], is_broken=True, starting=starting)
    if number == 1:
        assert stays.next(10).number == 1
        return
    again = Membership(1, lambda: store, 0, lambda: None)
    threads = [
        threading.Thread(target=again.next, args=[10]),
        threading.Timer(0.1, roster.announce, [[0, 1]], {"is_broken": False}),
    ]
    for thread in threads:
        thread.start()
    assert stays.next(10).number == 2
    for thread in threads:
        thread.join()


def wait_until(condition):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


NCCL = "cpu:gloo,cuda:nccl"


def test_a_process_whose_group_reports_nothing_ends_with_its_generation_and_none_is_aborted(monkeypatch):
    """An abort would let the device go on with what the collective left."""
    store, aborted, ended = HashStore(), [], []
    monkeypatch.setattr(module, "_end", lambda: ended.append(1))
    roster = Roster(store)
    (member,) = members_of(store, 1, abort=lambda: aborted.append(1))
    roster.announce([0], is_broken=False)
    member.ready()
    assert member.next(10).number == 0
    assert not roster.starts_again
    member.begin(NCCL)
    assert roster.starts_again
    roster.announce([], is_broken=True)
    wait_until(lambda: ended)
    assert not aborted
    member.close()


def test_a_process_between_two_groups_does_not_end_and_goes_to_the_next_generation(monkeypatch):
    store = HashStore()
    monkeypatch.setattr(module, "_end", lambda: pytest.fail("it has no group"))
    roster = Roster(store)
    (member,) = members_of(store, 1)
    roster.announce([0], is_broken=False)
    member.ready()
    member.next(10)
    member.begin(NCCL)
    member.leave()
    roster.announce([], is_broken=True)
    wait_until(lambda: member.is_due)
    assert not roster.is_here(0)
    assert member.next(0.05) is None
    assert roster.is_here(0)
    roster.announce([0], is_broken=False)
    assert member.next(10).number == 2
    member.close()


def test_no_group_that_reports_nothing_is_formed_with_a_member_that_is_lost_already():
    store = HashStore()
    roster = Roster(store)
    (member,) = members_of(store, 1)
    roster.announce([0], is_broken=False)
    member.ready()
    member.next(10)
    roster.announce([], is_broken=True)
    wait_until(lambda: member.is_due)
    with pytest.raises(CommunicationError, match="lost before"):
        member.begin(NCCL)
    assert not member.starts_again
    member.close()


@pytest.mark.parametrize(
    ("failures", "waited", "missed"),
    [
        (["", "", ""], 0, []),
        (["TIMEOUT", "", "TIMEOUT"], 2, [1]),
        (["TIMEOUT", "", ""], 1, []),  # others may wait too, since later
        (["COMM_ERROR", "", "COMM_ERROR"], 0, []),
    ],
)
def test_a_member_that_the_most_have_waited_for_hangs(failures, waited, missed):
    store = HashStore()
    roster = Roster(store)
    members = [
        Membership(number, lambda: store, -1, lambda: None, lambda text=text: text)
        for number, text in enumerate(failures)
    ]
    roster.announce([0, 1, 2], is_broken=False)
    assert all(entered(members).values())
    for member in members:
        member.begin(NCCL)
        member.ready()
    if any(failures):
        wait_until(roster.is_told_broken)
    wait_until(lambda: roster.waited()[0] >= waited)
    time.sleep(0.2)
    assert roster.waited() == (waited, missed if waited else [])
    for member in members:
        member.close()


def test_a_generation_does_not_see_that_a_watchdog_of_an_earlier_one_asked_all_to_end():
    """NCCL's watchdog leaves this in the store, and a later group that sees it ends eight minutes later."""
    store = HashStore()
    roster = Roster(store)
    roster.announce([0], is_broken=False)
    store.set("exception_dump", "0")
    roster.announce([0], is_broken=True)
    assert not store.check(["exception_dump"])

"""Groups that fail although no rank has ended: who is left out, and when the run ends."""

from __future__ import annotations

from pathlib import Path

from torch._C._distributed_c10d import HashStore

from shoal.launch.elastic.elastic_launcher import LostGroup
from shoal.launch.elastic.elastic_rank import Membership
from shoal.launch.elastic.host import Host
from shoal.launch.elastic.linked_hosts import LinkedHosts
from shoal.launch.elastic.roster import Generation, Roster
from shoal.launch.local.outcome import Causes


def lost(roster: Roster, store: HashStore, steps: int) -> None:
    """A group that fails after some steps."""
    roster.announce([0, 1], is_broken=True)
    for number in range(2):  # who tells first counts
        member = Membership(number, lambda: store, -1, lambda: None)
        member.generation, member.steps = Generation(roster.newest, [0, 1]), steps + number
        member.tell_broken()


def test_a_group_that_is_lost_twice_without_a_step_between_ends_the_run(tmp_path: Path) -> None:
    store = HashStore()
    roster = Roster(store)
    group = LostGroup(roster, Causes(tmp_path), 7.0, None)
    for steps, restarts, told in (
        (-1, 3, ""),  # before the first step
        (4, 2, ""),
        (9, 1, ""),
        (9, 1, "the ranks have lost each other twice after step 9, without a step between"),
        (12, 0, "the ranks have lost each other after step 12, and no restart is left"),
        (3, 5, "twice after step 3, without a step between"),  # it went on from an older state
    ):
        lost(roster, store, steps)
        assert roster.steps_when_broken() == steps
        why = group.why_stuck(restarts)
        assert told in why
        assert bool(told) == bool(why)
        assert "timeout=7 s" in (why or "timeout=7 s")


def test_of_hosts_that_cannot_reach_each_other_the_one_that_reaches_fewest_is_named(tmp_path: Path) -> None:
    own = Host(None, "a", "10.0.0.1", 1)
    linked = LinkedHosts(own, 1, 4, tmp_path, {}, lambda session: None)
    others = [Host(None, name, f"10.0.0.{place}", 1, port=place) for place, name in enumerate("bcd", 2)]
    for place, host in enumerate(others, 1):
        linked._places[place] = host
        host.link = object()  # type: ignore[assignment]
    assert linked.apart() is None
    others[0].apart = [(others[1].address, others[1].port)]
    assert linked.apart() in [(others[0], others[1]), (others[1], others[0])]
    others[2].apart = [(others[1].address, others[1].port), ("10.0.0.9", 9)]  # one that has left
    assert (pair := linked.apart()) is not None
    assert pair[0] is others[1]

"""The measurement, with ranks that are real and contestants that are not always right."""

from __future__ import annotations

import functools
import itertools
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shoal.errors import CommunicationError
from shoal.machine.bench import COLLECTIVES, Settings
from shoal.machine.bench.contestants import Buffers, Contestant, UnsupportedError, enter
from shoal.machine.bench.contestants.contestant import PrivateMemory
from shoal.machine.bench.measure import measure, run
from shoal.machine.bench.settings import Ranks


class Local(Contestant):
    """Ranks that get what they would get, without talking; the base of those that err."""

    def __init__(self, log=None):
        self.log = [] if log is None else log

    def empty(self, elements, like):
        return torch.empty(elements, dtype=like.dtype)

    def operation(self, collective, buffers, op):
        return functools.partial(self.do, buffers)

    def do(self, buffers):
        self.log.append(self)
        dist.all_reduce(buffers.output)

    def finish(self):
        pass

    def version(self):
        return "local"


class OneWrong(Local):
    """Gets one element wrong on the last rank."""

    def do(self, buffers):
        super().do(buffers)
        if dist.get_rank() == dist.get_world_size() - 1:
            buffers.output[5] += 1


class Forgetful(Local):
    """Writes nothing."""

    def do(self, buffers):
        pass


class Lacking(Local):
    """Has no collective at all."""

    def operation(self, collective, buffers, op):
        raise UnsupportedError("it never learnt this")


class LackingOnOneRank(Local):
    """Cannot allocate on the last rank, say."""

    def operation(self, collective, buffers, op):
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("no room\nfor more")
        return lambda: None


class SlowOnOneRank(Local):
    """Takes 20 ms on the last rank and none on the others."""

    def do(self, buffers):
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.02)


def measured(contestants, **changed):
    """The rows, in a rank of a group."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), 0)
    fields = {"collectives": ("all_reduce",), "backends": ("gloo",), "sizes": (4096,), "rounds": 2}
    settings = Settings(**{**fields, **changed})
    return [row for point in measure(settings, contestants, ranks) for row in point]


def with_gloo(**changed):
    return measured({"gloo": enter("gloo", algorithms={}, local_rank=0)}, **changed)


def with_kinds(*kinds):
    return {row.backend: row for row in measured({kind.__name__: kind() for kind in kinds})}


def order_of_turns():
    log = []
    contestants = {name: Local(log) for name in ("first", "second", "third")}
    measured(contestants, rounds=4)
    names = {contestant: name for name, contestant in contestants.items()}
    turns = [names[contestant] for contestant in log]
    return [name for name, _ in itertools.groupby(turns)]


@pytest.mark.parametrize("count", [2, 3])
def test_every_collective_of_gloo_is_measured_and_right(ranks, count):
    results = ranks.run(with_gloo_everywhere, count)
    assert results[0] == results[-1], "all ranks know the same"
    rows = results[0]
    assert [row.collective for row in rows] == [name for name in COLLECTIVES for _ in sizes_of(name)]
    for row in rows:
        assert row.problem is None
        assert row.wrong == 0
        assert len(row.seconds) == 2
        assert min(row.seconds) > 0
        assert row.iterations >= 3
        assert row.ranks == count


def with_gloo_everywhere():
    return with_gloo(collectives=tuple(COLLECTIVES), sizes=(1, 1000))


def sizes_of(name):
    return (0,) if name == "barrier" else (1, 1000)


def rounded():
    return measured(
        {"local": Local()}, collectives=("all_reduce", "all_gather", "all_to_all"), sizes=(1, 1000)
    )


def test_a_size_is_rounded_down_to_elements_that_divide_but_not_to_none(ranks):
    rows = ranks.run(rounded, 3)[0]
    of = {(row.collective, row.bytes): row.count for row in rows}
    assert of["all_reduce", 1000] == 250
    assert of["all_gather", 996] == 249  # a multiple of 3 ranks
    assert of["all_reduce", 4] == 1
    assert of["all_to_all", 12] == 3


class Remembering(Local):
    """Notes which buffers it works on, and keeps them, so that no later ones get their addresses."""

    def do(self, buffers):
        self.log.append(buffers)
        dist.all_reduce(buffers.output)


def addresses_of_operations():
    """For reused and for fresh tensors of 1 MiB: how many operations there were, on how many buffers."""
    log = []
    reused, fresh = measured({"one": Remembering(log)}, sizes=(1 << 20,), rounds=1, fresh=True)
    assert not reused.fresh
    assert fresh.fresh
    assert (reused.wrong, fresh.wrong) == (0, 0)
    addresses = [buffers.output.data_ptr() for buffers in log]
    first = addresses.index(addresses[-1])  # the last operation is on a fresh one
    assert first == len(addresses) - 1
    return len(addresses), len(set(addresses)), fresh.iterations


def test_each_operation_on_fresh_tensors_has_its_own(ranks):
    for operations, buffers, iterations in ranks.run(addresses_of_operations, 2):
        assert iterations < buffers < operations


def bfloat16_minima():
    return with_gloo(collectives=("all_reduce", "reduce_scatter"), dtype="bfloat16", op="min")


def test_types_and_operators_reach_the_backend(ranks):
    for row in ranks.run(bfloat16_minima, 2)[0]:
        assert (row.dtype, row.op, row.bytes, row.count) == ("bfloat16", "min", 4096, 2048)
        assert (row.problem, row.wrong) == (None, 0)


def test_wrong_elements_are_counted_over_all_ranks(ranks):
    rows = ranks.run(with_kinds, 2, Local, OneWrong, Forgetful)[1]
    assert rows["Local"].wrong == 0
    assert rows["OneWrong"].wrong == 1
    assert rows["Forgetful"].wrong > 1000  # of 2 x 1024, but for those that are right by chance


def test_what_a_contestant_lacks_is_said_and_the_others_go_on(ranks):
    for rows in ranks.run(with_kinds, 2, Lacking, LackingOnOneRank, Local):
        assert rows["Lacking"].problem == "it never learnt this"
        assert rows["LackingOnOneRank"].problem in ("no room", "another rank could not do it")
        for name in ("Lacking", "LackingOnOneRank"):
            assert (rows[name].seconds, rows[name].wrong) == ((), None)
        assert rows["Local"].problem is None
        assert len(rows["Local"].seconds) == 2


def test_the_time_is_that_of_the_slowest_rank(ranks):
    for rows in ranks.run(with_kinds, 2, SlowOnOneRank):
        assert min(rows["SlowOnOneRank"].seconds) >= 0.02


def test_contestants_take_turns_in_each_round_and_in_reverse_in_every_other(ranks):
    order = ranks.run(order_of_turns, 2)[0]
    checks, warm_ups = ["first", "second", "third"], ["first", "second", "third"]
    rounds = ["first", "second", "third", "second", "first", "second", "third", "second", "first"]
    assert order == [*checks, *warm_ups, *rounds]  # the last of a round is the first of the next


def reported_of(kind):
    """What `run` reports and raises where every contestant is of a kind."""
    reported = []
    settings = Settings(collectives=("all_reduce",), backends=("gloo",), sizes=(4096,), rounds=1)
    with mock.patch("shoal.machine.bench.measure.enter", return_value=kind()):
        try:
            run(
                settings,
                Ranks(dist.get_rank(), dist.get_world_size(), 0),
                lambda points, facts: reported.extend([list(points), facts.versions]),
                None,
            )
        except CommunicationError as error:
            return reported, str(error)
    return reported, None


def test_a_wrong_result_is_an_error_after_the_report_of_rank_0(ranks):
    (reported, error), (silent, nothing) = ranks.run(reported_of, 2, OneWrong)
    assert [row.wrong for point in reported[0] for row in point] == [1]
    assert reported[1] == {"gloo": "local"}
    assert error.startswith("1 elements of results are wrong")
    assert (silent, nothing) == ([], None)
    assert [error for _, error in ranks.run(reported_of, 2, Local)] == [None, None]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
def test_private_memory_combines_the_parts_and_writes_them_where_the_collective_would(count, op):
    """Parts long enough for several blocks, the last of them not whole."""
    part = 40_000
    contestant = PrivateMemory(0, count)
    given = torch.randint(1, 4, (count * part,)).float()
    combine = {"sum": torch.sum, "min": torch.amin, "max": torch.amax, "product": torch.prod}[op]
    wanted = combine(given.view(count, part), 0)
    whole = given.clone()
    contestant.operation(COLLECTIVES["all_reduce"], Buffers(whole, whole), op)()
    assert whole.equal(wanted.repeat(count))
    one = torch.empty(part)
    contestant.operation(COLLECTIVES["reduce_scatter"], Buffers(given, one), op)()
    assert one.equal(wanted)

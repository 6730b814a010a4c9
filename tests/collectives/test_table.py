"""Which algorithm the table chooses, the table as a file, and its calibration."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.collectives.calibrate import calibrate
from shoal.collectives.table import Call, Table, built_in_table, load_table, save_table
from shoal.errors import ConfigError
from shoal.predict.cost import ALGORITHMS, COLLECTIVES, AlphaBeta

KEYS = sorted(ALGORITHMS)
costs = st.builds(AlphaBeta, alpha=st.floats(0, 1e-3), beta=st.floats(0, 1e-7))
tables = st.lists(costs, min_size=len(KEYS), max_size=len(KEYS)).map(
    lambda values: Table(dict(zip(KEYS, values, strict=True)))
)


@st.composite
def calls(draw):
    level, hosts = draw(
        st.sampled_from([("shared-memory", 1), *(("network", hosts) for hosts in range(1, 6))])
    )
    ranks = hosts * draw(st.integers(1, 6))
    widening, aggregated = draw(st.sampled_from([1, 2])), draw(st.booleans())
    return Call(draw(st.sampled_from(COLLECTIVES)), level, ranks, hosts, widening, 1, aggregated)


def plain_time(table, name, call, nbytes):
    """The formula of shoal.predict.cost, with what the table adds to it spelled out."""
    algorithm = ALGORITHMS[call.collective, name, call.level]
    cost = table.entries[call.collective, name, call.level]
    per_host = call.ranks // call.hosts if call.hosts > 1 else 1
    carried = nbytes * (call.widening if algorithm.forwards_sums else 1)
    seconds = algorithm.time(cost, call.ranks, carried, per_host)
    if name in ("hierarchical", "in-network"):
        halves = ("reduce_scatter", "all_gather")
        for inner in halves if call.collective == "all_reduce" else (call.collective,):
            key = (inner, "direct", "shared-memory")
            seconds += ALGORITHMS[key].time(table.entries[key], per_host, nbytes)
    return seconds


@given(tables, calls(), st.integers(0, 1 << 34))
def test_the_choice_is_the_least_of_all_predicted_times(table, call, nbytes):
    chosen = table.choices(call).choose(nbytes)
    names = table.candidates(call)
    assert chosen in names
    least = min(plain_time(table, name, call, nbytes) for name in names)
    # Where two lines nearly cross, rounding may make either the least.
    assert plain_time(table, chosen, call, nbytes) <= least * (1 + 1e-9)


@given(tables, calls())
def test_where_the_choice_changes_both_algorithms_are_the_quickest(table, call):
    choices = table.choices(call)
    for bound, *changing in zip(choices.bounds, choices.names, choices.names[1:], strict=False):
        least = min(plain_time(table, name, call, bound) for name in table.candidates(call))
        for name in changing:
            assert plain_time(table, name, call, bound) <= least * (1 + 1e-9)


def test_an_algorithm_that_is_the_quickest_between_two_sizes_alone_is_chosen_there():
    costs = {"double-tree": (1e-6, 1e-8), "halving-doubling": (1e-5, 1e-9), "ring": (1e-4, 1e-10)}
    table = Table({("all_reduce", name, "network"): AlphaBeta(*cost) for name, cost in costs.items()})
    call = Call("all_reduce", "network", 8, 8)
    assert table.choices(call).names == tuple(costs)
    assert [table.choose("all_reduce", "network", 8, 8, size) for size in (2_900, 3_000, 800_000)] == [
        "double-tree", "halving-doubling", "halving-doubling",
    ]  # fmt: skip


@given(tables, calls(), st.integers(0, 1 << 34))
def test_a_predicted_time_is_the_formula(table, call, nbytes):
    for name in table.candidates(call):
        expected = plain_time(table, name, call, nbytes)
        assert table.predict(name, call, nbytes) == pytest.approx(expected, rel=1e-12)


@given(tables, calls())
def test_choices_change_at_ascending_sizes(table, call):
    choices = table.choices(call)
    assert len(choices.names) == len(choices.bounds) + 1 == len(set(choices.names))
    assert list(choices.bounds) == sorted(choices.bounds)


def test_sums_of_16_bit_floats_count_double_where_partial_sums_travel():
    table, plain = built_in_table(), Call("all_reduce", "network", 4, 4)
    wide = plain._replace(widening=2)
    for name, factor in {"ring": 2, "halving-doubling": 2, "double-tree": 2, "two-shot": 1}.items():
        bytes_cost = table.predict(name, plain, 10**9) - table.predict(name, plain, 0)
        wide_cost = table.predict(name, wide, 10**9) - table.predict(name, wide, 0)
        assert wide_cost == pytest.approx(factor * bytes_cost)


def test_hierarchical_is_for_several_ranks_on_each_of_several_hosts():
    table = built_in_table()
    for ranks, hosts, offered in ((4, 2, True), (12, 3, True), (4, 4, False), (4, 1, False), (5, 2, False)):
        for collective in ("all_reduce", "all_gather", "reduce_scatter"):
            names = table.candidates(Call(collective, "network", ranks, hosts))
            assert ("hierarchical" in names) == offered


def test_in_network_is_for_hosts_with_an_aggregator_between_them():
    table = built_in_table()
    for ranks, hosts, aggregated in ((4, 4, True), (4, 2, True), (5, 2, True), (4, 4, False), (4, 1, True)):
        level = "network" if hosts > 1 else "shared-memory"
        names = table.candidates(Call("all_reduce", level, ranks, hosts, aggregated=aggregated))
        assert ("in-network" in names) == (aggregated and hosts > 1)
    # A ring takes 2 (n - 1)/n as long for the bytes of a large buffer, and more steps.
    call = Call("all_reduce", "network", 4, 4, aggregated=True)
    assert table.choices(call).choose(1 << 30) == "in-network"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_built_in_table_goes_from_one_shot_to_buffers_read_in_place(ranks):
    for collective in set(COLLECTIVES) - {"all_to_all"}:
        names = built_in_table().choices(Call(collective, "shared-memory", ranks)).names
        assert names in (("one-shot", "direct"), ("one-shot", "two-shot"))


def test_ranks_that_wait_for_cores_take_fewer_steps():
    """On two cores, 4 and 8 ranks were measured to reduce some 128 and 64 KiB as fast either way."""
    for ranks, turns, measured in ((4, 2, 128 << 10), (8, 4, 64 << 10)):
        call = Call("all_reduce", "shared-memory", ranks)
        (quiet,), (crowded,) = (
            built_in_table().choices(call._replace(turns=each)).bounds for each in (1, turns)
        )
        assert quiet < measured / 8
        assert measured / 2 < crowded < measured * 2


def test_the_built_in_table_takes_few_steps_for_little_and_few_bytes_for_much():
    table = built_in_table()
    for ranks in (16, 64):
        call = Call("all_reduce", "network", ranks, ranks)
        small, large = table.choices(call).names[0], table.choices(call).names[-1]
        assert ALGORITHMS["all_reduce", small, "network"].steps(ranks) < 2 * (ranks - 1)
        assert large == "ring"


def test_the_built_in_table_has_every_algorithm():
    assert set(built_in_table().entries) == set(ALGORITHMS)


@given(table=tables)
def test_a_saved_table_is_loaded_as_it_was(table, tmp_path_factory):
    file = tmp_path_factory.mktemp("table") / "table.toml"
    save_table(table, file, "measured on\na machine")
    assert file.read_text().startswith("# measured on\n# a machine\n")
    assert load_table(file) == table


def test_what_a_file_leaves_out_is_built_in(tmp_path):
    file = tmp_path / "table.toml"
    file.write_text("[all_reduce.network]\nring = { alpha = 1e-6, beta = 2e-10 }\n")
    changed = {("all_reduce", "ring", "network"): AlphaBeta(1e-6, 2e-10)}
    assert load_table(file).entries == {**built_in_table().entries, **changed}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[all_reduce.network]\nrings = { alpha = 1, beta = 1 }", "did you mean 'ring'"),
        ("[all_reduced.network]\nring = { alpha = 1, beta = 1 }", "did you mean 'all_reduce'"),
        ("[all_reduce.shared_memory]\none-shot = { alpha = 1, beta = 1 }", "did you mean 'shared-memory'"),
        ("[all_reduce.network]\nring = { alpha = 1, betas = 1 }", "did you mean 'beta'"),
        ("[all_reduce.network]\nring = { alpha = 1 }", "beta is 'missing'"),
        ("[all_reduce.network]\nring = { alpha = -1, beta = 1 }", "alpha is -1"),
        ("[all_reduce.network]\nring = { alpha = nan, beta = 1 }", "alpha is nan"),
        ("[all_reduce.network]\nring = { alpha = true, beta = 1 }", "alpha is True"),
        ("[all_reduce.network]\nring = 3", "is not a section"),
        ("all_reduce = 3", "is not a section"),
        ("[all_reduce", "is not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text, said, tmp_path):
    file = tmp_path / "table.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_table(file)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        load_table(tmp_path / "none.toml")


def test_what_a_table_lacks_is_named():
    table = Table({("all_reduce", "ring", "network"): AlphaBeta(1e-6, 1e-9)})
    with pytest.raises(ConfigError, match="no algorithm for broadcast on network"):
        table.choose("broadcast", "network", 2, 2, 100)
    with pytest.raises(ConfigError, match="no alpha and beta for two-shot") as raised:
        table.predict("two-shot", Call("all_reduce", "network", 2, 2), 100)
    assert raised.value.possible == "ring"


@dataclass(frozen=True)
class SimulatedGroup:
    """A group on which every algorithm takes what a table says."""

    truth: Table
    level: str
    ranks: int
    hosts: int
    turns: int = 1
    aggregated: bool = False

    def run(self, collective, algorithm, nbytes):
        if algorithm == "one-shot" and nbytes > 1 << 18:
            return None  # as one-shot has a slot of a fixed size
        call = Call(
            collective, self.level, self.ranks, self.hosts, turns=self.turns, aggregated=self.aggregated
        )
        return self.truth.predict(algorithm, call, nbytes)


@pytest.mark.parametrize(
    ("level", "ranks", "hosts", "turns", "aggregated"),
    [
        ("shared-memory", 4, 1, 1, False),
        ("shared-memory", 8, 1, 4, True),
        ("network", 3, 3, 1, True),
        ("network", 6, 2, 1, False),
        ("network", 6, 2, 1, True),
    ],
)
def test_calibration_finds_what_a_machine_costs(level, ranks, hosts, turns, aggregated):
    built_in = built_in_table()
    inside = {("reduce_scatter", "direct", "shared-memory"), ("all_gather", "direct", "shared-memory")}
    truth = Table(
        {
            key: cost if key in inside else AlphaBeta(cost.alpha * 3, cost.beta / 2)
            for key, cost in built_in.entries.items()
        }
    )
    found = calibrate(SimulatedGroup(truth, level, ranks, hosts, turns, aggregated), built_in).entries
    levelled = 1 < hosts < ranks
    left_out = {"hierarchical"} if not levelled else set()
    left_out |= {"in-network"} if not aggregated else set()
    assert set(found) == {key for key in ALGORITHMS if key[2] == level and key[1] not in left_out}
    for key, cost in found.items():
        assert cost == pytest.approx(truth.entries[key], rel=1e-6), key


def test_calibration_leaves_out_what_it_could_not_time():
    class Silent(SimulatedGroup):
        def run(self, collective, algorithm, nbytes):
            return None if algorithm == "one-shot" else super().run(collective, algorithm, nbytes)

    group = Silent(built_in_table(), "shared-memory", 2, 1)
    found = calibrate(group, built_in_table(), collectives=["broadcast"], sizes=[1024, 65536])
    assert set(found.entries) == {("broadcast", "direct", "shared-memory")}

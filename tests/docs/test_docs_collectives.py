"""What docs/concepts/collectives.md says of the backend is what it does, and so do its pictures."""

import argparse
import inspect
import math
import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import shoal.collectives
from shoal.cli.commands import add_command
from shoal.collectives import Options
from shoal.collectives.ctypes_core import Call
from shoal.collectives.enums import COLLECTIVE_NUMBERS
from shoal.collectives.operation import describe_call, first_difference
from shoal.predict.cost import ALGORITHMS, LEVELS

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from drawn.collectives import pictures  # noqa: E402

from shoal.predict.cost.collectives.reference_execution import (  # noqa: E402
    PLAYED,
    chain,
    hierarchical,
    hierarchical_all_gather,
    in_order_parents,
    ring,
)

PAGE = (ROOT / "docs" / "concepts" / "collectives.md").read_text()
GUIDE = (ROOT / "docs" / "guides" / "bench.md").read_text()
RANKS = [(hosts, per_host) for hosts in (1, 2, 3, 5) for per_host in (1, 2, 4)]


def rows_of(level):
    """(collective, algorithm, steps, bytes) of each line of a level's table, blanks and "as" filled in."""
    name = {"shared-memory": "in shared memory", "network": "over the network"}[level]
    table = re.search(rf"generated: algorithms {name} -->\n(.*?)<!-- end", PAGE, re.DOTALL)[1]
    rows = []
    collective = None
    for line in table.splitlines()[2:]:
        first, names, steps, nbytes = (cell.strip() for cell in line.strip("|").split("|"))
        collective = first or collective
        if names.startswith("as "):
            like = names.removeprefix("as ")
            rows += [(collective, *row[1:]) for row in rows if row[0] == like]
        else:
            rows += [(collective, name, steps, nbytes) for name in names.split(", ")]
    return rows


def value(formula, ranks, hosts):
    """A formula of the page, for so many ranks on so many hosts."""
    text = re.sub(r"\s*\*$|[,:].*", "", formula)
    text = re.sub(r"(ceil|floor)\(log2 n\)", r"\1(log2(n))", text)
    text = re.sub(r"(\d)\s*(?=[(a-z])(?<!g2)", r"\1*", text)
    names = {"n": ranks, "k": hosts, "log2": math.log2, "ceil": math.ceil, "floor": math.floor}
    return eval(text, {"__builtins__": {}}, names)


@pytest.mark.parametrize("level", LEVELS)
def test_the_page_lists_the_algorithms_of_the_cost_model(level):
    listed = [(collective, name, level) for collective, name, *_ in rows_of(level)]
    assert listed == [key for key in ALGORITHMS if key[2] == level]


@pytest.mark.parametrize(
    "row", rows_of("shared-memory") + rows_of("network"), ids=lambda row: "-".join(row[:2])
)
def test_steps_and_bytes_on_the_page_are_those_of_the_cost_model(row):
    collective, name, steps, nbytes = row
    level = "network" if row in rows_of("network") else "shared-memory"
    algorithm = ALGORITHMS[collective, name, level]
    for hosts, per_host in RANKS:
        ranks = hosts * per_host
        sharing = per_host if algorithm.inside else 1
        if ranks > 1 and (hosts > 1 or not algorithm.inside):
            assert algorithm.steps(ranks, sharing) == value(steps, ranks, hosts)
            assert algorithm.bytes_on_path(ranks, 1, sharing) == pytest.approx(value(nbytes, ranks, hosts))
        if hosts > 1 and nbytes.endswith("*"):
            crowd = per_host * (ranks - per_host) / (ranks - 1)
            shared = algorithm.bytes_on_path(ranks, 1, per_host)
            assert shared == pytest.approx(crowd * value(nbytes, ranks, hosts))
    assert algorithm.crowds == nbytes.endswith("*")


def test_every_algorithm_has_a_section_and_every_picture_is_on_the_page():
    sections = " ".join(re.findall(r"^### (.+)$", PAGE, re.MULTILINE)).lower().replace("binary ", "")
    for _, name, _ in ALGORITHMS:
        assert name.replace("double-tree", "double tree") in sections
    shown = re.findall(r"!\[[^\]]+\]\(\.\./pictures/(\S+)\)", PAGE)
    assert sorted(shown) == sorted(pictures())


@pytest.mark.parametrize("played", PLAYED, ids=lambda played: played.name)
def test_an_algorithm_that_is_drawn_ends_with_everything_everywhere(played):
    for slices in played.states()[-1]:
        assert [len(held) for held in slices] == [played.whole] * played.slices


def key_of(name):
    """The cost model's entry for a picture's algorithm."""
    collective = {"tree": "broadcast", "chain": "broadcast", "pairwise": "all_to_all"}.get(name, "all_reduce")
    level = "shared-memory" if name in ("one-shot", "two-shot") else "network"
    return collective, name, level


def bytes_of(played, rank, side):
    """What a rank sends (side 0) or gets (side 1), over the bytes of the buffer."""
    messages = [message for step in played.steps for message in step.messages]
    return sum(Fraction(len(message.slices), played.slices) for message in messages if message[side] == rank)


PLAYED_APART = ("chain", "hierarchical", "hierarchical-all-gather", "in-network")


@pytest.mark.parametrize(
    "played",
    [each for each in PLAYED if each.name not in PLAYED_APART],
    ids=lambda each: each.name,
)
def test_an_algorithm_is_drawn_with_the_steps_and_bytes_of_the_cost_model(played):
    algorithm = ALGORITHMS[key_of(played.name)]
    side = 1 if algorithm.level == "shared-memory" else 0  # a rank there reads from others
    busiest = max(bytes_of(played, rank, side) for rank in range(played.ranks))
    assert len(played.steps) == algorithm.steps(played.ranks)
    assert float(busiest) == pytest.approx(algorithm.bytes_sent(played.ranks, 1))


def test_in_network_is_drawn_with_the_buffer_once_each_way_for_every_host():
    (played,) = (each for each in PLAYED if each.name == "in-network")
    algorithm = ALGORITHMS[key_of(played.name)]
    assert len(played.steps) == algorithm.steps(3)
    for host in range(3):
        assert bytes_of(played, host, 0) == bytes_of(played, host, 1) == algorithm.bytes_sent(3, 1)


def test_the_chain_is_drawn_with_a_step_more_for_every_further_chunk():
    steps = ALGORITHMS["broadcast", "chain", "network"].steps(4)
    assert [len(chain(4, chunks)) for chunks in (1, 2, 3)] == [steps, steps + 1, steps + 2]


def test_hierarchical_is_drawn_as_a_ring_between_two_steps_in_shared_memory():
    algorithm = ALGORITHMS["all_reduce", "hierarchical", "network"]
    first, *across, last = hierarchical(3, 2)
    assert len(across) == algorithm.steps(6, 2) == len(ring(3))
    for step in (first, last):
        assert all(sender // 2 == receiver // 2 for sender, receiver, _ in step.messages)
    sent = sum(Fraction(len(m.slices), 6) for step in across for m in step.messages if m.sender == 0)
    assert float(sent) == pytest.approx(algorithm.bytes_sent(6, 1, 2))


def test_a_hierarchical_all_gather_is_drawn_as_a_ring_before_a_step_in_shared_memory():
    algorithm = ALGORITHMS["all_gather", "hierarchical", "network"]
    *across, last = hierarchical_all_gather(3, 2)
    assert len(across) == algorithm.steps(6, 2)
    assert all(sender // 2 == receiver // 2 for sender, receiver, _ in last.messages)
    sent = sum(Fraction(len(m.slices), 6) for step in across for m in step.messages if m.sender == 0)
    assert float(sent) == pytest.approx(algorithm.bytes_sent(6, 1, 2))


def test_a_rank_is_inner_in_one_tree_at_most():
    for ranks in range(2, 40):
        inner = set(in_order_parents(ranks).values()) - {0}
        in_first = {position - 1 for position in inner}
        in_second = {(position - 2) % ranks for position in inner}
        assert in_first.isdisjoint(in_second)


def test_variables_on_the_page_are_those_that_the_backend_reads():
    read = {
        name
        for path in (ROOT / "shoal" / "collectives").glob("*.py")
        for name in re.findall(r"\bSHOAL_[A-Z_]+\b", path.read_text())
    }
    assert set(re.findall(r"\bSHOAL_[A-Z_]+\b", PAGE)) == read
    assert set(re.findall(r"\bSHOAL_[A-Z_]+\b", GUIDE)) <= read


@pytest.mark.parametrize(
    ("name", "text", "given"),
    [
        ("algorithms", "all_reduce=ring,broadcast=chain", {"all_reduce": "ring", "broadcast": "chain"}),
        ("streams", "3", 3),
        ("heartbeat", "0.5", 0.5),
        ("direct_reads", "0", False),
        ("debug", "1", True),
    ],
)
def test_an_option_has_the_variable_that_the_page_gives_it(name, text, given):
    (variable,) = re.findall(rf"^\| `{name}` \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert getattr(Options.from_environment({variable: text}), name) == given


def test_every_option_is_on_the_page():
    assert set(re.findall(r"^\| `(\w+)` \| `SHOAL_", PAGE, re.MULTILINE)) == set(
        inspect.signature(Options).parameters
    )


def test_the_error_of_different_calls_reads_as_the_page_shows_it():
    calls = [
        describe_call(Call(collective=COLLECTIVE_NUMBERS["all_reduce"], bytes=nbytes), torch.empty(0))
        for nbytes in (20, 16)
    ]
    assert f"    {first_difference(calls, 0)[1]}\n" in PAGE


@pytest.mark.parametrize(
    ("said", "file", "code"),
    [
        ("up to 256 KiB", "algorithms/host.h", "one_shot_bytes = 256 * 1024;"),
        ("at most 512 KiB", "algorithms/host.h", "most_block_bytes = 512 * 1024;"),
        ("1 MiB where ranks", "transport/board.h", "slot_bytes = 1024 * 1024;"),
        ("stripes of 128 KiB", "transport/tcp_link.h", "stripe_bytes = 128 * 1024;"),
        ("from 64 KiB on, the receiver reads", "algorithms/mailbox.h", "eager_here = 64 * 1024,"),
        ("from 512 KiB on by a ring", "group.cc", "large = 512 * 1024;"),
        ("looked for every 20 ms", "transport/watch.cc", "longest_tick = 0.02, longest_idle_tick = 0.2;"),
        ("after 0.5 s of waiting; after `heartbeat`", "group.cc", "one_host_ ? 0.5 : options_.heartbeat"),
        ("idle for a minute", "transport/tcp_socket.h", "idle_seconds = 60;"),
        ("takes longer than five seconds", "transport/hub.h", "handshake_limit = 5)"),
    ],
)
def test_numbers_on_the_page_are_those_of_the_native_core(said, file, code):
    assert said in " ".join(PAGE.split())
    assert code in (ROOT / "csrc" / file).read_text()


@pytest.mark.parametrize("page", [PAGE, GUIDE], ids=["page", "guide"])
def test_names_of_the_library_on_the_page_exist(page):
    used = re.findall(r"\bshoal\.collectives\.(\w+)", page)
    assert used
    for name in used:
        assert hasattr(shoal.collectives, name), name
    for arguments in re.findall(r"\bOptions\((\w+)=", page):
        assert arguments in inspect.signature(Options).parameters


@pytest.mark.parametrize("page", [PAGE, GUIDE], ids=["page", "guide"])
def test_commands_on_the_page_are_commands(page):
    commands = re.findall(r"^ +(?:\w+=\S+ )*(?:.*-- )?shoal (bench[^#>\n]*)", page, re.MULTILINE)
    assert commands
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "bench")
    for command in commands:
        parser.parse_args(command.split())

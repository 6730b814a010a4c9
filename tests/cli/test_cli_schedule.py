"""`shoal schedule`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.cli.main import main
from shoal.models import build
from shoal.parallel import Batch
from shoal.parallel.pipeline.pieces import CORES, costs_on_device, cut_pieces, settled_on_device
from shoal.spec.plan import Plan
from shoal.spec.plan.schedules import NAMES, Times, make, play
from shoal.spec.plan.schedules.draw import draw, picture
from shoal.spec.plan.stages import parse_split, ranges_of

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "schedule.md"
SMALL = ("--pp", "4", "--microbatches", "8")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def call(*words):
    assert main(["schedule", *map(str, words)]) == 0


def printed(capsys, *words):
    call(*words)
    return capsys.readouterr().out


def test_the_table_is_printed_to_scale_with_bubble_and_activations(capsys):
    out = printed(capsys, "--name", "1f1b", "--pp", 2, "--microbatches", 3)
    assert out.splitlines() == [
        "rank 0  F0 F1 ..... B0=== F2 B1=== .. B2===",
        "rank 1  .. F0 B0=== F1 B1=== F2 B2=== .....",
        "",
        "rank  stages  busy  idle  stalled  activations",
        "0          0     9     3        3            2",
        "1          1     9     3        0            1",
        "",
        "1f1b: 12 long; bubble 25.0% of the time, 33.3% over the ideal; "
        "at most 2 micro-batches of activations",
    ]


def test_the_second_stage_of_a_rank_is_in_small_letters(capsys):
    out = printed(capsys, "--name", "zb-v", "--pp", 2, "--microbatches", 3)
    assert out.splitlines()[:2] == [
        "rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 ..",
        "rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2",
    ]


def test_the_guide_shows_what_its_command_prints(capsys):
    page = GUIDE.read_text(encoding="utf-8")
    command, printed_there = re.search(r"```\nshoal (.+)\n```\n\n.+\n\n```\n((?:.*\n)+?)```", page).groups()
    assert main(command.split()) == 0
    assert capsys.readouterr().out == printed_there


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [40, 90, 1000])
def test_a_picture_keeps_to_its_width_and_shows_every_action(name, width):
    schedule = make(name, 3, 1 if name in ("gpipe", "1f1b", "zb-h1") else 2, 12)
    played = play(schedule, Times.equal(schedule.stages, 1, 1.25, 0.75, 0.1))
    lines = picture(played, width).splitlines()
    assert max(map(len, lines)) <= width
    if width == 1000:
        for rank, line in enumerate(lines):
            shown = [word.rstrip("=").lower() for word in line.split()[2:] if word.strip(".")]
            assert shown == [
                f"{action.work.value}{action.microbatch}".lower() for action in schedule.table[rank]
            ]


def test_json_tells_what_play_gives(capsys):
    told = json.loads(printed(capsys, "--name", "zb-v", *SMALL, "--times", "1,1.2,0.8", "--json"))
    schedule = make("zb-v", 4, 2, 8)
    played = play(schedule, Times.equal(8, 0.5, 0.6, 0.4))
    assert told["table"] == [[str(action) for action in row] for row in schedule.table]
    assert told["placement"] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert told["makespan"] == pytest.approx(played.makespan)
    assert told["bubble"] == pytest.approx(played.bubble)
    assert told["idle"] == pytest.approx([played.idle(rank) for rank in range(4)])
    assert told["peak_activations"] == [4] * 4


def test_all_are_laid_side_by_side(capsys):
    rows = printed(capsys, "--compare", *SMALL).splitlines()
    shown = [row.split() for row in rows[1:]]
    assert {row[0] for row in shown} == {*NAMES, "search"}
    assert ["1f1b", "1", "33", "27.3%", "37.5%", "4"] in shown
    assert ["zb-v", "2", "25.5", "5.9%", "6.2%", "4"] in shown
    best = min(float(row[2]) for row in shown if row[0] != "search")
    assert min(float(row[2]) for row in shown if row[0] == "search") <= best


def test_comparing_leaves_out_what_cannot_be_and_says_why(capsys):
    call("--compare", "--pp", 4, "--microbatches", 6, "--limit", 4, "--json")
    captured = capsys.readouterr()
    told = json.loads(captured.out)["schedules"]
    assert {each["name"] for each in told} == {"1f1b", "zb-h1", "zb-v", "search"}
    assert all(max(each["peak_activations"]) <= 4 for each in told)
    for reason in (
        "gpipe holds 6 micro-batches, and --limit is 4",
        "interleaved was asked for with 6 micro-batches on 4 ranks",
        "dualpipe-v was asked for with 6 micro-batches",
    ):
        assert reason in captured.err


def test_a_found_schedule_keeps_to_the_limit(capsys):
    told = json.loads(printed(capsys, "--name", "search", *SMALL, "--limit", 2.5, "--json"))
    assert max(told["peak_activations"]) <= 2.5


# The stages of a model

DEEP = ("--model", "tiny", "--option", "layers=12", "--option", "vocab_size=2000", "--pp", 4)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_cut_as_training_cuts_it_and_its_stages_are_played(capsys, name):
    told = json.loads(printed(capsys, *DEEP, "--name", name, "--json"))
    model = build("tiny", overrides={"layers": 12, "vocab_size": 2000}, device="meta")
    plan = Plan.parse(told["plan"])
    assert (plan.pp, plan.schedule, plan.split) == (4, name, told["split"])
    asked = plan.replace(split="cost", microbatch=1)
    assert plan.split == settled_on_device(model, asked, Batch(16, 128), CORES, None).split
    costs = costs_on_device(model, asked, Batch(16, 128), CORES)
    unit = sum(cost.forward for cost in costs) / 4
    ranges = ranges_of(parse_split(plan.split, 12))
    forward, backward = (
        [sum(getattr(costs[piece], way) for piece in pieces) / unit for pieces in ranges]
        for way in ("forward", "backward")
    )
    assert told["forward"] == pytest.approx(forward)
    assert told["backward"] == pytest.approx(backward)
    half = tuple(each / 2 for each in backward)
    times = Times(tuple(forward), half, half, (0,) * (plan.stages - 1))
    assert told["makespan"] == pytest.approx(play(plan.schedule_for(16), times).makespan)


def test_the_text_ends_with_the_stages_and_the_plan(capsys):
    out = printed(capsys, *DEEP, "--name", "looped-bfs", "--virtual", 3, "--transfer", 0.01)
    *_, stages, compared, plan = out.rstrip().split("\n\n")
    text = plan.removeprefix("plan: ")
    assert [row.split()[2] for row in stages.splitlines()[1:]] == Plan.parse(text).split.split("-")
    assert text.startswith("pp=4,schedule=looped-bfs,virtual=3,split=")
    assert re.match(r"times in a rank's mean forward; split=count would be \S+ long, \+\d", compared)


def test_all_schedules_are_compared_for_a_model(capsys):
    rows = printed(capsys, *DEEP, "--compare").splitlines()
    shown = [row.split() for row in rows[1:]]
    assert {row[0] for row in shown} == {*NAMES, "search"}
    assert all(sum(map(int, row[-1].split("-"))) == 12 for row in shown)
    assert main(["schedule", "--compare", "--model", "tiny", "--pp", "4"]) == 0  # four blocks: one stage each
    captured = capsys.readouterr()
    assert {row.split()[0] for row in captured.out.splitlines()[1:]} == {
        "gpipe",
        "1f1b",
        "zb-h1",
        "looped-bfs",
        "search",
    }
    assert "4 blocks cannot be cut into 8 stages" in captured.err


@pytest.mark.parametrize("settings", [(), ("--virtual", 1), ("--limit", 2.5)])
def test_what_is_found_for_a_model_is_the_table_that_its_plan_trains_with(capsys, settings):
    told = json.loads(printed(capsys, *DEEP, "--name", "search", "--microbatches", 8, *settings, "--json"))
    plan = Plan.parse(told["plan"])
    model = build("tiny", overrides={"layers": 12, "vocab_size": 2000}, device="meta")
    schedule = plan.schedule_for(8, cut_pieces(model, plan).times)
    assert told["table"] == [[str(action) for action in row] for row in schedule.table]
    assert told["placement"] == list(plan.placement)
    assert max(told["peak_activations"]) <= (2.5 if "--limit" in settings else 4)


def test_a_limit_of_memory_moves_blocks_from_the_rank_that_holds_most(capsys):
    free = json.loads(printed(capsys, *DEEP, "--json"))
    most = max(free["memory"])
    told = json.loads(printed(capsys, *DEEP, "--memory", f"{int(most * 0.95)}B", "--json"))
    assert max(told["memory"]) <= 0.95 * most
    assert told["split"] != free["split"]
    assert told["makespan"] > free["makespan"]
    text = printed(capsys, *DEEP, "--memory", f"{int(most * 0.95)}B")
    assert re.search(r"^stage .+ backward +memory$", text, re.MULTILINE)
    assert f"plan: {told['plan']}" in text


def test_recompute_leaves_room_for_blocks(capsys):
    whole, cheap = (
        json.loads(printed(capsys, *DEEP, "--memory", "1GiB", "--recompute", policy, "--json"))["memory"]
        for policy in ("none", "full")
    )
    assert all(less < more for less, more in zip(cheap, whole, strict=True))


def test_costs_are_measured_on_this_device(capsys):
    small = ("--option", "hidden=32", "--sequence", 16, "--microbatch", 2, "--recompute", "full")
    told = json.loads(printed(capsys, "--model", "tiny", *small, "--pp", 2, "--measure", "--json"))
    assert sum(map(int, told["split"].split("-"))) == 4
    assert all(each > 0 for each in told["forward"] + told["backward"])


def test_the_guide_shows_the_stages_that_its_command_prints(capsys):
    page = GUIDE.read_text(encoding="utf-8")
    commands = re.findall(r"```\nshoal (\S+ --model .+)\n```\n\n(?:.+\n)+\n```\n((?:.*\n)+?)```", page)
    assert len(commands) == 2
    for command, shown in commands:
        assert main(command.split()) == 0
        assert capsys.readouterr().out.endswith(shown)


# The drawing

SVG = "{http://www.w3.org/2000/svg}"


def boxes(text):
    """By drawn rectangle of an action: x, y, width, colour; without legend and backgrounds."""
    root = ElementTree.fromstring(text)
    return [
        tuple(float(each.get(key)) for key in ("x", "y", "width"))
        for each in root.iter(f"{SVG}rect")
        if each.get("fill-opacity") is None and float(each.get("y")) > 20
    ]


def test_the_drawing_is_to_scale_and_shows_every_action():
    schedule = make("zb-v", 4, 2, 8)
    played = play(schedule, Times.equal(8, 0.5, 0.6, 0.4))
    drawn = boxes(draw([played]))
    rows = sorted({y for _, y, _ in drawn})
    assert len(rows) == 4
    scale = None
    for rank, y in enumerate(rows):
        row = sorted(box for box in drawn if box[1] == y)
        assert len(row) == len(schedule.table[rank])
        for (x, _, width), start, stop in zip(row, played.starts[rank], played.stops[rank], strict=True):
            if scale is None:  # boxes are drawn a unit narrower, so that neighbours can be told apart
                scale, left = (width + 1) / (stop - start), x
            assert x == pytest.approx(left + start * scale, abs=0.1)
            assert width + 1 == pytest.approx((stop - start) * scale, abs=0.1)


def test_the_file_holds_a_picture_with_a_caption_for_each_schedule(tmp_path, capsys):
    path = tmp_path / "all.svg"
    call("--compare", *SMALL, "--svg", path)
    assert str(path) in capsys.readouterr().err
    texts = ["".join(each.itertext()) for each in ElementTree.parse(path).iter(f"{SVG}text")]
    for name in (*NAMES, "search"):
        assert any(text.startswith(f"{name}, 4 ranks") and "bubble" in text for text in texts), name


def test_work_that_takes_no_time_is_shown_too(capsys, tmp_path):
    out = printed(capsys, "--name", "1f1b", *SMALL, "--times", "0,0,0", "--svg", tmp_path / "none.svg")
    assert "0 long; bubble 0.0%" in out
    ElementTree.parse(tmp_path / "none.svg")
    printed(capsys, "--name", "zb-h1", *SMALL, "--times", "1,1,0", "--svg", tmp_path / "some.svg")


# What cannot work


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--name", "1f1c", *SMALL), "did you mean '1f1b'"),
        (("--name", "zb-v", *SMALL, "--virtual", "3"), "exactly 2"),
        (("--name", "interleaved", "--pp", "4", "--microbatches", "6"), "give 4 or 8"),
        (("--name", "1f1b", "--pp", "0", "--microbatches", "6"), "0 ranks"),
        (("--name", "1f1b", "--pp", "-1", "--microbatches", "6"), "-1 ranks"),
        (("--compare", "--pp", "4", "--microbatches", "0"), "0 micro-batches"),
        (("--compare", *SMALL, "--virtual", "0"), "0 virtual stages"),
        (("--name", "1f1b", *SMALL, "--times", "1,2"), "--times 1,2 cannot be read"),
        (("--name", "1f1b", *SMALL, "--times", "1,2,x"), "--times 1,2,x cannot be read"),
        (("--name", "1f1b", *SMALL, "--times", "1,2,-1"), "is -1.0"),
        (("--compare", *SMALL, "--times", "1,2,nan"), "is nan"),
        (("--name", "1f1b", *SMALL, "--transfer", "inf"), "transfer time"),
        (("--name", "1f1b", *SMALL, "--limit", "2"), "holds 4 micro-batches, and --limit is 2"),
        (("--name", "search", *SMALL, "--limit", "0.5"), "leaves no room"),
        (("--compare", *SMALL, "--limit", "nan"), "leaves no room"),
        (("--name", "1f1b", *SMALL, "--svg", "/"), "cannot be written"),
        (("--name", "search", *SMALL, "--model", "tiny"), "4 blocks cannot be cut into 8 stages"),
        ((*SMALL, "--memory", "8GiB"), "--memory was given without --model"),
        ((*SMALL, "--model", "tiny", "--memory", "8GB"), "--memory 8GB cannot be read"),
        ((*SMALL, "--model", "tiny", "--memory", "1MiB"), "keeps every rank within 1MiB"),
        (("--name", "1f1b", *SMALL, "--measure"), "--measure was given without --model"),
        ((*SMALL, "--model", "tiny", "--times", "1,1,1"), "--times was given with --model"),
        ((*SMALL, "--model", "tiny", "--recompute", "full"), "without --measure"),
        ((*SMALL, "--model", "tiny", "--measure", "--recompute", "some"), "recompute=some does not exist"),
        ((*SMALL, "--model", "tinny"), "did you mean 'tiny'"),
        ((*SMALL, "--model", "tiny", "--name", "zb-v"), "4 blocks cannot be cut into 8 stages"),
        (("--compare", "--model", "tiny", "--pp", "8"), "4 blocks cannot be cut into 8 stages"),
    ],
)
def test_what_cannot_work_is_refused(capsys, words, told):
    assert main(["schedule", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert [line.split(":")[0].strip() for line in captured.err.splitlines()] == [
        "shoal",
        "possible",
        "change",
    ]


def test_schedules_are_shown_without_torch():
    program = (
        "import sys; from shoal.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    words = [sys.executable, "-c", program, "schedule", "--compare", *SMALL]
    subprocess.run(words, check=True, capture_output=True)

"""The pictures of the pages are up to date, are shown, can be read, and show what the library does."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from shoal.spec.plan import Mesh
from shoal.spec.plan.schedules import NAMES as SCHEDULES
from shoal.spec.plan.schedules.draw import caption

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import pictures  # noqa: E402
from drawn import attention, products, ranks, schedules, svg  # noqa: E402

NAMES = sorted(path.name for path in pictures.FOLDER.iterdir())


@pytest.fixture(scope="module")
def drawn():
    return pictures.pictures()


@pytest.fixture(scope="module")
def of_schedules():
    """Drawn as `shoal schedule --svg` draws, with colours of its own."""
    return schedules.pictures()


def texts(picture):
    """(content, left, top, right, bottom) of each text, as wide as in a wide font."""
    for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text"):
        size = float(element.get("font-size", 13))
        content = "".join(element.itertext())
        width = 0.57 * size * len(content)
        x, y = float(element.get("x")), float(element.get("y"))
        left = x - {"start": 0, "middle": width / 2, "end": width}[element.get("text-anchor", "start")]
        yield content, left, y - 0.75 * size, left + width, y + 0.2 * size


def test_pictures_are_what_the_generator_draws(drawn):
    assert {path.name: path.read_text() for path in pictures.FOLDER.iterdir()} == drawn, (
        "run: python docs/pictures.py"
    )


def test_every_picture_is_on_one_page_with_words_for_who_cannot_see_it():
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    shown = re.findall(r"!\[[^\]]{20,}\]\(\.\./pictures/(\S+)\)", pages)
    assert sorted(shown) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_a_picture_lie_inside_and_apart(drawn, name):
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', drawn[name]).groups())
    placed = list(texts(drawn[name]))
    for content, left, top, right, bottom in placed:
        assert left >= -1, content
        assert right <= width + 1, content
        assert top >= 0, content
        assert bottom <= height, content
    for (one, *a), (other, *b) in combinations(placed, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_small_and_has_a_title(drawn, name):
    assert len(drawn[name]) < 32 * 1024
    assert re.search("<title>.{12,}</title>", drawn[name])


def luminance(color):
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", [svg.GRAY, *svg.COLORS])
@pytest.mark.parametrize("background", ["#ffffff", "#0d1117"])
def test_colors_of_pictures_are_seen_on_white_and_on_black(color, background):
    brighter, darker = sorted((luminance(color), luminance(background)), reverse=True)
    assert (brighter + 0.05) / (darker + 0.05) >= 3  # what WCAG asks of graphics


def test_colors_in_pictures_are_those_of_the_palette(drawn, of_schedules):
    others = [picture for name, picture in drawn.items() if name not in of_schedules]
    used = {color for picture in others for color in re.findall(r'"(#[0-9a-f]{3,})"', picture)}
    assert used == {svg.GRAY, *svg.COLORS, "#ffffff"}


def test_every_schedule_is_drawn_with_the_same_work(of_schedules):
    assert sorted(of_schedules) == sorted(f"schedule-{name}.svg" for name in SCHEDULES)
    for name in SCHEDULES:
        played = schedules.played(name)
        assert caption(played) in of_schedules[f"schedule-{name}.svg"]
        assert [played.busy(rank) for rank in range(schedules.RANKS)] == pytest.approx(
            [3 * schedules.MICROBATCHES] * schedules.RANKS
        )


def test_ring_attention_is_drawn_as_the_whole_causal_square_with_equal_work():
    steps = attention.ring_steps()
    blocks = [block for step in steps for block in step]
    seen = [(block.query, block.key) for block in blocks]
    assert sorted(seen) == [(q, k) for q in range(attention.CHUNKS) for k in range(q + 1)]
    for step in steps:
        work = Counter()
        for block in step:
            work[block.rank] += 1 if block.is_half else 2
        assert work == dict.fromkeys(range(attention.RANKS), 4)


def test_ulysses_is_drawn_with_all_heads_before_and_all_positions_after():
    before, after = attention.heads_and_positions()
    everyone = list(range(attention.RANKS))
    assert all(row == everyone for row in before)
    assert all(len(set(row)) == 1 for row in after)
    shares = Counter(row[0] for row in after)
    assert shares == dict.fromkeys(everyone, len(after) // attention.RANKS)


def test_experts_are_drawn_with_the_rows_that_were_chosen_each_at_its_expert():
    leaving, arrived = ranks.rows_to_experts()
    chosen = sorted(
        (sender, token, expert)
        for sender, tokens in enumerate(ranks.CHOSEN)
        for token, experts in enumerate(tokens)
        for expert in experts
    )
    for rank, rows in enumerate(leaving):
        assert {row.sender for row in rows} == {rank}
    for rank, rows in enumerate(arrived):
        held = ranks.EXPERTS // ranks.RANKS
        assert {row.expert // held for row in rows} == {rank}
        assert [row.expert for row in rows] == sorted(row.expert for row in rows)
    for side in (leaving, arrived):
        assert sorted(tuple(row) for rows in side for row in rows) == chosen


def test_the_mesh_is_drawn_with_experts_carved_out_of_data_and_context():
    mesh = Mesh.of(ranks.PLAN)
    for rank in range(mesh.ranks):
        experts = ranks.axes_of(rank).ep.members
        assert len(experts) == ranks.PLAN.ep
        assert set(experts) <= set(mesh.group(rank, "dp", "cp"))


@pytest.mark.parametrize("layer", ["column", "row"])
def test_overlap_is_drawn_as_shorter_by_what_runs_beside_the_products(layer):
    ends = {}
    for tensor in ("sequence", "async"):
        events = products.section(products.watch_products(tensor, products.RING)[0], f"{layer} forward")
        sent, computed, ends[tensor] = products.timed(events, sums=layer == "row")
        assert sum(slot.stop - slot.start for slot in computed) == products.RING
        assert sum(slot.stop - slot.start for slot in sent) == products.TRANSFER * (products.RING - 1)
    assert ends["async"] == products.RING
    assert ends["sequence"] == products.RING + products.TRANSFER * (products.RING - 1)

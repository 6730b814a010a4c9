"""The picture of a scaling curve: axes, and words that no line crosses."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.predict.cost.time import workload_on
from shoal.predict.planner import scale
from shoal.predict.planner.scale import picture, ticks
from shoal.spec.cluster import Cluster
from shoal.spec.workload import shape

SVG = "{http://www.w3.org/2000/svg}"
LETTER = 6.6  # width of a letter at size 12, in a wide font


@given(st.floats(1, 1e9), st.floats(1, 1e4))
def test_marks_are_round_and_around_all_values(lowest, factor):
    marks = ticks(lowest, lowest * factor)
    assert marks[0] <= lowest
    assert marks[-1] >= lowest * factor * (1 - 1e-12)
    assert len(marks) == 1 or marks[1] >= lowest * (1 - 1e-12)  # none in vain
    for mark in marks:
        assert re.fullmatch(r"[125]\.0+e[+-]\d+", f"{mark:.6e}")


@pytest.fixture(
    scope="module",
    params=[
        ("350m", "dgx-a100", (8, 16, 32, 64, 128, 256, 512), 256),  # stops paying, in the right half
        ("125m", "aws-g5", (8, 16, 32), 32),  # stops paying at once
        ("gpt3-1.3b", "dgx-h100", (8,), 64),  # a single point
    ],
    ids=lambda param: param[0],
)
def drawn(request):
    """A curve, and its picture."""
    model, name, counts, batch = request.param
    cluster = Cluster.preset(name)
    found = scale(workload_on(cluster, shape(model)), cluster, counts, batch=batch)
    return found, ElementTree.fromstring(picture(found, f"{model} on {name}"))


def boxes(root):
    """Left, right, top and bottom of each text."""
    for text in root.iter(f"{SVG}text"):
        x, y, size = (float(text.get(name)) for name in ("x", "y", "font-size"))
        width = LETTER * size / 12 * len(text.text)
        left = {"start": x, "middle": x - width / 2, "end": x - width}[text.get("text-anchor")]
        yield text.text, (left, left + width, y - 0.7 * size, y)


def segments(root):
    for line in root.iter(f"{SVG}polyline"):
        points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        yield from itertools.pairwise(points)
    for line in root.iter(f"{SVG}line"):
        x1, y1, x2, y2 = (float(line.get(name)) for name in ("x1", "y1", "x2", "y2"))
        yield (x1, y1), (x2, y2)


def crosses(segment, box):
    """Whether a segment has a point in a box."""
    (x1, y1), (x2, y2) = segment
    left, right, top, bottom = box
    steps = 1 + math.ceil(math.dist((x1, y1), (x2, y2)))
    return any(
        left < x1 + (x2 - x1) * step / steps < right and top < y1 + (y2 - y1) * step / steps < bottom
        for step in range(steps + 1)
    )


def test_no_line_crosses_a_word_and_no_word_another(drawn):
    _, root = drawn
    words = list(boxes(root))
    for segment in segments(root):
        for text, box in words:
            assert not crosses(segment, box), (text, segment)
    for (one, first), (other, second) in itertools.combinations(words, 2):
        apart = (
            first[1] <= second[0] or second[1] <= first[0] or first[3] <= second[2] or second[3] <= first[2]
        )
        assert apart, (one, other)


def test_all_is_within_the_picture_and_the_axis_is_to_scale(drawn):
    found, root = drawn
    width, height = map(float, root.get("viewBox").split()[2:])
    for text, (left, right, top, bottom) in boxes(root):
        assert 0 <= left < right <= width, text
        assert 0 <= top < bottom <= height, text
    points = list(root.iter(f"{SVG}circle"))
    assert len(points) == len(found.points)
    rates = [math.log(point.best.tokens_per_second) for point in found.points]
    heights = [float(point.get("cy")) for point in points]
    for height, rate in zip(heights, rates, strict=True):
        share = (rate - rates[0]) / (rates[-1] - rates[0]) if len(rates) > 1 else 0.0
        wanted = heights[0] + share * (heights[-1] - heights[0])
        assert height == pytest.approx(wanted, abs=0.11)  # a tenth of a pixel is written
    texts = {text for text, _ in boxes(root)}
    assert {"tokens/s", "0 %", "100 %", "devices"} <= texts

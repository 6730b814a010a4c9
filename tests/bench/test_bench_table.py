"""The table that people read."""

from __future__ import annotations

import sys

import pytest

from shoal.errors import ConfigError, MissingExtraError
from shoal.machine.bench import Row
from shoal.machine.bench.report import heading, line, plot, require_plot


def row(backend="gloo", seconds=(0.001,), **changed):
    fields = {
        "collective": "all_reduce",
        "ranks": 2,
        "bytes": 4096,
        "count": 1024,
        "dtype": "float32",
        "op": "sum",
        "iterations": 3,
        "wrong": 0,
        "problem": None,
    }
    return Row(backend=backend, seconds=tuple(seconds), **{**fields, **changed})


def test_one_backend_has_the_columns_of_nccl_tests():
    title, names, units = heading("all_reduce", ["gloo"], 2).splitlines()
    assert title == "all_reduce, 2 ranks, gloo"
    assert names.split() == ["size", "count", "type", "op", "time", "range", "algbw", "busbw", "check"]
    assert units.split() == ["(B)", "(us)", "(us)", "(GB/s)", "(GB/s)", "(wrong)"]
    cells = line([row(seconds=(0.001, 0.004, 0.002), wrong=7)]).split()
    assert cells == ["4096", "1024", "float32", "sum", "2000", "1000-4000", "0.0020", "0.0020", "7"]


def test_several_backends_stand_abreast_with_ratios_to_the_first():
    rows = [row("shoal", (1e-5, 2e-5)), row("gloo", (1e-3, 1e-3)), row("memory", (1e-6, 1e-6), wrong=None)]
    title, tops, names, units = heading("all_reduce", ["shoal", "gloo", "memory"], 2).splitlines()
    assert title.endswith("ratio: time over that of shoal")
    assert [name.strip() for name in tops.split("|")] == ["", "shoal", "gloo", "memory", ""]
    assert [part.split() for part in names.split("|")][2] == ["time", "range", "busbw", "ratio"]
    text = line(rows)
    parts = [part.split() for part in text.split("|")]
    assert parts[1][:2] == ["15.00", "10.00-20.00"]
    assert parts[2][-1] == "75.00"  # the median of 100 and 50, not 1000 over 15
    assert parts[4] == ["0"]
    bars = [place for place, letter in enumerate(text) if letter == "|"]
    for above in (tops, names, units):
        assert [place for place, letter in enumerate(above) if letter == "|"] == bars


def test_what_was_not_measured_is_a_dash():
    rows = [row("mpi", (), problem="no", wrong=None), row("gloo", (0.001,))]
    assert line(rows).split("|")[1].split() == ["-", "-", "-"]
    assert line(rows).split("|")[2].split()[-1] == "-"
    barrier = row(collective="barrier", bytes=0, count=0, op=None)
    assert line([barrier]).split() == ["-", "-", "-", "-", "1000", "1000-1000", "-", "-", "0"]


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"shoal\[plot\]"):
        require_plot(tmp_path / "bench.png")


@pytest.mark.parametrize(
    ("name", "told"), [("bench.txt", ".txt is not"), ("bench", "no ending"), ("no/x.png", "does not exist")]
)
def test_a_plot_that_cannot_be_written_is_refused(tmp_path, name, told):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=told):
        require_plot(tmp_path / name)


def test_a_plot_has_a_picture_of_times_and_one_of_rates(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(name, (0.001, 0.002), bytes=size) for size in (1024, 4096) for name in ("shoal", "gloo")]
    plot([*rows, row("mpi", (), problem="no"), row(collective="barrier", bytes=0)], tmp_path / "bench.svg")
    drawn = (tmp_path / "bench.svg").read_text()
    assert "<svg" in drawn

"""Lines in bounded memory: a line that is too long is cut, and the lines after it are read."""

import json
import os
import tracemalloc

import pytest

from shoal.cli.main import main
from shoal.errors import ShoalError
from shoal.lines import LONGEST_LINE, bounded_lines
from shoal.spec.run import Run, read_metrics
from shoal.spec.timeline import Timeline


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17, 30])
def test_a_line_that_is_too_long_is_cut_and_the_next_is_whole(tmp_path, length):
    path = tmp_path / "lines"
    path.write_text("a\n" + "b" * length + "\nc\nd")
    cut = "b" * length + "\n"
    assert list(bounded_lines(path, 8)) == ["a\n", cut if length < 8 else "b" * 8, "c\n", "d"]


def test_a_long_line_in_any_file_of_a_run_takes_no_memory(tmp_path):
    run = Run.create(tmp_path / "run", {"config": {}})
    long = b'{"step":2,"loss":"' + b"a" * (64 << 20)
    run.metrics_file.write_bytes(b'{"step":1}\n' + long + b'"}\n{"step":3}\n')
    header = b'{"timeline":1,"rank":0,"origin_unix_ns":1}\n'
    run.timeline_file(0).write_bytes(header + long)
    tracemalloc.start()
    try:
        assert [values["step"] for values in read_metrics(run.metrics_file)] == [1, 3]
        assert len(Timeline.read(run.timeline)) == 0  # torn at its end, as by a process that was killed
        assert tracemalloc.get_traced_memory()[1] < 16 * LONGEST_LINE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "{}" + " " * (17 << 20), json.dumps({"config": "x"}), json.dumps({"model": [[]]})],
    ids=["nested", "long", "text", "list"],
)
def test_a_description_that_no_reader_can_use_is_refused(tmp_path, text):
    run = Run.create(tmp_path / "run", {})
    (run.path / "run.json").write_text(text)
    with pytest.raises(ShoalError, match=r"run\.json"):
        Run.open(run.path).description  # noqa: B018


def test_nested_lines_are_torn_lines(tmp_path):
    run = Run.create(tmp_path / "run", {})
    run.metrics_file.write_text("[" * 100_000 + "\n" + '{"step":3}\n')
    assert [values["step"] for values in run.metrics()] == [3]


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "events.jsonl", "timeline/rank-00000.jsonl"])
def test_a_pipe_in_the_place_of_a_file_of_a_run_blocks_no_reader(tmp_path, capsys, name):
    run = Run.create(tmp_path / "run", {"config": {}})
    for path in (run.metrics_file, run.timeline_file(0)):
        path.touch()
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    for command in (["report"], ["watch", "--once"]):
        assert main([*command, str(run.path)]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err

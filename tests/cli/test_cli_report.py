"""`shoal report`."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.commands import add_command
from shoal.errors import RunError, UserError
from shoal.spec.run import Decision, Run, metrics_line, write_decision
from shoal.spec.timeline import Kind, Lane, Span, Timeline

STEPS = 8
DESCRIPTION: dict[str, Any] = {
    "name": "tiny",
    "plan": "dp=2",
    "world_size": 2,
    "model": {"name": "tiny", "parameters": 1_200_000, "flops_per_token": 7.2e6},
    "device": {"type": "cpu", "peak_flops": 1e12},
}


def spans() -> list[Span]:
    """Eight steps of 10 s: 5 s forward, then an all-reduce of 4 s that nothing overlaps, 1 s unexplained."""
    group, size = (0, 1), 8_000_000_000
    return [
        span
        for rank in group
        for index in range(STEPS)
        for start in [20.0 * index]
        for span in (
            Span(rank, Lane.COMPUTE, Kind.STEP, str(index), start, 10.0),
            Span(rank, Lane.COMPUTE, Kind.FORWARD, "", start, 5.0),
            Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, "all_reduce:0", start + 5, 4.0, size, group),
        )
    ]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(tmp_path / "tiny", DESCRIPTION)
    Timeline(spans()).write(made.timeline)
    made.metrics_file.write_text(
        "".join(
            metrics_line(step, {"loss": 5.0 - step / 2, "tokens_per_second": 1000.0 if step > 1 else 10.0})
            for step in range(STEPS)
        )
        + metrics_line(STEPS - 1, {"validation_loss": math.nan})
    )
    return made


def test_a_trace_of_some_steps_has_these_alone(run, tmp_path):
    call(run.path, "--trace", tmp_path / "trace.json", "--steps", "3:4")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["name"].startswith("step ")} == {"step 3", "step 4"}
    assert sum(event["ph"] == "X" for event in events) == 2 * 2 * 3
    with pytest.raises(RunError, match="no recorded step from 50 to 60"):
        call(run.path, "--trace", tmp_path / "other.json", "--steps", "50:60")
    with pytest.raises(UserError, match="without --trace"):
        call(run.path, "--steps", "3:4")
    with pytest.raises(UserError, match="FIRST:LAST"):
        call(run.path, "--trace", tmp_path / "other.json", "--steps", "four")


def test_parquet_has_every_span_with_its_step_and_every_value(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    call(run.path, "--parquet", tmp_path / "tables")
    found = parquet.read_table(tmp_path / "tables" / "spans.parquet").to_pylist()
    timeline = Timeline.read(run.timeline)
    assert [
        Span(
            *(row[name] for name in ("rank", "lane", "kind", "name", "start", "duration", "bytes")),
            tuple(row["group"]),
            row["algorithm"],
            row["purpose"],
        )
        for row in found
    ] == [span for rank in timeline.ranks for span in timeline.of(rank)]
    assert {row["step"] for row in found if row["kind"] == "forward"} == set(range(STEPS))
    metrics = parquet.read_table(tmp_path / "tables" / "metrics.parquet").to_pylist()
    assert [row["loss"] for row in metrics] == [values["loss"] for values in run.metrics()]
    assert metrics[0]["validation_loss"] is None


def call(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "report")
    args = parser.parse_args(["report", *map(str, words)])
    return args.run(args)


def test_the_parts_are_printed_with_their_shares(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run.path) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["compute", "5.000000", "50.0%"] in rows
    assert ["exposed", "communication", "4.000000", "40.0%"] in rows
    assert ["other", "1.000000", "10.0%"] in rows
    assert ["step", "10.000000", "100.0%"] in rows
    assert ["all_reduce", "1", "7.451GiB", "4.000000", "4.000000", "2", "GB/s"] in rows
    assert ["tokens/s", "1,000", "in", "the", "median", "step"] in rows
    assert ["tokens/s/device", "500"] in rows


def test_json_is_one_object_on_stdout(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    call(run.path, "--json")
    captured = capsys.readouterr()
    assert captured.err == ""
    summary = json.loads(captured.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    breakdown = summary["breakdown"]
    assert sum(breakdown["parts"].values()) == pytest.approx(breakdown["wall"])
    assert sorted(breakdown["ranks"]) == ["0", "1"]
    assert breakdown["collectives"]["all_reduce"]["algbw"] == pytest.approx(2e9)
    assert summary["steps"] == STEPS
    assert summary["loss"] == {"first": {"step": 0, "value": 5.0}, "last": {"step": 7, "value": 1.5}}
    assert summary["validation_loss"]["last"] == {"step": 7, "value": "NaN"}
    # 500 tokens/s on a device, at 7.2e6 FLOP each, of 1e12 FLOP/s.
    assert summary["mfu"] == pytest.approx(500 * 7.2e6 / 1e12)


def on_device(own: float) -> list[Span]:
    """Eight steps of 10 s whose forward takes 8 s, of which `own` are work; one more step was held."""
    spans = [
        Span(0, Lane.COMPUTE, Kind.HELD_STEP, "90", 900.0, 20.0, host=(900.0, 910.0)),
        Span(0, Lane.COMPUTE, Kind.FORWARD, "", 910.0, own, host=(900.0, 908.0)),
    ]
    for index in range(STEPS):
        start = 20.0 * index
        spans += [
            Span(0, Lane.COMPUTE, Kind.STEP, str(index), start, 10.0, host=(start, start + 9.5)),
            Span(0, Lane.COMPUTE, Kind.FORWARD, "", start + 1, 8.0, host=(start + 1, start + 9)),
        ]
    return spans


def test_launch_is_a_part_where_a_device_computes_and_comes_with_advice(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in run.timeline.iterdir():
        path.unlink()
    Timeline(on_device(own=5.0)).write(run.timeline)
    assert call(run.path) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["compute", "5.000000", "50.0%"] in rows
    # 8 - 5 s in the forward; 1 s before it, and 0.5 s after it until the host ended the step
    assert ["launch", "4.500000", "45.0%"] in rows
    assert ["other", "0.500000", "5.0%"] in rows
    assert "the device idles for 45% of a step" in printed
    assert "compile=blocks" in printed
    run.describe({**DESCRIPTION, "plan": "dp=1,compile=blocks"})
    assert call(run.path) == 0
    assert "compile=blocks in the Plan" not in capsys.readouterr().out
    Timeline(on_device(own=8.0)).write(run.timeline)
    assert call(run.path) == 0
    assert "larger microbatch" in capsys.readouterr().out  # 15 %
    assert call(run.path, "--json") == 0
    parts = json.loads(capsys.readouterr().out)["breakdown"]["parts"]
    assert parts["launch"] == pytest.approx(1.5)
    assert sum(parts.values()) == pytest.approx(10.0)


def test_where_the_host_computes_there_is_no_launch(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run.path) == 0
    assert call(run.path, "--json") == 0
    assert "launch" not in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["peak", "flops"])
def test_mfu_is_left_out_where_peak_or_work_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    description = dict(DESCRIPTION)
    if missing == "peak":
        description["device"] = {"type": "cpu", "peak_flops": None}
    else:
        description["model"] = {"name": "tiny"}
    run = Run.create(tmp_path / "run", description)
    run.metrics_file.write_text(metrics_line(0, {"loss": 1.0, "tokens_per_second": 10.0}))
    call(run.path)
    assert "MFU" not in capsys.readouterr().out
    call(run.path, "--json")
    assert json.loads(capsys.readouterr().out)["mfu"] is None


def test_stages_of_a_pipeline_are_held_against_their_mean(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [
        Span(rank, Lane.COMPUTE, kind, f"{rank}{work}0", 20.0 * index + start, seconds * (rank + 1))
        for rank in (0, 1)
        for index in range(STEPS)
        for kind, work, start, seconds in ((Kind.FORWARD, "F", 0.0, 1.0), (Kind.BACKWARD, "B", 2.0, 2.0))
    ]
    Timeline([*spans(), *stages]).write(run.timeline)
    assert call(run.path) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "0", "1.000000", "2.000000", "3.000000", "67%"] in rows
    assert ["1", "1", "2.000000", "4.000000", "6.000000", "133%"] in rows


def test_speed_and_parts_are_those_since_the_layout_changed(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.describe({**DESCRIPTION, "since_step": 6})
    assert call(run.path) == 0
    assert "steps from 6 on" in capsys.readouterr().out
    assert call(run.path, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert all(each["steps"] == 2 for each in summary["breakdown"]["ranks"].values())
    run.describe({**DESCRIPTION, "since_step": 1})  # step 1 has 10 tokens/s, the others 1,000
    assert call(run.path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_second"] == 1000
    run.describe({**DESCRIPTION, "since_step": STEPS})  # no step was made since
    assert call(run.path) == 0
    assert "no timeline of steps under this Plan" in capsys.readouterr().out


def test_one_rank_can_be_asked_for(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    call(run.path, "--json", "--rank", 1)
    assert list(json.loads(capsys.readouterr().out)["breakdown"]["ranks"]) == ["1"]


def test_a_rank_that_is_not_there_is_refused_with_those_that_are(run: Run) -> None:
    with pytest.raises(RunError) as caught:
        call(run.path, "--rank", 7)
    assert "rank 7" in caught.value.given
    assert "0, 1" in caught.value.possible


def test_the_trace_goes_to_the_file_and_the_word_of_it_to_stderr(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(run.path, "--json", "--trace", tmp_path / "trace.json", "--rank", 0)
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert str(tmp_path / "trace.json") in captured.err
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(spans()) / 2


def test_a_trace_that_cannot_be_written_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        call(run.path, "--trace", tmp_path)


def test_a_run_without_timeline_reports_its_metrics(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for path in run.timeline.iterdir():
        path.unlink()
    assert call(run.path) == 0
    printed = capsys.readouterr().out
    assert "5.0000 at step 0, 1.5000 at step 7" in printed
    assert "no timeline" in printed
    with pytest.raises(RunError, match="no timeline"):
        call(run.path, "--trace", run.path / "trace.json")
    with pytest.raises(RunError, match="rank 0"):
        call(run.path, "--rank", 0)


def test_decisions_about_the_exchange_are_told_with_their_reasons(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    local = "exchange=local,every=20"
    write_decision(run.decisions_file, Decision(11, "exchange=bucketed", "measured", {"latency": 0.1}))
    write_decision(run.decisions_file, Decision(54, local, "it is quicker"))
    with run.decisions_file.open("a") as file:
        file.write('{"step": 60')  # a line that was not written to its end
    assert call(run.path) == 0
    assert f"after step 54, {local}: it is quicker" in capsys.readouterr().out
    assert call(run.path, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["decisions"]
    assert first["numbers"] == {"latency": 0.1}
    assert (second["step"], second["exchange"]) == (54, local)


def test_a_run_that_only_began_can_be_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "run", {})
    assert call(run.path) == 0
    assert call(run.path, "--json") == 0
    assert '"tokens_per_second": null' in capsys.readouterr().out


def test_a_path_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        call(tmp_path / "absent")


def test_reporting_does_not_import_torch(run: Run) -> None:
    program = (
        "import argparse, sys; from shoal.cli.commands import add_command; "
        "parser = argparse.ArgumentParser(); "
        "add_command(parser.add_subparsers(), 'report'); args = parser.parse_args(['report', sys.argv[1]]);"
        "args.run(args); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(run.path)], check=True, stdout=subprocess.DEVNULL)

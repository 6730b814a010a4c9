"""Tables of operations: the delay of a known rank is found in them, in all their spellings."""

import csv

import pytest

from shoal.analyze.diagnosis import Cause, verdict
from shoal.analyze.diagnosis.compute_time import PHASES
from shoal.analyze.foreign import is_foreign, read_foreign, table
from shoal.analyze.replay import what_if
from shoal.cli.main import main
from shoal.errors import RunError
from shoal.predict.simulate import mark_bubbles
from shoal.spec.timeline import Kind
from shoal.testing.delays import Delay, Jitter, Layout, delayed_timeline

LAYOUT = Layout(2, 1, 2)
STEADY = Jitter([[dict.fromkeys(PHASES, 1.0)]])


@pytest.fixture(scope="module")
def measured():
    return delayed_timeline(LAYOUT, 34, STEADY, 0, Delay(1, Cause.FORWARD, 0.2))


def rows_of(timeline, *, numbers=lambda step: step, relative=False):
    """The operations of a timeline as rows with the columns of ByteDance's traces."""
    rows = []
    for rank in timeline.ranks:
        stage, dp, _ = LAYOUT.place(rank)
        steps = [span for span in timeline.of(rank) if span.kind == Kind.STEP]
        firsts = {s.name: min(timeline.step(r, int(s.name)).start for r in timeline.ranks) for s in steps}
        for span in timeline.of(rank):
            inside = [step for step in steps if step.start <= span.start < step.stop]
            if span.kind in (Kind.STEP, Kind.WAIT) or not inside:
                continue
            row = {
                "rank": rank,
                "stage": stage,
                "dp_rank": dp,
                "mb_id": "",
                "step": numbers(int(inside[0].name)),
            }
            if span.kind in (Kind.FORWARD, Kind.BACKWARD):
                row |= {"optype": f"{span.kind}-compute", "mb_id": span.name[2:]}
            elif span.kind == Kind.COLLECTIVE and span.name.startswith(("activation", "gradient:")):
                is_forward = span.name.startswith("activation")
                is_sender = (stage == 0) == is_forward
                row["optype"] = f"{'forward' if is_forward else 'backward'}-{'send' if is_sender else 'recv'}"
            elif span.kind == Kind.COLLECTIVE:
                row["optype"] = "optimizer-clip-main-grad" if "norm" in span.name else "grads-reduce-scatter"
            else:
                row["optype"] = {Kind.OPTIMIZER: "optimizer", Kind.DATA_WAIT: "data-load"}[span.kind]
            start = span.start - (firsts[inside[0].name] if relative else 0)
            rows.append({**row, "start_ts": start, "duration": span.duration})
    return rows


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_table_has_the_times_the_bubbles_and_the_straggler_of_the_run(tmp_path, measured):
    timeline = read_foreign(write(tmp_path / "ops.csv", rows_of(measured)))
    assert timeline.ranks == (0, 1, 2, 3)
    marked, original = mark_bubbles(timeline), mark_bubbles(measured)
    (found,), (expected,) = verdict(marked).stragglers, verdict(original).stragglers
    assert (found.ranks, found.cause) == (expected.ranks, expected.cause) == ((1,), Cause.FORWARD)
    assert found.seconds == pytest.approx(expected.seconds, rel=0.01)
    replayed, of_run = what_if(marked), what_if(original)
    assert replayed.seconds == pytest.approx(of_run.seconds, rel=0.01)
    assert replayed.replayed == pytest.approx(replayed.seconds, rel=0.01)
    assert replayed.slowdown == pytest.approx(of_run.slowdown, rel=0.02)


def test_parquet_with_scattered_steps_and_times_from_each_steps_start(tmp_path, measured):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = rows_of(measured, numbers=lambda step: 3 * step, relative=True)
    for row in rows:
        row["mb_id"] = float(row["mb_id"]) if row["mb_id"] else None
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "trace.parquet")
    assert is_foreign(tmp_path)
    timeline = mark_bubbles(read_foreign(tmp_path))
    assert timeline.steps() == tuple(range(3, 103, 3))
    assert [(each.ranks, each.cause) for each in verdict(timeline).stragglers] == [((1,), Cause.FORWARD)]
    rank_1 = {each.what: each.seconds for each in what_if(timeline).savings}["rank 1 works as its peers do"]
    assert rank_1 > 0.5 * 0.2 * 0.099


def test_the_commands_take_a_table(tmp_path, measured, capsys):
    path = write(tmp_path / "ops.csv", rows_of(measured))
    assert main(["report", str(path)]) == 0
    assert "Straggler: rank 1, forward" in capsys.readouterr().out
    assert main(["what-if", str(path)]) == 0
    assert "rank 1 works as its peers do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rank,step,op\n0,1,forward\n", "no column start, end or duration"),
        ("rank,step,op,start,end\n0,1,forward,0,1\n0,1,forward,x,1\n", "row 2"),
        ("rank,step,op,start,end\n0,1,forward,5,1\n", "row 1"),
        ("rank,step,op,start,end\n0,1,forward,nan,1\n", "row 1"),
        ("rank,step,op,start,end\n0,1,forward\n", "row 1"),
        ("rank,step,op,start,end\n", "no rows"),
        ("\0\0\0\n1\n", "no column"),
        ("rank,step,op,start,end\n" + "1" * (3 << 20), "cannot be read"),
        ('rank,step,op,start,end\n"0,1\n' + "1\n" * 100_000, "cannot be read"),
    ],
)
def test_a_table_that_is_none_is_refused_with_the_place(tmp_path, text, named):
    path = tmp_path / "ops.csv"
    path.write_text(text)
    with pytest.raises(RunError, match=named):
        read_foreign(path)


def test_a_parquet_file_that_is_none_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(RunError, match="cannot be read"):
        read_foreign(tmp_path)


@pytest.mark.parametrize(
    ("start", "duration", "scale"),
    [("Start Time (us)", "DURATION (us)", 1e6), ("start_ms", "dur_ms", 1e3), ("ts[ns]", "duration_ns", 1e9)],
)
def test_names_of_columns_tell_the_unit_of_times(tmp_path, measured, start, duration, scale):
    rows = rows_of(measured)
    for row in rows:
        row[start], row[duration] = row.pop("start_ts") * scale, row.pop("duration") * scale
    expected = read_foreign(write(tmp_path / "seconds.csv", rows_of(measured)))
    timeline = read_foreign(write(tmp_path / "ops.csv", rows))
    assert len(timeline) == len(expected)
    assert [span.duration for span in timeline] == pytest.approx(
        [span.duration for span in expected], abs=1e-6
    )


def test_times_that_are_hardly_seconds_are_refused(tmp_path, measured):
    rows = [
        {**row, "duration": row["duration"] * 1e9, "start_ts": row["start_ts"] * 1e9}
        for row in rows_of(measured)
    ]
    with pytest.raises(RunError, match="hardly in seconds"):
        read_foreign(write(tmp_path / "ops.csv", rows))


def test_messages_that_were_noted_and_not_sent_change_nothing(tmp_path, measured):
    rows = rows_of(measured)
    places = {row["rank"]: row for row in rows}
    steps = sorted({row["step"] for row in rows})
    more = []
    for rank, place in places.items():
        for step in steps:
            own = [row for row in rows if (row["rank"], row["step"]) == (rank, step)]
            begin = min(row["start_ts"] for row in own)
            end = max(row["start_ts"] + row["duration"] for row in own)
            blank = {**place, "step": step, "mb_id": "", "duration": 0.0}
            if place["stage"] == 0:  # before its first and after its last stage there is nobody
                sides = [("forward-recv", begin), ("backward-send", end)]
            else:
                sides = [("forward-send", begin), ("forward-send", end), ("backward-recv", end)]
            sides.append(("backward-recv" if place["stage"] == 0 else "forward-recv", end))  # at the end
            more += [{**blank, "optype": optype, "start_ts": at} for optype, at in sides]
    plain = mark_bubbles(read_foreign(write(tmp_path / "plain.csv", rows)))
    noted = mark_bubbles(read_foreign(write(tmp_path / "noted.csv", rows + more)))
    (expected,), (found,) = verdict(plain).stragglers, verdict(noted).stragglers
    assert (found.ranks, found.cause) == (expected.ranks, expected.cause) == ((1,), Cause.FORWARD)
    assert found.seconds == pytest.approx(expected.seconds, rel=0.01)
    savings = [{each.what: each.seconds for each in what_if(each).savings} for each in (plain, noted)]
    assert savings[1]["rank 1 works as its peers do"] == pytest.approx(
        savings[0]["rank 1 works as its peers do"], rel=0.01
    )


def test_messages_both_ways_join_the_stages_that_exchange_them(tmp_path):
    orders = ["F F forward-send-backward-recv B B", "F B backward-send-forward-recv F B"]
    kinds, rows = {"F": "forward-compute", "B": "backward-compute"}, []
    for step in range(3):
        for stage, order in enumerate(orders):
            for place, kind in enumerate(order.split()):
                row = {"stage": stage, "dp_rank": 0, "step": step, "optype": kinds.get(kind, kind)}
                rows.append({**row, "start_ts": step + 0.2 * place, "duration": 0.2})
    timeline = read_foreign(write(tmp_path / "ops.csv", rows))
    exchanges = [span for span in timeline if span.kind == Kind.COLLECTIVE]
    assert len(exchanges) == 6
    assert {(span.name, span.group) for span in exchanges} == {("exchange:0 and 1", (0, 1))}


def test_of_a_table_that_is_too_large_the_newest_steps_are_used(tmp_path, measured, monkeypatch):
    told, rows = [], rows_of(measured)
    per_step = len(rows) // 34
    path = write(tmp_path / "ops.csv", sorted(rows, key=lambda row: row["rank"]))
    monkeypatch.setattr(table, "_ENOUGH_ROWS", 5 * per_step)
    monkeypatch.setattr(table, "_FEWEST_STEPS", 20)
    timeline = read_foreign(path, told.append)
    assert timeline.steps() == tuple(range(15, 35))
    assert told == [f"{path} has more rows than are used: those of step 15 and later are"]
    monkeypatch.setattr(table, "_MOST_ROWS", per_step - 1)
    with pytest.raises(RunError, match="has more than"):
        read_foreign(path)

"""The verdict over states, the ledger, and the dumps of torch's flight recorder."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shoal.analyze.hang import (
    DTYPES,
    NAMES,
    Call,
    Cause,
    GroupCalls,
    Ledger,
    Place,
    RankState,
    hold_inquest,
    judge,
    read_states,
)
from shoal.analyze.hang.call_log import SLOTS, Pages
from shoal.analyze.hang.process import Process, place_of
from shoal.analyze.hang.verdict import ranks_text
from shoal.cli.main import main
from shoal.testing import RankPool


def state(rank: int, *calls: Call, key: str = "all", size: int = 4, place: Place | None = None) -> RankState:
    return RankState(
        rank=rank, place=place, groups={key: GroupCalls(ranks=list(range(size)), calls=list(calls))}
    )


def reduce(number: int, finished: bool = True) -> Call:
    return Call(number=number, name="all_reduce", dtype="float32", bytes=64, finished=finished)


SLEEPING = Place(cause=Cause.SLEEP, text="sleeps in load.py:3 (load)")


@given(ranks=st.integers(2, 9), begun=st.integers(1, 300), queued=st.integers(0, 5))
def test_all_wait_in_the_first_collective_that_did_not_complete(ranks: int, begun: int, queued: int) -> None:
    finished = [reduce(number) for number in range(1, begun)]
    waits = Call(number=begun, name="all_gather", dtype="bfloat16", bytes=99)
    later = [reduce(number, finished=False) for number in range(begun + 1, begun + 1 + queued)]
    verdict = judge([state(rank, *finished, waits, *later, size=ranks) for rank in range(ranks)])
    assert verdict.cause is Cause.TRANSPORT
    assert f"all_gather(bfloat16, 99 bytes) of {ranks_text(range(ranks))} did not complete" in verdict.text


@given(ranks=st.integers(2, 9), late=st.data(), begun=st.integers(1, 300))
def test_the_ranks_that_did_not_come_are_named(ranks: int, late: st.DataObject, begun: int) -> None:
    absent = late.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1))
    states = []
    for rank in range(ranks):
        calls = [reduce(number) for number in range(1, begun)]
        calls += [] if rank in absent else [reduce(begun, finished=False)]
        states.append(state(rank, *calls, size=ranks, place=SLEEPING if rank in absent else None))
    verdict = judge(states)
    assert (verdict.cause, set(verdict.ranks)) == (Cause.SLEEP, absent)
    assert f"collective {begun} of its group" in verdict.text


def test_a_rank_that_waits_for_another_is_not_the_cause() -> None:
    # Rank 0 waits for 1, which waits for a message of 2, which sleeps.
    pair = GroupCalls(ranks=[1, 2], calls=[Call(number=1, name="receive", root=1)])
    chained = [
        RankState(rank=0, groups={"all": GroupCalls(ranks=[0, 1], calls=[reduce(1, finished=False)])}),
        RankState(rank=1, groups={"all": GroupCalls(ranks=[0, 1], calls=[]), "pair": pair}),
        RankState(rank=2, groups={"pair": GroupCalls(ranks=[1, 2], calls=[])}, place=SLEEPING),
    ]
    verdict = judge(chained)
    assert (verdict.cause, verdict.ranks) == (Cause.SLEEP, (2,))
    assert "rank 2 did not send to rank 1" in verdict.text


def test_a_receive_that_was_begun_early_hides_nobody() -> None:
    # Rank 1 has begun a receive, and sleeps; rank 0 waits for it in a collective.
    early = Call(number=1, name="receive", root=0)
    ranks = [
        state(0, reduce(1, finished=False), size=2),
        state(1, early, size=2, place=SLEEPING),
    ]
    verdict = judge(ranks)
    assert (verdict.cause, verdict.ranks) == (Cause.SLEEP, (1,))
    assert "did not come to all_reduce" in verdict.text


def test_ranks_that_wait_for_each_other_are_a_circle() -> None:
    def waiting(rank: int, own: str, other: str) -> RankState:
        both = [0, 1]
        return RankState(
            rank=rank,
            groups={
                own: GroupCalls(ranks=both, calls=[reduce(1, finished=False)]),
                other: GroupCalls(ranks=both, calls=[]),
            },
        )

    verdict = judge([waiting(0, "a", "b"), waiting(1, "b", "a")])
    assert (verdict.cause, verdict.ranks) == (Cause.CIRCLE, (0, 1))


@given(ranks=st.integers(2, 9), ahead=st.integers(1, 3))
def test_who_waits_for_a_transfer_to_which_all_came_is_not_the_cause(ranks: int, ahead: int) -> None:
    waits = Place(cause=Cause.WAITS, text="waits in a collective")
    slow = Call(number=1, name="reduce_scatter", dtype="float32", bytes=1 << 24)
    later = [reduce(number, finished=False) for number in range(2, 2 + ahead)]
    states = [state(0, slow, *later, size=ranks, place=waits)]
    states += [state(rank, slow, size=ranks, place=waits) for rank in range(1, ranks)]
    verdict = judge(states)
    assert verdict.cause is Cause.TRANSPORT
    assert "reduce_scatter" in verdict.text


def test_a_rank_without_a_record_and_a_slow_transport_are_told_apart() -> None:
    came = [state(rank, reduce(1), reduce(2, finished=False)) for rank in range(4)]
    assert judge(came).cause is Cause.TRANSPORT
    assert judge(came[:3]).cause is Cause.ABSENT
    assert judge(came[:3]).ranks == (3,)
    assert judge([state(rank, reduce(1)) for rank in range(4)]).cause is Cause.NONE


def test_a_folder_of_several_hangs_tells_of_the_last_one(tmp_path: Path) -> None:
    for name, when, group, rank in (
        ("a", 1000.0, "new", 0),
        ("b", 5000.0, "new", 0),
        ("c", 5005.0, "old", 1),
        ("d", 5010.0, "new", 1),
    ):
        states = [state(rank, reduce(int(when))).as_json()]
        told = {"when": when, "group": group, "states": states}
        (tmp_path / f"host-{name}.json").write_text(json.dumps(told))
    (tmp_path / "host-e.json").write_text('{"when": 9000')
    assert [(each.rank, each.groups["all"].begun) for each in read_states(tmp_path)] == [(0, 5000), (1, 5010)]


def test_what_another_group_met_a_moment_ago_is_not_taken_for_this_hang(tmp_path: Path) -> None:
    told = {"when": time.time(), "group": "before", "states": [state(1, reduce(1)).as_json()]}
    (tmp_path / "host-b.json").write_text(json.dumps(told))
    for group, lines in (("now", 0), ("before", 1)):
        own = hold_inquest([], ledgers=tmp_path, folder=tmp_path, host="a", group=group, ranks=1, reason="")
        assert len(own.lines) == lines


def test_a_call_in_addition_is_told_from_a_skipped_one() -> None:
    def made(*names: str) -> list[Call]:
        return [Call(number=number, name=name) for number, name in enumerate(names, 1)]

    usual = made("broadcast", "all_reduce", "barrier", "all_gather")
    for odd, cause, text in (
        (made("broadcast", "barrier", "all_gather"), Cause.SKIPPED, "it skipped it"),
        (made("broadcast", "gather", "all_reduce", "barrier"), Cause.ORDER, "in addition"),
        (made("broadcast", "barrier", "all_reduce", "all_gather"), Cause.ORDER, "the order differs"),
    ):
        verdict = judge([state(0, *usual), state(1, *odd), state(2, *usual)])
        assert (verdict.cause, verdict.ranks) == (cause, (1,))
        assert text in verdict.text


@given(
    calls=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(range(len(NAMES))),
            st.sampled_from(range(len(DTYPES))),
            st.integers(-1, 2**62),
            st.booleans(),
        ),
        max_size=2 * SLOTS,
    )
)
def test_a_ledger_keeps_the_last_calls(tmp_path_factory: pytest.TempPathFactory, calls: list[tuple]) -> None:  # type: ignore[type-arg]
    folder = tmp_path_factory.mktemp("ledgers")
    ledger = Ledger(folder, 3, 77)
    groups = [ledger.add_group([0, 3]), ledger.add_group([0, 3])]
    for number, (group, name, dtype, nbytes, finished) in enumerate(calls, 1):
        token = ledger.begin(groups[group], number, name, dtype, nbytes, -1)
        if finished:
            ledger.end(token)
    pages = Pages.of(os.getpid(), folder)
    assert pages is not None
    assert (pages.rank, pages.main_thread, pages.exited) == (3, 77, False)
    read = {
        call.number: (group, call)
        for group, key in enumerate(pages.groups)
        for call in pages.groups[key].calls
    }
    wanted = {
        number: (
            group,
            Call(number=number, name=NAMES[name], dtype=DTYPES[dtype], bytes=nbytes, finished=finished),
        )
        for number, (group, name, dtype, nbytes, finished) in list(enumerate(calls, 1))[-SLOTS:]
    }
    assert read == wanted


def test_a_torn_or_foreign_ledger_is_none(tmp_path: Path) -> None:
    (tmp_path / "calls-5").write_bytes(b"x" * 100)
    Ledger(tmp_path, 0, 1)
    (tmp_path / "calls-6").write_bytes((tmp_path / f"calls-{os.getpid()}").read_bytes())
    assert [Pages.of(pid, tmp_path) for pid in (4, 5, 6)] == [None] * 3


def test_the_kernel_tells_where_a_process_waits() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        until = time.monotonic() + 120
        while place_of(Process.look(child.pid)).cause is not Cause.SLEEP:
            assert time.monotonic() < until
        child.send_signal(signal.SIGSTOP)
        while (process := Process.look(child.pid)) is None or process.state != "T":
            pass
        assert place_of(process).cause is Cause.STOPPED
        child.kill()
    assert Process.look(child.pid) is None
    assert place_of(None).cause is Cause.DEAD


# --- dumps of torch ---


def dump(folder: str, as_json: bool) -> None:
    from torch._C import _distributed_c10d as c10d

    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    if rank < 2:
        dist.all_reduce(torch.ones(2), group=pair)
    works = [dist.all_reduce(torch.ones(8, dtype=torch.float64), async_op=True)] if rank != 2 else []
    time.sleep(0.5)  # torch notes a moment later that a call has completed
    data = c10d._dump_fr_trace_json() if as_json else c10d._dump_fr_trace()
    name = f"nccl_trace_rank_{rank}" + (".json" if as_json else "")
    Path(folder, name).write_bytes(data.encode() if isinstance(data, str) else data)
    while len(list(Path(folder).iterdir())) < 3:  # a rank that went on would complete what others dump
        time.sleep(0.01)
    dist.barrier() if rank != 2 else dist.all_reduce(torch.ones(8, dtype=torch.float64))
    if rank == 2:
        dist.barrier()
    for work in works:
        assert work is not None
        work.wait()


@pytest.mark.parametrize("as_json", [False, True], ids=["pickle", "json"])
def test_dumps_of_torch_name_the_rank_that_did_not_come(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")
    with RankPool("gloo") as pool:
        pool.run(dump, 3, str(tmp_path), as_json)
    assert main(["hang", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("rank 2 did not come to all_reduce(float64, 64 bytes)")
    assert "\n  rank 2, last finished " in told


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch evil",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [Evil()]}),
        pickle.dumps({"version": "1.5", "pg_config": {}, "entries": []}),
        pickle.dumps([1, 2]),
        b"\x80\x02r\xff\xff\xff\x7f.",
        b"\x80\x02}",
        b"",
        b"{" + b'"a":[' * 100_000,
        b'{"version": "2.10", "pg_config": {}, "entries": [{}]}',
    ],
    ids=["code", "old", "list", "memo", "torn", "empty", "deep", "no fields"],
)
def test_a_hostile_dump_is_refused(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace_0").write_bytes(data)
    assert main(["hang", str(tmp_path)]) == 2
    assert "change:" in capsys.readouterr().err
    assert not (tmp_path / "evil").exists()


def test_an_import_of_the_package_needs_no_torch() -> None:
    code = "import sys, shoal.analyze.hang, shoal.machine.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Twelve kinds of hang between real ranks: each is named, with the rank and its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import hang_ranks as ranks
import pytest

from shoal.cli.main import main
from shoal.collectives import is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="the native core was not built")

KINDS: tuple[tuple[Callable[[], None], int, str, str], ...] = (
    (ranks.be_killed, 1, "dead", "rank 1 is dead"),
    (ranks.be_stopped, 1, "stopped", "rank 1 is stopped (by SIGSTOP"),
    (ranks.loop_for_ever, 1, "loop", "(loop_for_ever)"),
    (ranks.load_a_sample, 1, "sleep", "(__getitem__)"),
    (ranks.wait_for_its_own_lock, 1, "lock", "(wait_for_its_own_lock)"),
    (ranks.hold_the_interpreter, 1, "native code", "(hold_the_interpreter)"),
    (ranks.skip_one, 3, "skipped", "rank 1 called barrier where ranks 0, 2 called all_reduce"),
    (
        ranks.change_the_order,
        3,
        "order",
        "rank 1 called all_gather(float32, 32 bytes) where ranks 0, 2 called",
    ),
    (
        ranks.send_another_size,
        3,
        "sizes",
        "262144 bytes) where ranks 0, 2 called all_reduce(float32, 1048576",
    ),
    (ranks.send_another_type, 3, "dtypes", "rank 1 called all_reduce(float64"),
    (ranks.leave_early, 1, "left", "rank 1 ended by itself"),
    (ranks.write_to_a_pipe_that_nobody_reads, 1, "file", "(write_to_a_pipe_that_nobody_reads)"),
    # A rank that is alone on its host finds out by itself that others fail.
    (ranks.load_a_sample, 3, "sleep", "(__getitem__)"),
)
QUICK = (ranks.be_killed, ranks.skip_one)


@pytest.mark.parametrize(
    ("act", "hosts", "cause", "evidence"),
    [
        pytest.param(
            *kind, id=f"{kind[0].__name__}-{kind[1]}", marks=[] if kind[0] in QUICK else [pytest.mark.long]
        )
        for kind in KINDS
    ],
)
def test_a_hang_is_named_with_its_rank_and_place(
    act: Callable[[], None],
    hosts: int,
    cause: str,
    evidence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = ranks.hang(tmp_path / "ranks", act, hosts=hosts)
    seconds, _, error = told[0]
    assert seconds < ranks.TIMEOUT + 60
    # The cause is on the first line, before what this rank met; then a line for each rank.
    assert evidence in error.splitlines()[0], error
    assert " failed: " in error.splitlines()[0]
    assert [line.split()[:2] for line in error.splitlines()[1:4]] == [
        ["rank", str(rank)] for rank in range(3)
    ]

    folder = tmp_path / "ranks" / "hang"
    assert main(["hang", str(folder), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["cause"], verdict["ranks"]) == (cause, [1])
    stacks = {rank: (folder / f"rank-{rank:05d}.txt").read_text() for rank in range(3)}
    assert "hang_ranks.py" in stacks[0]
    assert "in step" in stacks[0]
    assert "It waits in a collective" in stacks[0]
    if cause in ("loop", "sleep", "lock", "native code", "file"):
        assert act.__name__ in stacks[1]
        assert "Threads in the kernel\nthread " in stacks[1]

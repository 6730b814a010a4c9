"""The launcher, with ranks that are small programs."""

from __future__ import annotations

import json
import os
import sys
from unittest.mock import patch

import pytest

from shoal.errors import WorkerError
from shoal.launch.elastic.elastic import member_environments
from shoal.launch.local import launch, launch_on_node
from shoal.launch.local.launcher import rank_environments
from shoal.launch.submit import EXIT_STOPPED

PRELUDE = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
def end(exit_code, **outcome):
    content = {"rank": rank, "exit_code": exit_code, "when": time.time(), **outcome}
    with open(os.path.join(os.environ["SHOAL_OUTCOMES"], f"rank-{rank:05d}.json"), "w") as file:
        json.dump(content, file)
    sys.exit(exit_code)
def meet():
    folder = os.environ["SHOAL_OUTCOMES"]
    open(os.path.join(folder, f"here-{rank}"), "w").close()
    while not all(os.path.exists(os.path.join(folder, f"here-{other}")) for other in range(2)):
        time.sleep(0.01)
"""


def launched(program, count, environment, logs, grace=None):
    """Launches a Python program as ranks; its exit code or its error, and whether a variable was left."""
    before = dict(os.environ)
    command = [sys.executable, "-S", "-c", PRELUDE + program]
    with patch("shoal.launch.local.launcher.END", 0.5):
        try:
            code = launch(command, count, environment, logs=logs, grace=grace)
            return code, None, os.environ == before
        except WorkerError as error:
            return error.exit_code, error, os.environ == before


@pytest.fixture
def run(ranks):
    return lambda program, count=2, environment=None, logs=None, grace=None: ranks.run(
        launched, 1, program, count, {} if environment is None else environment, logs, grace, timeout=120
    )[0]


def test_ranks_have_torchruns_environment_and_leave_none_behind(run, tmp_path):
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
    )
    program = f"""
with open(os.path.join({str(tmp_path)!r}, str(rank)), "w") as file:
    json.dump({{name: os.environ[name] for name in {names}}}, file)
"""
    assert run(program, environment={"OMP_NUM_THREADS": "3"}) == (0, None, True)
    given = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [each.pop("RANK") for each in given] == ["0", "1"]
    assert [each.pop("LOCAL_RANK") for each in given] == ["0", "1"]
    assert given[0] == given[1]
    assert given[0]["WORLD_SIZE"] == "2"
    assert given[0]["OMP_NUM_THREADS"] == "3"
    assert given[0]["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1")])
def test_ranks_share_the_cores_unless_the_user_says_otherwise(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    own, given = (
        rank_environments("", range(ranks), ranks, ("node1", 29500), environment)[0]["OMP_NUM_THREADS"]
        for environment in ({}, {"OMP_NUM_THREADS": "5"})
    )
    assert (own, given) == (threads, "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    member = member_environments("", range(ranks, 2 * ranks), 2 * ranks, 29500, {}, None)[ranks]
    assert (member["OMP_NUM_THREADS"], member["RANK"], member["LOCAL_RANK"]) == ("7", str(ranks), "0")


def test_hosts_with_unequal_numbers_of_ranks_have_the_places_that_they_are_given():
    made = rank_environments("", range(3, 5), 5, ("node1", 4000), {}, place=(1, 2))
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in made.values()] == [("3", "0"), ("4", "1")]
    names = "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"
    assert [made[3][name] for name in names] == [made[4][name] for name in names] == ["1", "2", "2", "5"]


def test_a_rank_that_ends_without_a_word_is_named_with_its_exit_code(run):
    code, error, _ = run("time.sleep(60) if rank == 0 else sys.exit(3)")
    assert (code, error.rank) == (1, 1)
    assert "exit code 3" in error.reason


def test_a_rank_that_a_signal_killed_is_named_with_it(run):
    _, error, _ = run("time.sleep(60) if rank == 0 else os.kill(os.getpid(), 11)")
    assert error.rank == 1
    assert "SIGSEGV" in error.reason


def test_the_error_and_exit_code_of_the_rank_that_failed_first_are_told(run):
    program = """
meet()
if rank == 1:
    end(2, error="PlanError: of rank 1")
time.sleep(0.2)
end(1, error="CommunicationError: of rank 0", in_collective=True)
"""
    code, error, _ = run(program)
    assert (code, error.rank, error.reason) == (2, 1, "PlanError: of rank 1")


def test_a_rank_that_is_stopped_is_the_cause_of_the_failure_that_another_finds(run):
    program = """
meet()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.2)
end(1, error="CommunicationError: rank 1 has given no sign of life", in_collective=True)
"""
    code, error, _ = run(program)
    assert (code, error.rank) == (1, 1)
    assert "stopped" in error.reason
    assert "rank 0: CommunicationError: rank 1 has given no sign of life" in error.reason


def test_a_rank_that_the_launcher_had_to_kill_is_not_the_cause(run):
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
meet()
if rank == 1:
    time.sleep(60)
end(1, error="CommunicationError: rank 1 has given no sign of life", in_collective=True)
"""
    code, error, _ = run(program)
    assert (code, error.rank) == (1, 0)
    assert error.reason == "CommunicationError: rank 1 has given no sign of life"


def test_the_store_in_which_local_ranks_meet_is_out_of_reach_of_other_machines(run, tmp_path):
    program = f"""
def listening(table):
    rows = [line.split() for line in open(f"/proc/net/{{table}}")][1:]
    return [row[1] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]
port = int(os.environ["MASTER_PORT"])
with open({str(tmp_path / "listening")!r}, "w") as file:
    json.dump([listening("tcp"), listening("tcp6")], file)
"""
    assert run(program, 1)[0] == 0
    tcp, tcp6 = json.loads((tmp_path / "listening").read_text())
    assert [address.partition(":")[0] for address in tcp] == ["0100007F"]  # 127.0.0.1
    assert tcp6 == []


def test_what_each_rank_prints_is_kept_from_the_beginning_of_its_run(run, tmp_path):
    logs = tmp_path / "run" / "log"
    program = f"""
print("early words of", rank, flush=True)
meet()
if rank == 0:
    os.makedirs({str(logs)!r}, exist_ok=True)
print("late words of", rank, file=sys.stderr)
if rank == 1:
    os.kill(os.getpid(), 11)
"""
    for count in (1, 2):
        assert run(program, logs=logs)[1].rank == 1
        for rank in range(2):
            text = (logs / f"rank-{rank:05d}.log").read_text()
            assert text.count(f"early words of {rank}\nlate words of {rank}\n") == count
            assert f"words of {1 - rank}" not in text
    assert run(program, logs=tmp_path / "nothing" / "log")[1].rank == 1
    assert not (tmp_path / "nothing").exists()


def test_ranks_that_all_saved_after_a_signal_to_them_are_stopped_and_not_failed(run):
    # As a rank that heeds signals: what ends the others when the first is gone does not end it.
    program = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); meet(); end({EXIT_STOPPED})"
    assert run(program) == (EXIT_STOPPED, None, True)


SIGNAL_THE_LAUNCHER = """
meet()
if rank == 0:
    os.kill(int(os.environ["SHOAL_LAUNCHER"]), signal.SIGTERM)
"""


def test_a_signal_is_passed_on_and_ranks_that_save_are_stopped(run):
    program = f"""
signal.signal(signal.SIGTERM, lambda *_: end({EXIT_STOPPED}))
{SIGNAL_THE_LAUNCHER}
time.sleep(60)
"""
    assert run(program) == (EXIT_STOPPED, None, True)


def test_a_signal_that_ends_a_rank_before_it_saved_is_told(run):
    program = f"""
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: end(1, error="CommunicationError: lost", in_collective=True))
{SIGNAL_THE_LAUNCHER}
time.sleep(60)
"""
    code, error, _ = run(program)
    assert (code, error.rank) == (130, 1)
    assert "SIGTERM" in error.reason


def test_an_error_while_saving_after_a_signal_is_told(run):
    program = f"""
def fail(*_):
    if rank == 1:
        end(1, error="CheckpointError: the disk is full", detail="where")
    end(1, error="CheckpointError: rank 1: the disk is full", when=time.time() + 5)
signal.signal(signal.SIGTERM, fail)
{SIGNAL_THE_LAUNCHER}
time.sleep(60)
"""
    code, error, _ = run(program)
    assert (code, error.rank, error.detail) == (1, 1, "where")


STUCK = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
meet()
if rank == 0:
    os.kill(int(os.environ["SHOAL_LAUNCHER"]), signal.SIGUSR1)
"""


def test_control_c_after_a_signal_ends_ranks_that_notice_no_signal(run):
    program = f"""{STUCK}
    time.sleep(0.5)
    os.kill(int(os.environ["SHOAL_LAUNCHER"]), signal.SIGINT)
time.sleep(600)
"""
    code, error, _ = run(program)
    assert code == 130
    assert "ended by SIGUSR1 before its state was saved" in error.reason


def test_ranks_end_within_the_grace(run):
    code, error, _ = run(f"{STUCK}\ntime.sleep(600)", grace=1.0)
    assert code == 130
    assert "ended by SIGUSR1 before its state was saved" in error.reason


def test_ranks_of_one_host_of_several_have_their_places_and_their_names(ranks, tmp_path):
    program = f"""
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
with open(os.path.join({str(tmp_path)!r}, str(rank)), "w") as file:
    json.dump([os.environ[name] for name in names] + ["GLOO_SOCKET_IFNAME" in os.environ], file)
print("a word", flush=True)
open(os.path.join({str(tmp_path)!r}, f"done-{{rank}}"), "w").close()
if rank == 5:
    while not os.path.exists(os.path.join({str(tmp_path)!r}, "done-4")):
        time.sleep(0.01)
    end(1, error="ValueError: five")
time.sleep(60)
"""
    (error, told) = ranks.run(on_node, 1, program, tmp_path / "out", timeout=120)[0]
    assert json.loads((tmp_path / "4").read_text()) == ["4", "0", "8", "2", "2", "node1", "4000", False]
    assert json.loads((tmp_path / "5").read_text()) == ["5", "1", "8", "2", "2", "node1", "4000", False]
    assert sorted(told.splitlines()) == ["[node3 rank 4] a word", "[node3 rank 5] a word"]
    assert str(error) == "rank 5 failed: ValueError: five"


def on_node(program, out):
    """Launches a program as the third host of four; its error, and what its ranks printed."""
    command = [sys.executable, "-S", "-c", PRELUDE + program]
    before = os.dup(1)
    with out.open("w") as file, patch("shoal.launch.local.launcher.END", 0.5):
        os.dup2(file.fileno(), 1)
        try:
            launch_on_node(command, range(4, 6), 8, ("node1", 4000), "node3", {})
        except WorkerError as error:
            return error, out.read_text()
        finally:
            os.dup2(before, 1)
            os.close(before)
    return None, out.read_text()

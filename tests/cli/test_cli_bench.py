"""`shoal bench`, as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from shoal.cli.main import main
from shoal.collectives.ctypes_core import is_built

BENCH = [sys.executable, "-m", "shoal.cli.main", "bench"]
QUICK = ["--backend=gloo", "--sizes=64B,1KiB", "--rounds=2"]


@pytest.fixture
def bench(programs):
    return lambda *words, environment=None: programs.run(["bench", *words], environment=environment)


def test_json_is_one_object_with_machine_settings_and_every_rounds_time(bench):
    done = bench(*QUICK, "--collective=all_reduce,barrier", "--ranks=2", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert content["machine"]["copy_rate"] > 1e8
    assert content["settings"]["ranks"] == 2
    assert content["settings"]["backends"] == ["gloo"]
    assert [(row["collective"], row["bytes"]) for row in content["rows"]] == [
        ("all_reduce", 64),
        ("all_reduce", 1024),
        ("barrier", 0),
    ]
    for row in content["rows"]:
        assert len(row["seconds"]) == 2
        assert row["wrong"] == 0
    assert "measured: all_reduce, 64 bytes" in done.stderr


def test_the_table_comes_with_the_machines_facts_below(bench):
    done = bench(*QUICK, "--backend=gloo,memory", "--ranks=1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("all_reduce, 1 rank; ")
    assert lines[4].split()[0] == "64"
    assert any(line.startswith("a flag from core to core, one way: ") for line in lines)
    assert "torch" in lines[-2]
    assert "\033" not in done.stdout


def test_it_joins_the_ranks_that_are_there_and_rank_0_prints(programs, tmp_path):
    first, other = programs.run_ranks(["bench", *QUICK], 2, tmp_path)
    assert first.returncode == other.returncode == 0, first.stderr
    assert first.stdout.count("all_reduce, 2 ranks, gloo") == 1
    assert not other.stdout


@pytest.mark.skipif(not is_built(), reason="the native core is not built")
def test_shoal_is_measured_on_ordinary_and_on_shared_memory_with_the_algorithm_that_is_asked_for(bench):
    done = bench(*QUICK, "--backend=shoal,shoal-shared", "--collective=all", "--algorithm=ring", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["backend"] for row in rows} == {"shoal", "shoal-shared"}
    assert all(row["wrong"] == 0 and row["problem"] is None for row in rows)


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_mpi_is_measured_beside_a_backend_of_torch(bench):
    done = bench(*QUICK, "--backend=mpi,gloo", "--collective=all", "--ranks=2", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["backend"] for row in rows} == {"mpi", "gloo"}
    assert all(row["wrong"] == 0 and row["problem"] is None for row in rows)


def test_ctrl_c_ends_it_without_a_traceback_and_without_processes_left():
    process = subprocess.Popen(
        [*BENCH, "--backend=gloo", "--collective=all", "--rounds=20"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # of the first size; dozens are still to come
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
    deadline = time.monotonic() + 120
    while is_group(process.pid):  # the kernel may still be clearing away the last of it
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_group(number):
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--collective=all_reduc"], "did you mean 'all_reduce'"),
        (["--backend=gluo"], "did you mean 'gloo'"),
        (["--backend=nccl"], "--backend nccl cannot run here"),
        (["--sizes=1KB"], "did you mean '1KiB'"),
        (["--dtype=flaot32"], "did you mean 'float32'"),
        (["--op=mean"], "--op mean"),
        (["--ranks=0"], "--ranks 0"),
        (["--rounds=0"], "--rounds 0"),
        (["--algorithm=ring"], "for the backend shoal"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(capsys, monkeypatch, words, told):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", *QUICK, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert len(captured.err.splitlines()) == 3


def test_mpi_without_mpi4py_is_refused_with_the_extra(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shoal.machine.bench.contestants.availability.find_spec", lambda name: None)
    assert main(["bench", "--backend=mpi"]) == 2
    assert "pip install 'shoal[mpi]'" in capsys.readouterr().err


def test_mpi_cannot_join_the_ranks_of_torchrun(capsys, monkeypatch):
    monkeypatch.setattr("shoal.machine.bench.contestants.availability.find_spec", lambda name: True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert main(["bench", "--backend=mpi"]) == 2
    assert "mpirun -n N shoal bench" in capsys.readouterr().err


def test_shoal_without_its_native_core_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("shoal.machine.bench.contestants.availability.is_built", lambda: False)
    assert main(["bench"]) == 2
    assert "native core" in capsys.readouterr().err

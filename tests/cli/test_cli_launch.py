"""`shoal launch`: what it would start, what it refuses, and the hosts that something else starts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from port_stand_ins import free_port

from shoal.checkpoint import checkpoints, step_of
from shoal.cli.main import main
from shoal.spec.run import Run

KUBERNETES = ("kubernetes", "--image", "shoal:1")
NODE = ("node", "--nodes", "2", "--node", "0", "--master", "a:29500")


def test_hosts_that_something_else_starts_train_together(programs, tiny_run, tmp_path):
    port = free_port()
    words = [*("--nodes", "2", "--nproc", "1", "--master", f"127.0.0.1:{port}"), "--", "train", *tiny_run]
    pods = [{"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"pod-{index}"} for index in range(2)]
    given = ["launch", "node", *words, "--set", "steps=3", "--run", "run"]
    for pod in programs.run_each(given, tmp_path, pods):
        assert pod.returncode == 0, pod.stderr
    run = Run.open(tmp_path / "run")
    assert run.description["world_size"] == 2
    assert step_of(checkpoints(run.checkpoints)[0]) == 3


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (("local",), [shlex.join([sys.executable, "-m", "shoal", "train", "--plan", "dp=2"])]),
        (
            ("ssh", "--hosts", "a,b", "--nodes", "1"),
            [r"ssh .* -- a 'cd .* -m shoal\.launch\.hosts'", r".* -- b .*  # a spare"],
        ),
        (("ray", "--nodes", "2", "--nproc", "4"), [r"ray\.init", r"actors .*: 2; each with 4 CPUs"]),
        (
            ("slurm", "--nodes", "2"),
            [r"#!/bin/bash", r"#SBATCH --nodes=2", r"srun .* train --plan dp=2 --run runs/.*"],
        ),
        (KUBERNETES, [r"kind: JobSet"]),
        (("container",), [r"FROM python:3\.12-slim AS build", r'CMD \["train", "--plan", "dp=2"\]']),
        (NODE, [r"one rank for each GPU.*; host 0 of 2; .* at a:29500", r".* -m shoal train --plan dp=2"]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_dry_run_prints_what_would_start_and_starts_nothing(target, told, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["launch", *target, "--dry-run", "--", "train", "--plan", "dp=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for pattern in told:
        assert any(re.match(pattern, line) for line in lines), lines
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("local", "--", "plan"), "shoal launch was to start `plan`"),
        (("ssh", "--hosts", "a,a", "--", "train"), "names a twice"),
        (
            ("ssh", "--hosts", "-oProxyCommand=x", "--", "train"),
            "no host|expected one argument|holds '-oProxy",
        ),
        (("ssh", "--hosts", "a,-oX", "--", "train"), "holds '-oX'"),
        (("ssh", "--hosts", "a", "--nodes", "2", "--", "train"), "--nodes 2 was given with 1 hosts"),
        (("ssh", "--hosts", "a", "--", "train", "--nproc", "2"), "--nproc was given to train"),
        (("ssh", "--hosts", "a", "--env", "NO_SUCH", "--", "train"), "no such variable"),
        (("ssh", "--hosts-file", "none", "--", "train"), "none cannot be read"),
        (("slurm", "--sbatch", "signal=9", "--", "train"), "--sbatch signal was given"),
        (("slurm", "--", "train", "--nproc=2"), "--nproc was given to train"),
        (("slurm", "--", "train", "--grace", "9"), "--grace was given to train"),
        (("slurm", "--restarts", "-1", "--", "train"), "-1 is below 0"),
        ((*KUBERNETES, "--name", "A", "--", "train"), "'A' was given as a name"),
        ((*KUBERNETES, "--form", "trainjob", "--secret", "x", "--", "train"), "--secret was given"),
        (("node", "--nodes", "2", "--", "train"), "--node is not given"),
        (("node", "--nodes", "2", "--node", "2", "--", "train"), "--node 2 was given with --nodes 2"),
        (("node", "--nodes", "2", "--node", "0", "--", "train"), "--master is not given"),
        (("container", "--base", "", "--", "train"), "--base '' is no name"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(words, told, capsys, monkeypatch):
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    try:
        code = main(["launch", *words])
    except SystemExit as ended:  # argparse's own
        code = ended.code
    assert code == 2
    assert re.search(told, capsys.readouterr().err)


def test_the_words_of_train_are_checked_before(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["launch", "slurm", "--dry-run", "--", "train", "--plam", "dp=2"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --plam" in capsys.readouterr().err


@pytest.mark.parametrize("target", [("slurm", "--grace", "90"), (*KUBERNETES, "--grace", "90")])
def test_a_second_start_goes_on_and_the_ranks_know_the_grace(target, capsys):
    assert main(["launch", *target, "--dry-run", "--", "train", "--run", "one"]) == 0
    words = re.sub(r"\s+(- )?", " ", capsys.readouterr().out.replace('"', ""))
    assert "train --run one --resume auto --grace 90" in words


def test_hosts_of_a_file_have_ranks_of_their_own(tmp_path, capsys):
    from shoal.launch.fleet import Host, read_hosts

    (tmp_path / "hosts").write_text("# ours\nnode1 slots=8\n\nme@node2  # the new one\n")
    assert read_hosts(tmp_path / "hosts") == [Host("node1", 8), Host("me@node2")]
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfnode1 slots=8\r\nme@node2\r\n")  # as some editors save it
    assert read_hosts(tmp_path / "hosts") == [Host("node1", 8), Host("me@node2")]
    (tmp_path / "hosts").write_text("node1\nnode2 slots=many\n")
    assert main(["launch", "ssh", "--hosts-file", str(tmp_path / "hosts"), "--", "train"]) == 2
    assert "line 2 of" in capsys.readouterr().err

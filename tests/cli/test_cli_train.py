"""`shoal train` and `shoal sample` as a user runs them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from shoal.cli.main import main
from shoal.cli.train import _how_to_go_on
from shoal.spec.run import Run
from shoal.spec.run.writer import claimed
from shoal.testing import RankPool
from shoal.train.result import summary

PROGRAM = [sys.executable, "-m", "shoal"]
STEPS = 6


def start(words, folder):
    return subprocess.Popen(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_run):
    """The same training, once with ranks of our own and once under torchrun: folder, stdout and stderr."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["train", *tiny_run, "--set", f"steps={STEPS}", "--plan", "shard=zero1"]
    # Without "--" the argparse of Python 3.11 has torchrun read our --run as a part of its own --run-path.
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "--",
    ]
    started = {
        "local": start([*PROGRAM, *words, "--nproc", "2", "--run", "local"], folder),
        "torchrun": start([*torchrun, "shoal.cli.main", *words, "--run", "torchrun"], folder),
    }
    ended = {
        name: (*process.communicate(timeout=600), process.returncode) for name, process in started.items()
    }
    return folder, ended


def test_under_torchrun_the_ranks_that_are_there_train_as_our_own_do(trained):
    folder, ended = trained
    assert [code for _, _, code in ended.values()] == [0, 0], ended
    local, joined = Run.open(folder / "local"), Run.open(folder / "torchrun")
    assert local.description["world_size"] == joined.description["world_size"] == 2
    values = [
        [(each["step"], each["loss"], each.get("validation_loss")) for each in run.metrics()]
        for run in (local, joined)
    ]
    assert values[0] == values[1]
    assert [step for step, _, _ in values[0]] == list(range(1, STEPS + 1))
    assert sorted(path.name for path in joined.timeline.iterdir()) == ["rank-00000.jsonl", "rank-00001.jsonl"]


def test_progress_is_on_stderr_and_the_summary_on_stdout(trained):
    folder, ended = trained
    for name, (out, err, _) in ended.items():
        run = Run.open(folder / name)
        assert [line.split()[0] for line in out.splitlines()] == [
            *("run", "model", "steps", "tokens/s", "loss", "validation", "step", "next")
        ]
        assert f"Plan {run.description['plan']}" in out
        assert f"{run.metrics()[-1]['validation_loss']:.3f} nats a byte" in out
        assert f"step {STEPS}/{STEPS}" in err
        assert "\x1b" not in out + err  # there is no terminal
        assert not any(word in err for word in ("[W", "Warning", "torch/"))  # remarks of torch
    kept = (folder / "local" / "log" / "rank-00000.log").read_text()
    assert f"step {STEPS}/{STEPS}" in kept
    assert ended["local"][0] in kept


def test_the_commands_that_are_told_hold_for_a_directory_of_any_name(trained, tmp_path):
    shutil.copytree(trained[0] / "local", copy := tmp_path / "it's a run\n")
    told = shlex.split(summary(Run.open(copy)).partition("\nnext ")[2])
    assert told[:5] == ["shoal", "report", str(copy), "shoal", "sample"]
    assert shlex.split(_how_to_go_on(copy).partition("with: ")[2]) == [
        "shoal",
        "train",
        "--resume",
        str(copy),
    ]


def test_what_was_learnt_is_sampled_and_the_same_each_time(trained, capsys):
    folder, _ = trained
    printed = []
    for _ in range(2):
        assert main(["sample", str(folder / "local"), "--prompt", "the ", "--tokens", "20"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].startswith("the ")
    assert len(printed[0].removeprefix("the ").removesuffix("\n")) > 0


def test_the_run_can_be_reported(trained, capsys):
    folder, _ = trained
    assert main(["report", str(folder / "torchrun"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == STEPS
    assert sorted(summary["breakdown"]["ranks"]) == ["0", "1"]


def test_the_summary_and_the_report_tell_the_same_speed(trained, capsys):
    folder, ended = trained
    assert main(["report", str(folder / "local")]) == 0
    told = [
        next(line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("tokens/s "))
        for text in (ended["local"][0], capsys.readouterr().out)
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "words", [("--prompt", ""), ("--tokens", "-1"), ("--temperature", "-1"), ("--top-k", "0")]
)
def test_what_cannot_be_sampled_is_refused(trained, capsys, words):
    folder, _ = trained
    assert main(["sample", str(folder / "local"), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "possible: " in captured.err


def test_a_run_without_a_checkpoint_cannot_be_sampled(trained, tmp_path, capsys):
    folder, _ = trained
    run = Run.create(tmp_path / "run", Run.open(folder / "local").description)
    assert main(["sample", str(run.path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no checkpoint" in captured.err


MODEL = """
from torch import nn

def make(width=8):
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))
"""


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    return tmp_path


def train_here(arguments, folder):
    os.chdir(folder)
    return main(arguments)


def test_a_model_from_the_users_folder_is_trained_and_sampled(ranks, tiny_run, own_folder, capsys):
    (own_folder / "model_of_mine.py").write_text(MODEL)
    settings = [word for word in tiny_run if not word.startswith("model_options")]
    settings = ["--set", "model=model_of_mine:make"]
    for option, setting in zip(tiny_run[::2], tiny_run[1::2], strict=True):
        if not setting.startswith("model_options"):
            settings += [option, setting]
    words = ["train", *settings, "--set", "model_options.width=4", "--set", "steps=3", "--nproc", "1"]
    assert ranks.run(train_here, 1, [*words, "--run", "run"], own_folder) == [0]
    assert main(["sample", "run", "--tokens", "5"]) == 0
    run = Run.open("run")
    assert run.description["model"]["parameters"] == 2 * 256 * 4 + 256
    assert "step 3/3" in (run.log / "rank-00000.log").read_text()


WANDERS = """
import os
from torch import nn

class Wanders(nn.Sequential):
    def train(self, mode=True):
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")
        return super().train(mode)

def make(width=8):
    return Wanders(nn.Embedding(256, width), nn.Linear(width, 256))
"""


def test_a_model_that_changes_the_working_directory_leaves_a_run_in_one_place(ranks, tiny_run, own_folder):
    (own_folder / "model_that_wanders.py").write_text(WANDERS)
    words = [word for word in tiny_run if word != "--set" and not word.startswith("model_options")]
    words += ["model=model_that_wanders:make", "model_options.width=4", "steps=2", "checkpoint.every=1"]
    settings = [word for setting in words for word in ("--set", setting)]
    words = ["train", *settings, "--run", "runs/one", "--nproc", "1"]
    assert ranks.run(train_here, 1, words, own_folder) == [0]
    assert list(own_folder.rglob("run.json")) == [own_folder / "runs" / "one" / "run.json"]
    run = Run.open(own_folder / "runs" / "one")
    log = (run.log / "rank-00000.log").read_text()
    assert "run runs/one: " in log
    assert "shoal report runs/one" in log
    again = ["train", "--resume", "runs/one", "--set", "steps=4"]
    assert ranks.run(train_here, 1, again, own_folder) == [0]
    assert [values["step"] for values in run.metrics()] == [1, 2, 3, 4]
    assert not [path for path in own_folder.rglob("checkpoints") if path != run.checkpoints]


OPTIMIZER = """
import torch

def sgd(groups, lr, **options):
    return torch.optim.SGD(groups, lr=lr, **options)

def halves(step, steps):
    return 1.0 if 2 * step < steps else 0.5
"""


def test_a_run_with_an_optimizer_from_the_users_folder_goes_on_from_another(ranks, tiny_run, own_folder):
    (own_folder / "optimizer_of_mine.py").write_text(OPTIMIZER)
    (own_folder / "elsewhere").mkdir()
    words = ["optimizer.name=optimizer_of_mine:sgd", "optimizer.schedule=optimizer_of_mine:halves", "steps=2"]
    settings = [*tiny_run, *(word for text in words for word in ("--set", text)), "--nproc", "1"]
    assert ranks.run(train_here, 1, ["train", *settings, "--run", "run"], own_folder) == [0]
    run = Run.open(own_folder / "run")
    assert run.description["config"]["model_folder"] == str(own_folder)
    again = ["train", "--resume", "../run", "--set", "steps=4"]
    with RankPool("shoal") as others:  # whose processes have not imported the module
        assert others.run(train_here, 1, again, own_folder / "elsewhere") == [0]
    assert [values["step"] for values in run.metrics()] == [1, 2, 3, 4]


def test_without_arguments_ranks_are_as_many_as_cores_and_share_the_batch(tiny_run, monkeypatch):
    from shoal.train import choose_ranks, load_config, resolve

    for cores, plan, batch, expected in [
        (1, "", 16, 1),
        (2, "", 16, 2),
        (8, "", 12, 6),
        (3, "", 16, 2),
        (8, "dp=4,shard=zero1", 16, 4),
        (8, "replicate=2,shard=zero3", 12, 6),
        (1, "replicate=2,shard=zero3", 12, 2),
    ]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        config = load_config(settings=[f"plan={plan}", f"batch={batch}", "device=cpu"])
        assert choose_ranks(config, None) == expected
        assert resolve(config, expected).plan.ranks == expected


def test_a_run_goes_on_with_the_number_of_ranks_that_its_new_plan_names(trained, ranks, tmp_path):
    shutil.copytree(trained[0] / "local", tmp_path / "run")
    words = ["train", "--resume", "run", "--set", "plan=dp=1", "--set", f"steps={STEPS + 2}"]
    assert ranks.run(train_here, 1, words, tmp_path) == [0]
    run = Run.open(tmp_path / "run")
    assert run.description["world_size"] == 1
    assert [values["step"] for values in run.metrics()] == list(range(1, STEPS + 3))


def test_a_refused_command_notes_no_end_of_the_run_that_another_one_writes(trained, tmp_path, capsys):
    shutil.copytree(trained[0] / "local", tmp_path / "run")
    run = Run.open(tmp_path / "run")
    before = run.events_file.read_bytes()
    words = ["train", "--resume", str(run.path), "--nproc", "2", "--set", f"steps={STEPS + 2}"]
    with claimed(run.checkpoints):
        assert main(words) == 2
    assert "writes the run" in capsys.readouterr().err
    assert run.events_file.read_bytes() == before

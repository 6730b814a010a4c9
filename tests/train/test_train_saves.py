"""Checkpoints beside the training: equal to those that training waits for, and loud where they fail."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from port_stand_ins import free_port
from run_stand_ins import train
from saves_stand_ins import save_beside_steps, save_in_memory, save_without_memory, shoal_with

from shoal.checkpoint import SingleProcess, checkpoints, read_manifest, step_of, verify
from shoal.errors import CheckpointError, ConfigError
from shoal.launch.submit import EXIT_STOPPED
from shoal.spec.plan import Plan
from shoal.spec.run import Run
from shoal.train import CheckpointConfig, load_config
from shoal.train.checkpointer import Begun
from shoal.train.save_policy import SavePolicy


def settings(**values: object) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def saved(folder: Any) -> list[int]:
    return [step_of(path) for path in checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize("plan", ["shard=zero1", "exchange=local,every=2,fragments=1"])
def test_what_is_saved_beside_the_training_has_the_bytes_of_what_it_waits_for(
    ranks, tiny_run, tmp_path, plan
):
    for run, background in (("behind", "true"), ("waits", "false")):
        words = settings(steps=7, checkpoint__every=2, checkpoint__keep=9, checkpoint__background=background)
        train(ranks, [*tiny_run, "--run", run, "--plan", plan, *words], tmp_path, on=2)
    assert saved(tmp_path / "behind") == saved(tmp_path / "waits") == [7, 6, 4, 2]
    for ours, theirs in zip(
        *(checkpoints(tmp_path / run / "checkpoints") for run in ("behind", "waits")), strict=True
    ):
        verify(ours)
        assert read_manifest(ours).files == read_manifest(theirs).files
        assert read_manifest(ours).state == read_manifest(theirs).state


def test_a_disk_that_fails_behind_the_training_is_told_and_counted_and_training_goes_on(
    ranks, tiny_run, tmp_path
):
    words = ["train", *tiny_run, "--run", "run", *settings(steps=8, checkpoint__every=2, checkpoint__keep=9)]
    ended = ranks.run(shoal_with, 2, "failing disk", words, tmp_path, free_port(), 1)
    _, out, err = ended[0]
    assert [each[0] for each in ended] == [0, 0], err
    told = [line for line in err.splitlines() if "was not saved" in line]
    assert len(told) == 1
    assert told[0].startswith("warning: step 4 was not saved, training goes on: cannot save step 4 in ")
    assert told[0].endswith(": rank 1: Input/output error")
    assert "; 1 failed" in next(line for line in out.splitlines() if line.startswith("saves "))
    assert saved(tmp_path / "run") == [8, 6, 2]
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))
    train(ranks, [*tiny_run, "--resume", "run", *settings(steps=9)], tmp_path)


def test_a_save_that_is_due_waits_for_the_one_before_and_the_last_is_complete(ranks, tiny_run, tmp_path):
    words = ["train", *tiny_run, "--run", "run", *settings(steps=4, checkpoint__every=1)]
    code, _, err = ranks.run(shoal_with, 1, "slow disk", [*words, "--nproc", "1"], tmp_path)[0]
    assert code == 0, err
    told = [line for line in err.splitlines() if "for the save before to end" in line]
    assert [line.split(":")[0] for line in told] == ["step 2", "step 3", "step 4"]
    assert saved(tmp_path / "run") == [4, 3]


def test_a_run_that_is_stopped_completes_the_save_that_goes_on_and_saves_where_it_stops(
    ranks, tiny_run, tmp_path
):
    words = ["train", *tiny_run, "--run", "run", *settings(steps=10**6, checkpoint__every=1)]
    trouble = "slow disk and a signal"
    code, _, err = ranks.run(shoal_with, 1, trouble, [*words, "--nproc", "1"], tmp_path)[0]
    assert code == EXIT_STOPPED, err
    newest, before = checkpoints(tmp_path / "run" / "checkpoints")
    made = Run.open(tmp_path / "run").metrics()[-1]["step"]
    assert (step_of(newest), step_of(before)) == (made, made - 1)
    verify(newest)
    verify(before)


def test_without_memory_for_a_copy_training_waits_for_the_save_and_says_so(ranks, tiny_run, tmp_path):
    words = ["train", *tiny_run, "--run", "run", *settings(steps=4, checkpoint__every=2)]
    ended = ranks.run(shoal_with, 2, "little memory", words, tmp_path, free_port(), 1)
    assert [each[0] for each in ended] == [0, 0], ended[0][2]
    told = [line for line in ended[0][2].splitlines() if "of free memory" in line]
    assert len(told) == 1
    assert told[0].startswith("step 2: training waited ")
    assert "a copy of the state takes" in told[0]
    assert told[0].endswith("which has 9.766KiB of free memory")
    assert saved(tmp_path / "run") == [4, 2]


def test_without_memory_for_its_files_a_save_in_memory_is_left_out_and_members_go_on_from_the_disk(
    ranks, tmp_path
):
    [(said, on_disk, in_memory)] = ranks.run(save_in_memory, 1, tmp_path)
    assert len(said) == 1
    assert said[0].startswith("warning: step 1 was not saved in memory: its files take ")
    assert said[0].endswith("of which 9.766KiB is free")
    assert on_disk == ["step-00000003", "step-00000002"]
    assert in_memory == ["step-00000006"]  # a rank that comes needs the room of older ones


def test_without_a_memory_file_system_members_that_change_keep_as_many_checkpoints_as_the_run(
    ranks, tmp_path
):
    [(on_change, at_the_end)] = ranks.run(save_without_memory, 1, tmp_path / "checkpoints")
    assert on_change == ["step-00000003", "step-00000002"]
    assert at_the_end == ["step-00000004", "step-00000003"]


def test_a_trainer_saves_the_state_of_the_copy_and_links_what_is_not_trained(ranks, tmp_path):
    [(told, places)] = ranks.run(save_beside_steps, 1, tmp_path / "run")
    name, behind = told
    assert name == "step-00000005"
    assert behind.endswith("step-00000002 None")
    assert places[0] == places[1]


class Told:
    """A Trainer that only counts steps and saves, of which each stops it for half a second."""

    def __init__(self, plan: str = "dp=1") -> None:
        self.plan = Plan.parse(plan)
        self.step_count, self.steps = 0, 1000
        self.saved: list[int] = []
        self.state, self.exchange = (
            SimpleNamespace(require_savable=lambda: None),
            SimpleNamespace(leads=False),
        )
        self.checkpointer = self

    def to_save(self, directory: Path, extra: Any) -> tuple[Path, int, Any]:
        return directory, self.step_count, extra

    def save(self, *_: Any, **__: Any) -> Path:
        raise CheckpointError("in the step")

    def begin(self, *_: Any, told: Any, **__: Any) -> Begun:
        self.saved.append(self.step_count)
        told(SimpleNamespace(seconds=3.0, warnings=[], error=None, path=None))
        return Begun(waited=0.0, stalled=0.5)


@pytest.mark.parametrize(("mtbf", "seconds"), [(1.0, math.sqrt(2 * 0.5 * 3600)), (0.001, 3.0)])
def test_the_interval_follows_the_time_to_save_and_the_mean_time_between_failures(mtbf, seconds, tmp_path):
    trainer, said = Told(), []
    config = CheckpointConfig(every="auto", mtbf=mtbf)
    policy = SavePolicy(trainer, config, tmp_path, {}, SingleProcess(), said.append)
    for _ in range(400):
        trainer.step_count += 1
        policy.stepped(0.1, is_made=True)
        policy.save_if_due(trainer.step_count - 1)
    every = round(seconds / 0.1)  # never sooner than a save takes
    assert trainer.saved == list(range(10, 401, every))
    assert len(said) == 1
    assert said[0].startswith(f"a checkpoint every {every} steps of 100 ms: training waits 500 ms for one")


def test_the_interval_follows_the_failures_that_the_run_has_seen(tmp_path):
    trainer, said = Told(), []
    account = SimpleNamespace(failures=4, running=3600.0)
    config = CheckpointConfig(every="auto", mtbf=24.0)
    policy = SavePolicy(trainer, config, tmp_path, {}, SingleProcess(), said.append, lambda: account)
    for _ in range(10):
        trainer.step_count += 1
        policy.stepped(0.1, is_made=True)
        policy.save_if_due(trainer.step_count - 1)
    every = round(math.sqrt(2 * 0.5 * 25 * 3600 / 5) / 0.1)
    assert said[0].startswith(f"a checkpoint every {every} steps of 100 ms")
    assert "fails every 5 h 0 min (expected 24 h 0 min, seen 4 in 1 h 0 min)" in said[0]


def test_state_in_files_is_saved_in_the_step_because_a_copy_would_take_memory(tmp_path):
    trainer, said = Told("dp=1,offload=optimizer:file"), []
    policy = SavePolicy(trainer, CheckpointConfig(every=1), tmp_path, {}, SingleProcess(), said.append)
    trainer.step_count = 1
    policy.save_if_due(0)
    assert trainer.saved == []
    assert said == ["warning: step 1 was not saved, training goes on: in the step"]


def test_every_is_a_number_or_auto():
    assert load_config(settings=["checkpoint.every=auto"]).checkpoint.every == "auto"
    for wrong in ("-1", "often"):
        with pytest.raises(ConfigError, match=r"checkpoint\.every cannot be"):
            load_config(settings=[f"checkpoint.every={wrong}"])

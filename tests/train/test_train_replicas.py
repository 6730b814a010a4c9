"""Replicas are compared bit by bit: equal ones are never suspected, and one flipped bit is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_stand_ins import STEPS, make_trainer

from shoal.errors import CommunicationError, ReplicaError
from shoal.models import next_token_loss
from shoal.parallel.local_shards import checksum
from shoal.spec.plan import Plan
from shoal.spec.run import Run
from shoal.train import Runtime

PLANS = [
    "dp=4",
    "dp=4,precision=bf16",
    "dp=4,shard=zero1",
    "dp=4,replicate=2,shard=zero2,precision=bf16",
    "dp=4,replicate=2,shard=zero3",
    "dp=2,tp=2",
    "dp=2,tp=2,tensor=plain",
    "dp=2,cp=2",
    "dp=2,pp=2",
    "dp=4,exchange=local,every=3",
    "dp=4,exchange=bucketed,compress=int8",
]


def train_compared(plan: str) -> int | None:
    """Train with a comparison in each step; return the last step before which replicas were equal."""
    trainer = make_trainer(plan, runtime=Runtime(compare_replicas=1))
    for _ in range(STEPS):
        trainer.step()
    trainer.close()
    return trainer._stepping.replicas._equal_after


@pytest.mark.parametrize("plan", PLANS)
def test_replicas_that_train_alike_are_equal_in_every_step(ranks, plan):
    number = Plan.parse(plan).ranks
    assert ranks.run(train_compared, number, plan) == [STEPS - 1] * number


def flip(tensor: torch.Tensor, bit: int) -> None:
    words = tensor.data.view(-1)[:1].view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    words ^= 1 << bit


class FlippingLoss:
    """The usual loss; flips a bit of the weights that compute, in the forward of a step."""

    def __init__(self, name: str, bit: int) -> None:
        self.name, self.bit, self.trainer = name, bit, None

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.trainer is not None:
            flip(self.trainer._stepping.replicas._weights[self.name], self.bit)
            self.trainer = None
        return next_token_loss(output, targets)


def train_with_a_flip(
    plan: str, rank: int, name: str, bit: int, every: int, *, is_computing: bool = False
) -> tuple[str, str]:
    """Train; after three steps a bit flips on one rank. Return this rank's error and its text."""
    loss = FlippingLoss(name, bit)
    trainer = make_trainer(plan, runtime=Runtime(compare_replicas=every), loss=loss)
    for _ in range(3):
        trainer.step()
    if torch.distributed.get_rank() == rank and is_computing:
        loss.trainer = trainer
    elif torch.distributed.get_rank() == rank:
        flip(next(each.local for each in trainer.parallel.owned if each.name == name), bit)
    try:
        for _ in range(STEPS - 3):
            trainer.step()
    except (ReplicaError, CommunicationError) as error:
        return type(error).__name__, str(error)
    return "", ""


UP, NORM, EMBEDDING = "blocks.0.feed_forward.up.weight", "norm.weight", "embed.weight"


def require_named(told, rank, name, peers):
    for number, (kind, text) in enumerate(told):
        assert kind == ("ReplicaError" if number == rank else "CommunicationError")
        assert text.startswith(f"rank {rank} holds other bits of {name} than {peers}, after step 3: ")
        assert "equal after step 2" in text


@pytest.mark.parametrize(
    ("plan", "rank", "name", "bit", "peers"),
    [
        ("dp=4", 2, UP, 0, "ranks 0, 1, 3"),
        ("dp=4", 0, EMBEDDING, 30, "ranks 1, 2, 3"),
        ("dp=4,precision=bf16", 1, UP, 0, "ranks 0, 2, 3"),
        ("dp=2,tp=2", 3, NORM, 12, "ranks 0, 1, 2"),
    ],
)
def test_a_flipped_bit_is_named_with_its_rank_and_parameter(ranks, plan, rank, name, bit, peers):
    told = ranks.run(train_with_a_flip, Plan.parse(plan).ranks, plan, rank, name, bit, 1)
    require_named(told, rank, name, peers)


def flip_while_computing(plan, rank, name, bit):
    return train_with_a_flip(plan, rank, name, bit, 1, is_computing=True)


@pytest.mark.parametrize(
    "plan", ["dp=4,shard=zero1", "dp=4,shard=zero2,precision=bf16", "dp=4,precision=bf16"]
)
def test_a_flip_in_a_copy_that_computes_is_named_before_the_optimizer_uses_its_gradient(ranks, plan):
    require_named(ranks.run(flip_while_computing, 4, plan, 2, UP, 4), 2, UP, "ranks 0, 1, 3")


def test_two_replicas_that_differ_are_both_told_as_none_is_the_majority(ranks):
    told = ranks.run(train_with_a_flip, 2, "dp=2", 1, UP, 3, 1)
    assert {kind for kind, _ in told} == {"ReplicaError"}
    assert all(f"ranks 0, 1 should hold the same {UP}" in text for _, text in told)


def test_a_flip_waits_for_the_next_comparison_and_none_is_made_if_none_is_wanted(ranks):
    late = ranks.run(train_with_a_flip, 4, "dp=4", 1, UP, 3, 5)
    assert all("after step 5" in text and "equal after step 0" in text for _, text in late)
    assert ranks.run(train_with_a_flip, 4, "dp=4", 1, UP, 3, 0) == [("", "")] * 4


def save_with_a_flip(folder):
    trainer = make_trainer("dp=4", runtime=Runtime(compare_replicas=100))
    trainer.step()
    if torch.distributed.get_rank() == 1:
        flip(trainer.parallel.owned[0].local, 3)
    try:
        trainer.save(folder)
    except (ReplicaError, CommunicationError) as error:
        return str(error)
    return ""


def test_replicas_that_differ_are_not_saved(ranks, tmp_path):
    told = ranks.run(save_with_a_flip, 4, tmp_path)
    assert all(text.startswith("rank 1 holds other bits of ") for text in told)
    assert not list(tmp_path.glob("step-*/manifest.json"))


@given(
    st.integers(1, 9000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool]),
    st.integers(0, 3),
    st.data(),
)
def test_each_flip_of_a_bit_changes_the_checksum(elements, dtype, first, data):
    whole = torch.zeros((elements + first) * dtype.itemsize, dtype=torch.uint8).random_(0, 2).view(dtype)
    tensor = whole[first:]
    before = int(checksum(tensor))
    assert before == int(checksum(tensor.clone()))
    place = data.draw(st.integers(0, tensor.nbytes - 1))
    tensor.view(torch.uint8)[place] ^= 1 << data.draw(st.integers(0, 0 if dtype == torch.bool else 7))
    assert int(checksum(tensor)) != before


def test_words_of_two_chunks_that_change_places_change_the_checksum():
    words = torch.arange(20_000)
    moved = words.clone()
    moved[[1, 9_000]] = words[[9_000, 1]]
    assert int(checksum(words)) != int(checksum(moved))
    assert int(checksum(words[:0])) == 0
    assert checksum(words.view(100, 200).t()).shape == ()


# The schedule is called at the beginning of each step, on every rank.
FLIPS = """
import gc, os
import torch

def begin(step, steps):
    if step == 6 and os.environ["SHOAL_MEMBER"] == "1" and os.environ["SHOAL_AFTER"] == "-1":
        held = next(each for each in gc.get_objects() if type(each) is torch.nn.Parameter and each.dim() == 2)
        held.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
    return 1.0
"""


@pytest.mark.long
def test_members_go_on_without_a_rank_whose_memory_changed(tiny_run, tmp_path):
    (tmp_path / "flips_at_home.py").write_text(FLIPS)
    own = ["steps=12", "compare_replicas=1", "optimizer.schedule=flips_at_home:begin"]
    words = [*tiny_run, "--nproc", "2:4", "--restarts", "0", "--plan", "shard=none", "--run", "one"]
    ended = subprocess.run(
        [sys.executable, "-m", "shoal", "train", *words, *(w for each in own for w in ("--set", each))],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr
    assert "rank 1 failed: " in ended.stderr
    assert "rank 1 holds other bits of " in ended.stderr
    lost = [json.loads(line) for line in (tmp_path / "one" / "members.jsonl").read_text().splitlines()]
    assert [each["members"] for each in lost if each["event"] == "lost"] == [[1]]
    assert Run.open(tmp_path / "one").metrics()[-1]["step"] == 12

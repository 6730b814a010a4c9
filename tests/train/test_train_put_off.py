"""First values that are put off: a checkpoint replaces them, or they come later, and are the same."""

import shutil

import pytest
import torch
from port_stand_ins import free_port
from run_stand_ins import shoal_as_rank, train

from shoal.checkpoint import checkpoints
from shoal.models import Transformer, TransformerConfig
from shoal.parallel import parallelize
from shoal.spec.plan import Plan
from shoal.spec.run import Run
from shoal.train.deferred_init import are_put_off, give_put_off_values, put_off_first_values

SHAPE = {"vocab_size": 61, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": 16}
EXPERTS = {**SHAPE, "experts": 4, "experts_per_token": 2, "expert_ffn": 24}


def parts_of(plan, shape, frozen, later):
    """This rank's parts of the parameters, and the whole ones that tp and ep leave whole."""
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**shape))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    if later:
        put_off_first_values(model)
    parallel = parallelize(model, plan, seed=5)
    assert are_put_off(parallel) == later
    give_put_off_values(parallel)
    assert not are_put_off(parallel)
    with parallel.gathered():
        whole = {f"whole {name}": each.detach().clone() for name, each in model.named_parameters()}
    parts = {each.name: each.local.clone() for each in (*parallel.owned, *parallel.frozen)}
    return parts | whole


@pytest.mark.parametrize(
    ("plan", "shape", "frozen"),
    [
        ("dp=2,shard=none,precision=bf16", SHAPE, "nothing"),
        ("dp=2,shard=zero2", SHAPE, "embed"),
        ("dp=2,shard=zero3,precision=bf16", SHAPE, "attention"),
        ("dp=2,exchange=naive", SHAPE, "embed"),
        ("tp=2,dp=2,shard=zero3", SHAPE, "feed_forward"),
        ("pp=2,dp=2,shard=zero1", SHAPE, "nothing"),
        ("dp=2,ep=2,shard=zero1", EXPERTS, "nothing"),
    ],
)
def test_values_that_are_given_later_are_the_same(ranks, plan, shape, frozen):
    size = Plan.parse(plan).ranks
    at_once, later = (ranks.run(parts_of, size, plan, shape, frozen, later) for later in (False, True))
    for wanted, found in zip(at_once, later, strict=True):
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


def losses(path):
    return {each["step"]: each["loss"] for each in Run.open(path).metrics()}


@pytest.mark.parametrize("plan", ["dp=2,shard=zero3", "dp=2,exchange=local,every=2"])
def test_a_run_without_a_sound_checkpoint_begins_with_the_first_values(ranks, tiny_run, tmp_path, plan):
    words = [*tiny_run, "--set", f"plan={plan}", "--set", "steps=4", "--set", "checkpoint.every=2"]
    train(ranks, [*words, "--run", "run"], tmp_path, on=2)
    before = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train(ranks, ["--resume", "run"], tmp_path, on=2)
    assert losses(tmp_path / "run") == before


def shoal_that_draws_nothing(*arguments):
    """Runs the program as a rank; drawing first values is an error."""
    before = Transformer.initialize_parameter
    Transformer.initialize_parameter = None
    try:
        return shoal_as_rank(*arguments)
    finally:
        Transformer.initialize_parameter = before


def test_a_run_that_goes_on_draws_no_values(ranks, tiny_run, tmp_path):
    words = [*tiny_run, "--set", "plan=dp=2,shard=zero3", "--set", "steps=4", "--set", "checkpoint.every=2"]
    train(ranks, [*words, "--run", "run"], tmp_path, on=2)
    before = losses(tmp_path / "run")
    newest, *older = checkpoints(tmp_path / "run" / "checkpoints")
    assert older
    shutil.rmtree(newest)
    ended = ranks.run(shoal_that_draws_nothing, 2, ["train", "--resume", "run"], tmp_path, free_port())
    assert [each[0] for each in ended] == [0, 0], ended[0][2]
    assert losses(tmp_path / "run") == before

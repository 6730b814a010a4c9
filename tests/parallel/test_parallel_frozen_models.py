"""Models of which nothing is trained, such as a teacher, laid over ranks beside one that is trained."""

import copy

import pytest
import torch
import torch.distributed as dist
from parallel_stand_ins import tokens, transformer
from torch.nn.functional import kl_div, log_softmax

import shoal
from shoal.errors import LayoutError, ModelError
from shoal.models import next_token_loss
from shoal.parallel import parallelize
from shoal.spec.plan import Plan

LAYOUTS = [
    "dp=2", "dp=2,shard=zero1", "dp=2,shard=zero2", "dp=2,shard=zero3", "dp=2,shard=zero3-once", "cp=2",
    "tp=2", "tp=2,tensor=plain", "pp=2", "dp=4,replicate=2,shard=zero3", "dp=2,tp=2,shard=zero3", "dp=2,pp=2",
    "dp=2,exchange=naive",
]  # fmt: skip


def teacher(seed=1):
    model = transformer()
    model.initialize(seed)
    return model.requires_grad_(False)


def loss_of(parallel, batch):
    """The model's loss on a batch, under any Plan."""
    mine = parallel.local(batch)
    inputs, targets = (parallel.local_sequence(each) for each in (mine[:, :-1], mine[:, 1:]))
    return next_token_loss(parallel(inputs), targets)


def judge(plan):
    """The teacher's losses in eval, without and with gradients, its state, and the bytes of what it keeps."""
    parallel = parallelize(teacher(), plan).eval()
    batch = torch.cat([tokens(rank) for rank in range(4)])
    losses = []
    for is_graded in (False, *([True] * (parallel.plan.pp == 1))):
        with torch.set_grad_enabled(is_graded):
            losses += [loss_of(parallel, batch) for _ in range(2)]
    for each in losses:
        assert not each.requires_grad
        parallel.axes.data.all_reduce(each, "loss").wait()
    kept = {}
    for bucket in (part for strategy in parallel.strategies for part in getattr(strategy, "_buckets", ())):
        kept[bucket.name] = bucket.weights.untyped_storage().nbytes()
    assert not parallel.owned
    assert len({name for name, _ in parallel.named_parameters()}) == len(list(parallel.parameters()))
    losses = [each.item() / parallel.axes.data.size for each in losses]
    return losses, sum(kept.values()), parallel.full_state_dict()


@pytest.mark.parametrize("plan", LAYOUTS)
def test_a_frozen_model_computes_as_on_one_device_and_keeps_its_shards(ranks, plan):
    batch = torch.cat([tokens(rank) for rank in range(4)])
    wanted = next_token_loss(teacher()(batch[:, :-1]), batch[:, 1:]).item()
    results = ranks.run(judge, Plan.parse(plan).ranks, plan)
    for losses, kept, _ in results:
        assert losses == pytest.approx([wanted] * len(losses), rel=1e-5)  # fp32 sums in another order
        assert kept == 0  # the weights of no bucket stay whole; other Plans have no such buckets
    torch.testing.assert_close(results[0][2], dict(teacher().state_dict()), rtol=0, atol=0)


def distill(plan, of_teacher):
    """A student that learns from a teacher in one loop, as one device does with whole models."""
    student, judge = transformer(), teacher()
    if plan is not None:
        student, judge = parallelize(student, plan), parallelize(judge, of_teacher)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for step in range(3):
        batch = torch.cat([tokens(10 * step + each) for each in (range(2) if ranks == 1 else [rank])])[:, :-1]
        with torch.no_grad():
            wanted = log_softmax(judge(batch), -1)
        (
            kl_div(log_softmax(student(batch), -1), wanted, reduction="sum", log_target=True) / len(batch)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return student.state_dict() if plan is None else student.full_state_dict()


@pytest.mark.parametrize(("student", "judge"), [("none", "zero3"), ("zero3", "zero3"), ("zero1", "none")])
def test_a_student_learns_from_a_teacher_as_on_one_device(ranks, student, judge):
    state = ranks.run(distill, 2, f"dp=2,shard={student}", f"dp=2,shard={judge}")[0]
    # fp32 sums in another order, over three steps of AdamW
    torch.testing.assert_close(state, distill(None, None), rtol=1e-3, atol=2e-4)


def use_otherwise(plan, folder):
    """Saves, loads and gradients of inputs of a frozen model."""
    parallel = parallelize(teacher(), plan)
    shoal.save(folder, parallel, step=3)
    other = parallelize(teacher(seed=2), plan)
    assert shoal.load(folder, other)["step"] == 3
    third = parallelize(teacher(seed=2), plan)
    third.load_full_state_dict(teacher().state_dict())
    batch = tokens()[:, :-1]
    embedded = []
    handle = other.module.embed.register_forward_hook(lambda *_: embedded.append(_[-1].requires_grad_()))
    other(batch).square().mean().backward()
    handle.remove()
    with pytest.raises(LayoutError, match="before shoal"):
        other.requires_grad_()
    if "zero3" in plan:
        with pytest.raises(LayoutError, match="cannot be copied"):
            copy.deepcopy(other.module)
    with torch.no_grad():
        return other(batch), third(batch), embedded[0].grad


@pytest.mark.parametrize("shard", ["none", "zero1", "zero3"])
def test_a_frozen_model_is_saved_and_loaded_and_gives_gradients_of_inputs(ranks, shard, tmp_path):
    model, batch = teacher(), tokens()[:, :-1]
    embedded = []
    model.embed.register_forward_hook(lambda *_: embedded.append(_[-1].requires_grad_()))
    output = model(batch)
    output.square().mean().backward()
    for loaded, given, gradient in ranks.run(use_otherwise, 2, f"dp=2,shard={shard}", tmp_path / "saved"):
        torch.testing.assert_close(loaded, output.detach())
        torch.testing.assert_close(given, output.detach())
        torch.testing.assert_close(gradient, embedded[0].grad)


def test_a_trainer_refuses_a_model_without_trained_parameters():
    with pytest.raises(ModelError, match="no parameter that requires a gradient"):
        shoal.Trainer(teacher(), [tokens()[0]] * 4, "", batch=2, steps=1)


def shapes_of_frozen_and_trained(plan):
    """Shapes of the parts of a frozen and of a trained model, and whether the average of both is one."""
    trained, frozen = parallelize(transformer(), plan), parallelize(teacher(), plan)
    pairs = list(zip(trained.parameters(), frozen.parameters(), strict=True))
    with torch.no_grad():
        for own, other in pairs:
            other.lerp_(own, 1.0)
    return [(tuple(own.shape), tuple(other.shape)) for own, other in pairs], frozen.full_state_dict()


@pytest.mark.parametrize("plan", ["dp=2,shard=zero3", "dp=2,tp=2,shard=zero3"])
def test_parts_of_a_frozen_model_have_the_shapes_of_a_trained_one(ranks, plan):
    results = ranks.run(shapes_of_frozen_and_trained, Plan.parse(plan).ranks, plan)
    assert all(own == other for shapes, _ in results for own, other in shapes)
    torch.testing.assert_close(results[0][1], dict(transformer().state_dict()), rtol=0, atol=0)

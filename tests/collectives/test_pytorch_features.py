"""What PyTorch builds on process groups computes the same over the backend "shoal" as over gloo, or alone."""

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shoal.collectives import share_buffers
from shoal.errors import ModelError
from shoal.testing import RankPool

WIDTH, ROWS, STEPS = 9, 4, 3


@pytest.fixture(scope="module")
def shoal_ranks():
    with RankPool("shoal") as pool:
        yield pool


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, WIDTH))


def batch(step, rank):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def whole_batch(step):
    return torch.cat([batch(step, rank) for rank in range(dist.get_world_size())])


def train(model, parameters=None, *, accumulate=None):
    """Steps with this rank's batches; the parameters afterwards, whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        if accumulate is not None:
            with accumulate():
                model(batch(step + STEPS, dist.get_rank())).float().square().mean().backward()
        model(batch(step, dist.get_rank())).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(parameters or model.parameters())


def whole(parameters):
    return [
        (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in parameters
    ]


def train_alone():
    """The same steps by one process with everybody's batches."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        model(whole_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.parameters())


def close(given, wanted, rtol=1e-5, atol=1e-6):  # fp32 sums of another order
    for own, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=rtol, atol=atol)


def over_gloo():
    return dist.new_group(backend="gloo")


# --- DistributedDataParallel ---


def ddp(**options):
    close(train(DistributedDataParallel(build(), bucket_cap_mb=0.001, **options)), train_alone())


def ddp_without_synchronization():
    plain, over = (
        DistributedDataParallel(build()),
        DistributedDataParallel(build(), process_group=over_gloo()),
    )
    close(train(plain, accumulate=plain.no_sync), train(over, accumulate=over.no_sync))


def ddp_with_a_hook():
    parameters = []
    for group in (None, over_gloo()):
        model = DistributedDataParallel(build(), process_group=group)
        model.register_comm_hook(group, fp16_compress_hook)
        parameters.append(train(model))
    close(*parameters, rtol=1e-2, atol=1e-3)  # sums of fp16


def ddp_with_uneven_inputs():
    parameters = []
    for group in (None, over_gloo()):
        model = DistributedDataParallel(build(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with Join([model]):
            for step in range(2 + dist.get_rank()):
                model(batch(step, dist.get_rank())).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        parameters.append(whole(model.parameters()))
    close(*parameters)


def between_hosts():
    """A group whose ranks take themselves to be on different hosts."""
    with mock.patch.dict(
        os.environ, {"SHOAL_HOST_ID": f"host {dist.get_rank()}", "MASTER_ADDR": "127.0.0.1"}
    ):
        return dist.new_group()


def ddp_between_hosts():
    ddp(process_group=between_hosts())


def future_between_hosts():
    group = between_hosts()
    tensor = torch.ones(1000)
    if dist.get_rank() == 0:
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        assert not future.done()
    dist.barrier()  # in the group on one host; only now the other rank begins
    if dist.get_rank() == 1:
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    (summed,) = future.wait()
    assert summed is tensor
    assert torch.equal(tensor, torch.full((1000,), 2.0))


def failing_future_between_hosts():
    group = between_hosts()
    if dist.get_rank() == 0:
        future = dist.all_reduce(torch.ones(1000), group=group, async_op=True).get_future()
        group.abort()
        with pytest.raises(RuntimeError, match="abort"):
            future.wait()


@pytest.mark.parametrize("view", [True, False])
def test_ddp_trains_as_one_process_does(shoal_ranks, view):
    shoal_ranks.run(ddp_keeping_views if view else ddp, 2)


def ddp_keeping_views():
    ddp(gradient_as_bucket_view=True)


def test_ddp_between_hosts_trains_as_one_process_does(shoal_ranks):
    shoal_ranks.run(ddp_between_hosts, 2)


def test_a_future_between_hosts_does_not_hold_back_who_asks_for_it(shoal_ranks):
    shoal_ranks.run(future_between_hosts, 2)


def test_a_future_between_hosts_raises_what_failed(shoal_ranks):
    shoal_ranks.run(failing_future_between_hosts, 2)


@pytest.mark.parametrize("run", [ddp_without_synchronization, ddp_with_a_hook, ddp_with_uneven_inputs])
def test_ddp_does_what_it_does_over_gloo(shoal_ranks, run):
    shoal_ranks.run(run, 2)


# --- FSDP ---


def shard(mesh, *, reshard=True, policy=None):
    model = build()
    policy = policy or MixedPrecisionPolicy()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp2(reshard):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    close(train(shard(mesh, reshard=reshard)), train_alone())


def fsdp2_in_shared_buffers():
    model = shard(init_device_mesh("cpu", (dist.get_world_size(),)))
    share_buffers(model)
    close(train(model), train_alone())


def fsdp2_in_bf16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reference = DeviceMesh.from_group(over_gloo(), "cpu")
    close(train(shard(mesh, policy=policy)), train(shard(reference, policy=policy)))


def hybrid_fsdp2():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    close(train(shard(mesh)), train_alone())


def fsdp1():
    model = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=True)
    train(model, [])
    with FullyShardedDataParallel.summon_full_params(model):
        close(whole(model.parameters()), train_alone())


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_trains_as_one_process_does(shoal_ranks, reshard):
    shoal_ranks.run(fsdp2, 2, reshard)


def test_fsdp2_in_shared_buffers_trains_as_one_process_does(shoal_ranks):
    shoal_ranks.run(fsdp2_in_shared_buffers, 3)


def test_buffers_are_shared_of_nothing_but_what_fsdp2_shards():
    with pytest.raises(ModelError, match="Linear"):
        share_buffers(nn.Linear(2, 2))


def test_fsdp2_in_bf16_trains_as_over_gloo(shoal_ranks):
    shoal_ranks.run(fsdp2_in_bf16, 2)


def test_hybrid_fsdp2_trains_as_one_process_does(shoal_ranks):
    shoal_ranks.run(hybrid_fsdp2, 4)


def test_fsdp1_trains_as_one_process_does(shoal_ranks):
    shoal_ranks.run(fsdp1, 2)


# --- DTensor, tensor parallelism, checkpoints ---


def redistribute():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
    for before, after in ((Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0))):
        moved = distribute_tensor(tensor, mesh, [before]).redistribute(mesh, [after])
        assert moved.placements == (after,)
        assert torch.equal(moved.full_tensor(), tensor)
    summed = distribute_tensor(tensor, mesh, [Shard(0)]).sum()
    assert summed.full_tensor() == tensor.sum()


def tensor_parallelism():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    torch.manual_seed(0)
    split = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    parallelize_module(split, mesh, plan)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    wanted, given = plain(x), split(x)
    close([given], [wanted])
    wanted.square().sum().backward()
    given.square().sum().backward()
    close(
        [each.grad.full_tensor() for each in split.parameters()], [each.grad for each in plain.parameters()]
    )


def checkpoint(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard(mesh)
    trained = train(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    again = shard(mesh)
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    close(whole(again.parameters()), trained, rtol=0, atol=0)


def load_from_first(folder):
    """What torch asks a group about its devices for: a state of rank 0 alone, a save in the background."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard(mesh)
    state = build().state_dict()
    wanted = {name: value.clone().fill_(2.0) for name, value in state.items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(wanted) if dist.get_rank() == 0 else {}, options=options)
    close(whole(model.parameters()), list(wanted.values()), rtol=0, atol=0)
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder).result()
    dcp.load({"model": state}, checkpoint_id=folder)
    close(list(state.values()), list(wanted.values()), rtol=0, atol=0)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), dist.group.WORLD)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_dtensor_is_the_same_in_every_placement(shoal_ranks, ranks):
    shoal_ranks.run(redistribute, ranks)


def test_tensor_parallel_layers_compute_what_one_process_does(shoal_ranks):
    shoal_ranks.run(tensor_parallelism, 2)


def test_a_distributed_checkpoint_loads_what_was_saved(shoal_ranks, tmp_path):
    shoal_ranks.run(checkpoint, 2, str(tmp_path / "checkpoint"))


def test_fsdp2_takes_up_a_state_of_rank_0_and_saves_in_the_background(shoal_ranks, tmp_path):
    shoal_ranks.run(load_from_first, 2, str(tmp_path / "checkpoint"))


# --- pipelining ---


def pipeline(kind, microbatches):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build()
    own = model[: len(model) // 2] if rank == 0 else model[len(model) // 2 :]
    stage = PipelineStage(own, rank, size, torch.device("cpu"))
    x, target = torch.cat([batch(0, each) for each in range(size)]), torch.zeros(ROWS * size, WIDTH)
    schedule = kind(stage, microbatches, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(x)
    else:
        losses = []
        schedule.step(target=target, losses=losses)
    reference = build()
    loss = nn.functional.mse_loss(reference(x), target)
    loss.backward()
    if rank == size - 1:
        close([torch.stack(losses).mean()], [loss])
    parts = reference[: len(model) // 2] if rank == 0 else reference[len(model) // 2 :]
    close([each.grad for each in own.parameters()], [each.grad for each in parts.parameters()])


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_a_pipeline_has_the_gradients_of_one_process(shoal_ranks, kind):
    shoal_ranks.run(pipeline, 2, kind, 4)

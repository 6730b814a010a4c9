"""Weights that are loaded into a worker which has joined its servers."""

from __future__ import annotations

import threading

import pytest
import torch
from server_stand_ins import adamw, loss_of, make_model

from shoal.checkpoint import SingleProcess
from shoal.errors import TrainingError
from shoal.parallel import parallelize
from shoal.parallel.exchange.merge_schedule import Outer
from shoal.parallel.exchange.served import ServedUpdates
from shoal.parallel.exchange.server import Server, Servers, Terms
from shoal.spec.plan import Plan


@pytest.mark.parametrize("outer", [None, Outer(0.7, 0.9, warmup=0)], ids=["gradients", "local"])
@pytest.mark.parametrize("settles", [False, True])
def test_other_weights_are_refused_once_a_worker_has_joined_and_its_own_are_not(outer, settles) -> None:
    server = Server(0, "word")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    parallel = parallelize(make_model(), Plan())
    way = Servers([server.address], "word", timeout=60)
    every = 1 if outer is None else 2
    terms = Terms(shares=8, workers=1, every=every)
    updates = ServedUpdates(parallel, adamw(parallel.parameters()), way, terms, SingleProcess(), outer=outer)

    parallel.load_state_dict({name: each * 2 for name, each in make_model().state_dict().items()})
    for _ in range(every):
        loss_of(parallel, updates.share()).backward()
        updates.step()
        updates.zero_grad()
    if settles:
        updates.settle()
    own = {name: each.clone() for name, each in parallel.state_dict().items()}
    parallel.load_state_dict({name: each + 1 for name, each in own.items()})  # an evaluation
    parallel.load_state_dict(own)
    updates.share()

    if settles:
        updates.settle()
        own = {name: each.clone() for name, each in parallel.state_dict().items()}
    parallel.load_state_dict({name: each + 1 for name, each in own.items()})
    with pytest.raises(TrainingError, match="load weights into all workers before"):
        updates.share() if settles else updates.step()
    assert torch.equal(next(parallel.parameters()), next(iter(own.values())) + 1)
    way.close()
    server.close()
    thread.join(60)

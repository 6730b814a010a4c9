"""Pushes and pulls in fewer bytes: against the formula in one process, with staleness, with a dead server."""

import threading
from collections import defaultdict

import pytest
import torch
from reference_codecs import sent
from server_stand_ins import loss_of, make_model, train

from shoal.parallel import Outer, parallelize
from shoal.parallel.exchange.compressed_sums import seed_of
from shoal.parallel.exchange.server import Servers, Terms
from shoal.parallel.exchange.server.client import ask
from shoal.spec.plan import Compression, Plan

KINDS = ["int8", "int4", "fp8", "sign", "topk:8", "topk:8:2bit", "random:4", "threshold:1"]
WORKERS, ROUNDS, RATE = 3, 8, 0.05


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def decoded(compress, vector, seed):
    """What is left of a vector that is sent; the codec is not Shoal's."""
    return torch.from_numpy(sent(compress, vector.numpy(), seed))


def as_formula(compress, servers):
    """The values after all rounds: a view that all workers have, and what each left out of its pushes."""
    model = make_model()
    names = [each.name for each in parallelize(make_model(), Plan()).owned]  # the order in what is sent
    parameters = [model.get_parameter(name) for name in names]
    values = torch.nn.utils.parameters_to_vector(parameters).detach()
    windows = Servers([("", 0)] * servers, "").windows(len(values))
    view, left = values.clone(), [torch.zeros_like(values) for _ in range(WORKERS)]
    for round in range(ROUNDS):
        torch.nn.utils.vector_to_parameters(view, parameters)
        total = torch.zeros_like(values)
        for worker in range(WORKERS):
            model.zero_grad()
            loss_of(model, round * WORKERS + worker).backward()
            vector = torch.cat([each.grad.view(-1) for each in parameters]) + left[worker]
            for shard, window in enumerate(windows):
                got = decoded(compress, vector[window], seed_of(round, worker) + shard)
                left[worker][window] = vector[window] - got
                total[window] += got
        values = values.add(total / WORKERS, alpha=-RATE)  # as torch rounds it
        for window in windows:
            view[window] += decoded(compress, values[window] - view[window], round + 1)
    torch.nn.utils.vector_to_parameters(values, parameters)
    return list(model.parameters())


@pytest.mark.parametrize("compress", KINDS)
def test_rounds_are_those_of_the_formula(compress):
    terms = Terms(workers=WORKERS, shares=WORKERS * ROUNDS)
    trained = train(terms, workers=WORKERS, servers=2, make=sgd, compress=compress)
    assert not trained.errors
    for ours, theirs in zip(trained.values, as_formula(compress, 2), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("compress", ["int8", "topk:8", "random:4"])
def test_the_bytes_that_are_sent_are_those_of_the_payloads(compress, monkeypatch):
    asked = defaultdict(list)
    lock = threading.Lock()

    def counted(channel, head, body=(), into=None):
        reply, received = ask(channel, head, body, into)
        with lock:
            asked[head["do"]].append((sum(each.nbytes for each in body), received.nbytes))
        return reply, received

    monkeypatch.setattr("shoal.parallel.exchange.server.client.ask", counted)
    train(Terms(workers=2, shares=12), workers=2, servers=2, compress=compress)
    elements = sum(each.numel() for each in make_model().parameters())
    windows = Servers([("", 0)] * 2, "").windows(elements)
    payloads = sorted(Compression.parse(compress).payload(each.stop - each.start) for each in windows)
    wholes = sorted(4 * (each.stop - each.start) for each in windows)
    assert sorted(there for there, _ in asked["push"]) == sorted(12 * payloads)
    assert sorted(back for _, back in asked["pull"]) == sorted(
        12 * payloads + 2 * wholes
    )  # whole when it joins


@pytest.mark.parametrize("compress", ["int8", "topk:64"])
def test_workers_with_the_same_version_have_equal_bits(compress):
    """Also where updates of others came between, and one worker is slow: it takes the view as a whole."""
    seen = defaultdict(list)

    def change(worker, way):
        pull = way.pull

        def noted(position, vector, *rest, **named):
            versions = pull(position, vector, *rest, **named)
            for shard, window in enumerate(way.windows(len(vector))):
                seen[shard, versions[shard]].append(vector[window].clone())
            return versions

        way.pull = noted

    def slow(worker, share, servers):
        if worker == 2:
            threading.Event().wait(0.02)

    terms = Terms(workers=3, shares=60, staleness=100)
    trained = train(terms, workers=3, servers=2, compress=compress, change=change, before=slow)
    assert not trained.errors
    assert len(seen) > 20
    assert all(torch.equal(values[0], other) for values in seen.values() for other in values[1:])


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("compress", ["int8", "threshold:2"])
def test_a_dead_server_changes_no_bit_of_compressed_rounds(victim, compress):
    def kill(worker, share, servers):
        if share == 12:
            servers[victim].close()

    terms = Terms(workers=3, shares=30)
    with_loss = train(terms, workers=3, servers=2, mirrored=True, before=kill, compress=compress)
    without = train(terms, workers=3, servers=2, compress=compress)
    assert not with_loss.errors + without.errors
    assert all(torch.equal(*pair) for pair in zip(with_loss.values, without.values, strict=True))


def test_local_steps_are_compressed_too():
    terms = Terms(workers=2, shares=2 * 4 * 5, every=4)
    whole, sent = (
        train(terms, workers=2, make=sgd, outer=Outer(1.0, 0.0), compress=each).values
        for each in ("none", "int8")
    )
    first = list(make_model().parameters())
    for before, after, close in zip(first, whole, sent, strict=True):
        assert not torch.equal(after, close)
        assert (close - after).norm() < 0.1 * (after - before).norm()


def test_plans_with_servers_take_compression():
    plan = Plan.parse("dp=4,exchange=server,servers=2,compress=topk:64,feedback=0.9")
    assert plan.exchanged.compresses
    assert not plan.of_worker().exchanged.compresses

"""What communications are recorded to be for."""

from contextlib import nullcontext

import pytest
from parallel_stand_ins import SHAPE, ClosedSpan, one_step, tokens

from shoal.models import Transformer
from shoal.parallel import parallelize
from shoal.record import Recorder
from shoal.spec.timeline import Kind


class PurposeRecorder(Recorder):
    """Keeps the purpose of every communication by the name of what is sent, and of every wait for one."""

    def __init__(self):
        self.started, self.awaited = {}, {}

    def span(self, kind, name="", *, lane=None, bytes=0, group=(), purpose=""):
        if kind == Kind.WAIT:
            self.awaited[name] = purpose
        return nullcontext()

    def open(self, kind, name="", *, lane, bytes=0, group=(), purpose=""):
        self.started[name] = purpose
        return ClosedSpan()

    def step(self, index):
        return nullcontext()

    def close(self):
        pass


def recorded(plan, experts):
    recorder = PurposeRecorder()
    model = Transformer(SHAPE.model_copy(update={"experts": experts}))
    model.initialize(0)
    parallel = parallelize(model, plan, recorder=recorder)
    batch = tokens()
    one_step(parallel, batch[:, :9] if plan.startswith("cp") else batch)
    parallel.gradient_norm()
    return recorder.started, recorder.awaited


@pytest.mark.parametrize(
    ("plan", "experts", "purposes"),
    [
        ("dp=2", 0, {"data"}),
        ("dp=2,exchange=naive", 0, {"data"}),
        ("dp=2,shard=zero3", 0, {"data"}),
        ("tp=2", 0, {"tensor", "data"}),
        ("cp=2", 0, {"context", "data"}),
        ("cp=2,context=ulysses", 0, {"context", "data"}),
        ("dp=2,ep=2", 4, {"expert", "data"}),
    ],
)
def test_every_axis_communicates_for_itself(ranks, plan, experts, purposes):
    for started, awaited in ranks.run(recorded, 2, plan, experts):
        assert set(started.values()) - {"control"} == purposes
        assert started.get("all_reduce:gradient norm", "control") == "control"
        assert awaited.items() <= started.items()

"""Models as the devices of a Cluster do them."""

from shoal.cluster import Cluster
from shoal.cost.time.suited import workload_on
from shoal.workload import ModelShape, workload_of

SHAPE = ModelShape(layers=2, hidden=64, ffn=128, heads=4, vocab=64, seq=32)


def test_norms_are_one_kernel_on_accelerators_and_several_operators_on_cores():
    assert workload_on(Cluster.preset("dgx-h100"), SHAPE) == workload_of(SHAPE)
    assert workload_on(Cluster.preset("laptop"), SHAPE) == workload_of(SHAPE.replace(fused_passes=False))


def test_a_model_whose_norms_are_not_fused_stays_so_on_accelerators():
    unfused = SHAPE.replace(fused_passes=False)
    assert workload_on(Cluster.preset("dgx-h100"), unfused) == workload_of(unfused)

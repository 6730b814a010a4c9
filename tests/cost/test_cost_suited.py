"""Models as the devices of a Cluster do them."""

from shoal.predict.cost.time.step import workload_on
from shoal.spec.cluster import Cluster
from shoal.spec.workload import ModelShape, compilable_workload_of, from_json, to_json, workload_of

SHAPE = ModelShape(layers=2, hidden=64, ffn=128, heads=4, vocab=64, seq=32)


def test_accelerators_have_compiled_and_eager_kernels_and_cores_run_operator_by_operator():
    found = workload_on(Cluster.preset("dgx-h100"), SHAPE)
    assert found == compilable_workload_of(SHAPE)
    layer, eager = found.layers[0], found.layers[0].under("none")
    assert (layer.under("blocks"), layer.under("auto")) == (layer, layer)
    assert eager.kept("none", 2) - layer.kept("none", 2) == 2 * 32 * 128  # silu(gate), made again
    assert workload_on(Cluster.preset("laptop"), SHAPE) == workload_of(SHAPE.replace(fused_passes=False))
    assert from_json(to_json(found)) == found


def test_a_model_whose_norms_are_not_fused_stays_so_on_accelerators():
    unfused = SHAPE.replace(fused_passes=False)
    assert workload_on(Cluster.preset("dgx-h100"), unfused) == workload_of(unfused)

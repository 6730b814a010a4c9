"""The best layout for machines that need not be there: `python examples/08_plan.py`. Imports no torch."""

import shoal
from shoal.spec.workload import shape, workload_of

choice = shoal.choose(workload_of(shape("llama3-8b")), shoal.Cluster.parse("dgx-h100:64"), batch=256)
print(choice.best.plan, f"{choice.best.seconds:.2f} s a step")
print(*choice.explain().sentences(), sep="\n")

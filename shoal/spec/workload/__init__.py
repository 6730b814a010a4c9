"""The work of a model, for a layout to divide and a device to do. Imports no torch.

A `Workload` consists of `Block`s, and these of operations: `Product`, `Attention`, `Pass`. `workload_of`
makes one from a `ModelShape`, such as `shape("llama3-8b")`; `shoal.trace` makes one from any module. The cost
model and the planner use it.
"""

from shoal.spec.workload.adapters import with_adapters
from shoal.spec.workload.model_shape import Latent, ModelShape, shape, shape_names, transformer_shape
from shoal.spec.workload.transformer import compilable_workload_of, workload_of
from shoal.spec.workload.workload import (
    Attention,
    Block,
    Keep,
    Operation,
    Parameters,
    Part,
    Pass,
    Product,
    Saved,
    Workload,
    from_json,
    to_json,
)

__all__ = [
    "Attention",
    "Block",
    "Keep",
    "Latent",
    "ModelShape",
    "Operation",
    "Parameters",
    "Part",
    "Pass",
    "Product",
    "Saved",
    "Workload",
    "compilable_workload_of",
    "from_json",
    "shape",
    "shape_names",
    "to_json",
    "transformer_shape",
    "with_adapters",
    "workload_of",
]

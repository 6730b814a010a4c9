"""Compare predictions with measurements: tables of training steps, layers, collectives and operations.

The tables may be published or your own. `validate` reads a table and returns a Comparison for each row,
`accuracy_of` sums them up. `read_table`, `read_layers`, `read_collectives` and `read_operations` read them.
Imports no torch.
"""

from shoal.predict.validate.cells import Accuracy, Comparison, accuracy_of
from shoal.predict.validate.collectives import MeasuredCollective, read_collectives
from shoal.predict.validate.operations import MeasuredLayer, MeasuredOperation, read_layers, read_operations
from shoal.predict.validate.predictions import is_fitted, published_workload, validate
from shoal.predict.validate.steps import Measured, read_table

__all__ = [
    "Accuracy",
    "Comparison",
    "Measured",
    "MeasuredCollective",
    "MeasuredLayer",
    "MeasuredOperation",
    "accuracy_of",
    "is_fitted",
    "published_workload",
    "read_collectives",
    "read_layers",
    "read_operations",
    "read_table",
    "validate",
]

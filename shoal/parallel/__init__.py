"""Laying a model over the ranks: one file per strategy, composed in one order by `apply.py`.

Nouns: Parallel (a model laid over the ranks), Axis (a group with its collectives), Bucket (parameters that
    are gathered, reduced and sharded together), Owned (the part of a parameter that a rank's optimizer
    changes), Frozen (a rank's part of a parameter that is not trained), TensorLayout (which layers tensor
    parallelism splits, and how), Batch (samples and tokens of an optimizer step). The trainer calls
    `parallelize`, and so does a user with a training loop of their own.
"""

from shoal.parallel.apply import parallelize, plan_of, require_layout, require_trainable
from shoal.parallel.axes import Axes
from shoal.parallel.communication import Axis, Pending
from shoal.parallel.device import own_device
from shoal.parallel.documents import DocumentsGuard, require_documents
from shoal.parallel.exchange.local_updates import LocalUpdates
from shoal.parallel.exchange.merge_schedule import Outer, OuterState, outer_settings
from shoal.parallel.exchange.served import ServedUpdates
from shoal.parallel.exchange.switchable_exchange import GuidedUpdates
from shoal.parallel.local_shards import Frozen, Owned, local_part
from shoal.parallel.offload.offloaded_optimizer import OffloadedOptimizer
from shoal.parallel.optimizer.joined_optimizers import Composed, Together, parts_of, title_of
from shoal.parallel.optimizer.optimizers import GradientNorm
from shoal.parallel.optimizer.whole_parameters import WholeParameters
from shoal.parallel.parallel import Parallel
from shoal.parallel.parameter_init import FirstValues
from shoal.parallel.pipeline.pieces import Batch
from shoal.parallel.pipeline.stage_layout import StageLayout
from shoal.parallel.replica_check import Replicas
from shoal.parallel.tensor.tensor_layout import Split, TensorLayout
from shoal.parallel.tensor.vocabulary import SplitLogits

__all__ = [
    "Axes",
    "Axis",
    "Batch",
    "Composed",
    "DocumentsGuard",
    "FirstValues",
    "Frozen",
    "GradientNorm",
    "GuidedUpdates",
    "LocalUpdates",
    "OffloadedOptimizer",
    "Outer",
    "OuterState",
    "Owned",
    "Parallel",
    "Pending",
    "Replicas",
    "ServedUpdates",
    "Split",
    "SplitLogits",
    "StageLayout",
    "TensorLayout",
    "Together",
    "WholeParameters",
    "local_part",
    "outer_settings",
    "own_device",
    "parallelize",
    "parts_of",
    "plan_of",
    "require_documents",
    "require_layout",
    "require_trainable",
    "title_of",
]

"""Recompute: backward computes again what a block's forward did not keep (Chen et al., arXiv:1604.06174).

`full` keeps only a block's input. `selective` also keeps the results of matrix products and of attention,
which are expensive, and computes the rest again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.trace import EXPENSIVE

__all__ = ["recompute_blocks"]

_OWN = "shoal"
"""Namespace of Shoal's own operators, such as ring attention; all of them are expensive."""


def recompute_blocks(blocks: Sequence[nn.Module], policy: str) -> None:
    """Wrap each block's forward as `policy` says: none, selective or full.

    The wrap lies inside the block's hooks, so that recomputing does not run them again.
    """
    if policy == "none":
        return
    keep: dict[str, Any] = {}
    if policy == "selective":
        keep["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_expensive)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **keep)


def _keep_expensive(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    expensive = operator in EXPENSIVE or operator.namespace == _OWN
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE

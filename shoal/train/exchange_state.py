"""What compressed exchanges left out of earlier steps, as the pieces of a checkpoint.

rank/R/exchange/STAGE/BUCKET/NAME   a tensor of rank R, for a resume under the same Plan on equal ranks

Each rank left out other parts of other gradients. Under another Plan this is lost: at most what compression
left out of the last steps, which training makes up for as it does for a step with other samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shoal.checkpoint import TensorRecord, dtype_named
from shoal.parallel import Parallel

__all__ = ["empty_like_saved", "kept_by_exchanges", "restore_exchanges"]

_FOLDER = "exchange/"


def kept_by_exchanges(parallel: Parallel) -> dict[str, torch.Tensor]:
    """Return what the next exchanges on this rank depend on, by name."""
    return {
        f"{_FOLDER}{stage}/{bucket}/{name}": tensor
        for stage, strategy in enumerate(parallel.strategies)
        for bucket, exchange in strategy.exchanges().items()
        for name, tensor in exchange.kept().items()
    }


def empty_like_saved(
    saved: Mapping[str, TensorRecord], rank: int, parallel: Parallel
) -> dict[str, torch.Tensor]:
    """Return tensors to read what a rank's exchanges kept into, by name."""
    prefix = f"rank/{rank}/"
    return {
        path.removeprefix(prefix): torch.zeros(
            record.shape, dtype=dtype_named(record.dtype), device=parallel.device
        )
        for path, record in saved.items()
        if path.startswith(prefix + _FOLDER)
    }


def restore_exchanges(parallel: Parallel, kept: Mapping[str, torch.Tensor]) -> None:
    """Make exchanges go on with what `kept_by_exchanges` returned; nothing is left out without an entry."""
    for stage, strategy in enumerate(parallel.strategies):
        for bucket, exchange in strategy.exchanges().items():
            prefix = f"{_FOLDER}{stage}/{bucket}/"
            exchange.restore(
                {
                    name.removeprefix(prefix): tensor
                    for name, tensor in kept.items()
                    if name.startswith(prefix)
                }
            )

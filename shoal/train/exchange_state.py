"""What compressed exchanges left out of earlier steps, as the pieces of a checkpoint.

rank/R/exchange/STAGE/BUCKET/NAME   a tensor of rank R, for a resume under the same Plan on equal ranks

Each rank left out other parts of other gradients. Under another Plan this is lost: at most what compression
left out of the last steps, which training makes up for as it does for a step with other samples. What local
updates left out is with their state of each parameter, which any Plan takes; only factors of powersgd are
here, as STAGE `local`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from shoal.checkpoint import TensorRecord, dtype_named
from shoal.parallel import Parallel
from shoal.parallel.data.strategy import Exchanging
from shoal.parallel.exchange.worker_exchange import exchange_of

__all__ = ["empty_like_saved", "kept_by_exchanges", "restore_exchanges"]

_FOLDER = "exchange/"
_LOCAL = f"{_FOLDER}local/"


def kept_by_exchanges(parallel: Parallel, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return what the next exchanges on this rank depend on, by name."""
    return {
        f"{prefix}{name}": tensor
        for prefix, exchange in _exchanges(parallel, optimizer)
        for name, tensor in exchange.kept().items()
        if not (prefix.startswith(_LOCAL) and name.startswith("error"))
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


def restore_exchanges(
    parallel: Parallel, optimizer: torch.optim.Optimizer | None, kept: Mapping[str, torch.Tensor]
) -> None:
    """Make exchanges go on with what `kept_by_exchanges` returned; nothing is left out without an entry."""
    for prefix, exchange in _exchanges(parallel, optimizer):
        exchange.restore(
            {name.removeprefix(prefix): tensor for name, tensor in kept.items() if name.startswith(prefix)}
        )


def _exchanges(
    parallel: Parallel, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Exchanging]]:
    for stage, strategy in enumerate(parallel.strategies):
        for bucket, exchange in strategy.exchanges().items():
            yield f"{_FOLDER}{stage}/{bucket}/", exchange
    for name, summed in exchange_of(optimizer, parallel).exchanges().items():
        yield f"{_LOCAL}{name}/", summed

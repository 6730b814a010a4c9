"""What a Plan with `offload` needs of the configuration and of the folder, checked before any rank starts."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from shoal.errors import ConfigError
from shoal.plan import Plan
from shoal.train.config import OptimizerConfig, TrainConfig
from shoal.train.optimizer import require_elementwise
from shoal.units import format_bytes

_FP32 = 4  # bytes
_STATES = {"adamw": 2, "lion": 1}


def offload_folder(config: TrainConfig, run: Path) -> Path:
    """Return the folder of offloaded state: the configured one, or the run's directory."""
    return Path(config.offload_folder) if config.offload_folder else run


def require_offload(config: TrainConfig, plan: Plan, run: Path, model: nn.Module) -> None:
    """Refuse an optimizer or a folder that a Plan's `offload` cannot use; nothing is written.

    Args:
        config: The configuration.
        plan: The Plan.
        run: The run's directory, which need not exist yet.
        model: The model, maybe without values.

    Raises:
        ConfigError: The optimizer needs whole parameters, or the folder is no folder, may not be written, or
            has less space left than the state takes.
    """
    if not plan.tiers.has_files:
        return
    if plan.tiers.optimizer != "device":
        require_elementwise(config.optimizer, plan.offload)
    folder = offload_folder(config, run).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    needed, free = _bytes_here(config.optimizer, plan, model), os.statvfs(there)
    left = free.f_bavail * free.f_frsize
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "which is not a folder" if not there.is_dir() else "where this user may not write"
    elif left < needed:
        reason = f"with {format_bytes(left)} left, and the state takes {format_bytes(needed)} on this host"
    else:
        return
    raise ConfigError(
        f"offload={plan.offload} was given with files in {folder}, {reason}",
        possible="a folder with enough space in which this user may write, best on a fast local disk",
        change="set offload_folder to such a folder",
    )


def _bytes_here(optimizer: OptimizerConfig, plan: Plan, model: nn.Module) -> int:
    """Return a lower bound on the bytes of the files of all ranks on this host."""
    elements = sum(each.numel() for each in model.parameters() if each.requires_grad)
    moved = plan.tiers.moved
    states = _STATES.get(optimizer.name, int("momentum" in optimizer.options))
    arrays = states * ("optimizer" in moved) + ("gradients" in moved) + ("parameters" in moved)
    shards = plan.shards * plan.cp if plan.sharding.cuts_optimizer else 1
    of_rank = _FP32 * arrays * elements // (shards * plan.tp * plan.pp)
    return of_rank * int(os.environ.get("LOCAL_WORLD_SIZE", plan.ranks))

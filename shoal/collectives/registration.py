"""Registers the backend with `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shoal.collectives.ctypes_core import load_core
from shoal.collectives.group import ProcessGroup
from shoal.collectives.hang_watch import watch_of_process
from shoal.collectives.native import NativeGroup
from shoal.collectives.options import Options
from shoal.collectives.rendezvous import Formed
from shoal.errors import ConfigError


def register() -> None:
    """Register the backend "shoal" for CPUs and GPUs, if it is not registered yet."""
    if dist.is_available() and "SHOAL" not in dist.Backend._plugins:
        dist.Backend.register_backend("shoal", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(asked: Any, options: Any) -> ProcessGroup:
    core = load_core()
    if core is None:
        raise ConfigError(
            'the backend "shoal" needs the native core, which was not built when Shoal was installed',
            possible='the backend "gloo", slower',
            change="install a C++20 compiler (apt-get install g++), and then Shoal again",
        )
    if options is not None and not isinstance(options, Options):
        raise ConfigError(
            f'pg_options of the backend "shoal" are {type(options).__name__}',
            possible="shoal.collectives.Options",
            change="give such options, or none",
        )
    ranks = list(asked.global_ranks_in_group)
    watch = watch_of_process()
    native = NativeGroup(
        core,
        asked.store,
        asked.group_rank,
        asked.group_size,
        asked.timeout,
        options or Options.from_environment(),
        _known(asked),
        watch if watch.is_on else None,
        ranks if len(ranks) == asked.group_size and dist.group.WORLD is not None else None,
    )
    return ProcessGroup(native)


def _known(asked: Any) -> Formed | None:
    """Return the facts that a group's ranks know about each other from the default group, if any."""
    everyone = dist.group.WORLD
    ranks = asked.global_ranks_in_group
    if not isinstance(everyone, ProcessGroup) or len(ranks) != asked.group_size:
        return None
    return everyone.formed.among(ranks)

"""Reads from the launcher's environment which ranks there are and which one this process is."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.collectives import is_built, watch_hangs
from shoal.collectives.meeting_point import Assembly, open_store
from shoal.errors import CommunicationError, ConfigError
from shoal.launch.devices import backend_for, identity_of, sharing


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks that this process is one of.

    Attributes:
        rank: This process's rank.
        ranks: Number of ranks.
        local_rank: This process's number on its host.
        master: Host and port where the ranks meet.
    """

    rank: int
    ranks: int
    local_rank: int
    master: tuple[str, int]


def find_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """Return the World that torchrun, accelerate or srun set; None if none of them started this process.

    torchrun and accelerate set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. srun sets
    SLURM_PROCID and similar variables. Then the ranks meet at the first host of the step, at a port computed
    from the job's number, unless MASTER_ADDR or MASTER_PORT is set.

    Raises:
        ConfigError: The environment is incomplete, or contradicts itself.
    """
    world = _read_world(environment)
    if world is not None and world.rank >= world.ranks:
        raise ConfigError(
            f"the launcher's environment says that this is rank {world.rank} of {world.ranks}",
            possible=f"ranks from 0 to {world.ranks - 1}" if world.ranks else "at least one rank",
            change="set RANK and WORLD_SIZE as torchrun does",
        )
    if world is not None and world.ranks > 1 and not 0 < world.master[1] < 1 << 16:
        raise ConfigError(
            f"MASTER_PORT={world.master[1]} in the launcher's environment is no port that ranks can meet at",
            possible="1 to 65535",
            change="set MASTER_PORT to a port that is free on the host of rank 0",
        )
    return world


def _read_world(environment: Mapping[str, str]) -> World | None:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return World(
            rank=_number(environment, "RANK"),
            ranks=_number(environment, "WORLD_SIZE"),
            local_rank=_number(environment, "LOCAL_RANK"),
            master=(_text(environment, "MASTER_ADDR"), _number(environment, "MASTER_PORT")),
        )
    if "SLURM_STEP_NUM_TASKS" in environment:  # srun sets it for its tasks only, not in a batch script
        host = environment.get("MASTER_ADDR") or _first_host(_text(environment, "SLURM_STEP_NODELIST"))
        if environment.get("MASTER_PORT"):
            port = _number(environment, "MASTER_PORT")
        else:
            port = 20000 + _number(environment, "SLURM_JOB_ID") % 20000
        return World(
            rank=_number(environment, "SLURM_PROCID"),
            ranks=_number(environment, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(environment, "SLURM_LOCALID"),
            master=(host, port),
        )
    return None


def join(
    world: World,
    device: torch.device,
    *,
    timeout: float,
    environment: MutableMapping[str, str] = os.environ,
    store: Store | None = None,
    beforehand: Callable[[str], object] = lambda backend: None,
) -> None:
    """Form the default process group of all ranks: NCCL between GPUs, Shoal's backend between CPUs.

    Ranks that share a GPU, which NCCL refuses, communicate through Shoal's backend too, and rank 0 prints a
    notice. If the native core was not built, gloo replaces Shoal's backend between CPUs, also with a notice.
    Shoal's backend watches for hangs from then on.

    Args:
        world: The ranks.
        device: The device of this rank.
        timeout: Seconds after which a collective fails if not all ranks called it.
        environment: Environment that gets MASTER_ADDR and MASTER_PORT, which torch reads.
        store: The store in which these ranks meet, if `meet` made it.
        beforehand: Called with the backend, before the ranks connect.

    Raises:
        CommunicationError: The ranks did not all meet.
        ConfigError: Ranks share a GPU, and Shoal's backend was not built.
    """
    if world.ranks == 1:
        return
    limit = timedelta(seconds=timeout)
    if store is None:
        store = meet(world, timeout=timeout, environment=environment)
    watch_hangs()
    try:
        backend = _backend(world, device, store, limit)
        beforehand(backend)
        dist.init_process_group(
            backend,
            store=PrefixStore("default", store),
            rank=world.rank,
            world_size=world.ranks,
            timeout=limit,
            # NCCL then makes its communicator here; `shoal.parallel` uses it before other groups.
            device_id=device if "cuda:nccl" in backend else None,
        )
    except RuntimeError as error:
        raise _not_met(world, error) from error


def meet(world: World, *, timeout: float, environment: MutableMapping[str, str] = os.environ) -> Store:
    """Return the store in which processes tell each other how to connect; all of them call it.

    Args:
        world: The processes: the ranks, and parameter servers if there are any.
        timeout: Seconds to wait for the others.
        environment: Environment that gets MASTER_ADDR and MASTER_PORT, which torch reads.

    Raises:
        CommunicationError: They did not all meet.
    """
    environment["MASTER_ADDR"], environment["MASTER_PORT"] = world.master[0], str(world.master[1])
    limit = timedelta(seconds=timeout)
    try:
        return open_store(world.master, world.rank, world.ranks, limit, environment)
    except RuntimeError as error:
        raise _not_met(world, error) from error


def _not_met(world: World, error: RuntimeError) -> CommunicationError:
    host, port = world.master
    return CommunicationError(f"the {world.ranks} ranks did not meet at {host}:{port}: {error}")


def _backend(world: World, device: torch.device, store: Store, limit: timedelta) -> str:
    if device.type == "cuda":
        assembly = Assembly(PrefixStore("devices", store), world.rank, world.ranks, limit)
        identities = assembly.tell("device", identity_of(device))
        backend = backend_for(identities)
        if backend == "shoal" and world.rank == 0:
            print(
                f"{sharing(identities)} ranks share a GPU, so all ranks communicate through shoal: "
                "for proofs and development, not for speed",
                file=sys.stderr,
            )
        return backend
    if is_built():
        return "shoal"
    if world.rank == 0:
        print(
            "the native core of shoal is not built, so ranks communicate through gloo, which is slower; "
            "to build it, install g++ and then shoal again",
            file=sys.stderr,
        )
    return "gloo"


def _first_host(hosts: str) -> str:
    """Return the first of Slurm's list of hosts, such as `node[003-007,12],login1`.

    >>> _first_host("node[003-007,12]-ib,login1"), _first_host("a,b")
    ('node003-ib', 'a')
    """
    first = re.match(r"(?:[^,\[\]]|\[\w[^\]]*\])+", hosts)
    if first is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={hosts!r} names no host",
            possible="a list such as node[01-04]",
            change="set MASTER_ADDR to the first host",
        )
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _text(environment: Mapping[str, str], name: str) -> str:
    if name not in environment:
        raise ConfigError(
            f"the launcher's environment has no {name}",
            possible="the environment of torchrun, accelerate or srun",
            change=f"set {name}, or unset RANK and WORLD_SIZE to start ranks on this machine",
        )
    return environment[name]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text!r} in the launcher's environment is not a number",
            possible="a number from 0",
            change=f"set {name} as torchrun does",
        )
    return int(text)

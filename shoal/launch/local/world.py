"""Reads from the launcher's environment which ranks there are and which one this process is."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.collectives import is_built, watch_hangs
from shoal.collectives.tcp_store import Assembly, open_store
from shoal.errors import CommunicationError, ConfigError

_NCCL = "cpu:gloo,cuda:nccl"
"""Backends of GPUs that are not shared: the CPU's is for Python objects, which so need no GPU."""


def reports_failures(backend: str) -> bool:
    """Return whether a collective raises an error if another rank of the group is lost.

    NCCL's do not: its kernels wait on the device, and its watchdog ends the process some time later.
    """
    return "nccl" not in backend


def choose_device(asked: str, local_rank: int) -> torch.device:
    """Return the device that a rank computes on.

    The ranks of a host take its GPUs in turn: each has its own, or several share one. A rank that sees a
    single GPU, as with srun's `--gpus-per-task=1`, takes that one.

    Args:
        asked: "cpu", "cuda", or "auto" for a GPU if the host has one.
        local_rank: Number of this rank on its host.

    Raises:
        ConfigError: A GPU is asked for, and torch finds none.
    """
    if asked == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus:
        return torch.device("cuda", local_rank % gpus)
    if asked == "auto":
        return torch.device("cpu")
    built = "" if torch.backends.cuda.is_built() else "; this torch is built without CUDA"
    raise ConfigError(
        f"device={asked} was given, and torch finds no GPU on this host{built}",
        possible="cpu, or auto, which is the CPU here",
        change="leave out device=cuda, or install a torch with CUDA and show it a GPU (CUDA_VISIBLE_DEVICES)",
    )


def identity_of(device: torch.device) -> str:
    """Return a text that is equal for two ranks only if they drive the same GPU."""
    properties = torch.cuda.get_device_properties(device)
    return str(properties.uuid)


def sharing(identities: Sequence[str]) -> int:
    """Return the largest number of ranks that drive one GPU.

    Args:
        identities: The result of `identity_of` on each rank.
    """
    return max(identities.count(each) for each in set(identities))


def backend_for(identities: Sequence[str]) -> str:
    """Return the backend of ranks on GPUs: NCCL, or "shoal" if ranks share a GPU, which NCCL refuses.

    Args:
        identities: The result of `identity_of` on each rank.

    Raises:
        ConfigError: Ranks share a GPU, and the backend "shoal" is not built.
    """
    together = sharing(identities)
    if together == 1:
        return _NCCL
    if is_built():
        return "shoal"
    raise ConfigError(
        f"{together} ranks share a GPU, which NCCL refuses, and the native core of shoal is not built",
        possible="one rank for each GPU, or the backend shoal",
        change="start fewer ranks, or install g++ and then shoal again",
    )


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

"""The random generators that a model may use: seeds, and states as tensors of fixed size."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shoal.data import key_of, seed_generators
from shoal.errors import ConfigError

_WORKSPACE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def begin_anew(seed: int, step: int, place: int) -> None:
    """Seed all generators from values that a run knows under any Plan.

    Args:
        seed: The run's seed.
        step: Optimizer steps made.
        place: Index of this rank among those with other data. Ranks with equal data, such as those of tp and
            pp, get equal seeds: their results for one hidden state, such as dropout, must agree.
    """
    key = key_of(seed, step, place)
    seed_generators(key)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(key)


@contextmanager
def compute_deterministically(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Let this process's operators give the same bits each time; enter it before the first product on a GPU.

    torch would also fill all new memory, which is one more pass over the result of each operator. That only
    helps if memory is read that was never written, which would be a mistake.

    Args:
        environment: The environment, which meanwhile has the workspace that cuBLAS then needs.

    Raises:
        ConfigError: The environment sets a workspace with which cuBLAS is not deterministic.
    """
    given = environment.get(_WORKSPACE)
    if given not in (None, *_WORKSPACES):
        raise ConfigError(
            f"deterministic=true was given, and {_WORKSPACE}={given}, with which cuBLAS is not deterministic",
            possible=" or ".join(_WORKSPACES),
            change=f"unset {_WORKSPACE}, or leave out deterministic=true",
        )
    memory: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills, benchmark = memory.fill_uninitialized_memory, cudnn.benchmark
    environment.setdefault(_WORKSPACE, _WORKSPACES[0])
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory, cudnn.benchmark = fills, benchmark
        if given is None:
            environment.pop(_WORKSPACE, None)


def nondeterministic_operator(error: RuntimeError) -> str:
    """Return the operator that torch refused because it has no deterministic form; "" for other errors."""
    found = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    return found[1] if found else ""


def random_state() -> dict[str, torch.Tensor]:
    """Return the states of the generators of torch (CPU, current CUDA device if any), Python and numpy."""
    state = {"cpu": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    if torch.cuda.is_initialized():  # otherwise this process computes on the CPU, beside GPUs
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Restore a result of `random_state`."""
    torch.set_rng_state(state["cpu"])
    version, *words = state["python"][:-2].tolist()
    has_gauss, gauss = state["python"][-2:].tolist()
    random.setstate((version, tuple(words), _as_float(gauss) if has_gauss else None))
    key, (position, has_gauss, gauss) = state["numpy"][:-3].numpy(), state["numpy"][-3:].tolist()
    np.random.set_state(("MT19937", key.astype(np.uint32), position, has_gauss, _as_float(gauss)))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _python_state() -> torch.Tensor:
    version, words, gauss = random.getstate()
    return torch.tensor([version, *words, int(gauss is not None), _as_int(gauss or 0.0)])


def _numpy_state() -> torch.Tensor:
    state = np.random.get_state(legacy=False)
    words, gauss = state["state"], _as_int(state["gauss"])
    return torch.tensor([*map(int, words["key"]), words["pos"], state["has_gauss"], gauss])


def _as_int(number: float) -> int:
    return int(np.float64(number).view(np.int64))


def _as_float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))

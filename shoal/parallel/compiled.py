"""Compile blocks, and recompute them in backward (Chen et al., arXiv:1604.06174).

Recompute `full` keeps only a block's input. `selective` also keeps the results of matrix products and of
attention, which are expensive, and computes the rest again.

Only a block's own forward is compiled. Its hooks, which gather and reduce, run around it; collectives within
it end one graph, and another begins after them. Blocks of one kind share their graphs.

Recomputing always restores the states of torch's generators: whatever a user puts in a block, also later, may
draw from them. They are on the host, a GPU's too: to keep them is a small copy without a wait. It restores
the buffers that the forward changed too, such as running statistics, and afterwards puts them back.

    compile, recompute       forward of a block
    none, full               checkpointed
    none, selective          on a CPU checkpointed; elsewhere a graph, as below, run operator by operator:
                             without a graph, Python would see every operator, which takes longer than
                             recomputing everything
    blocks, full             a graph, checkpointed: backward runs the graph again
    blocks, selective        a graph of the checkpointed forward: the compiler chooses what is computed again
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial, wraps
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from shoal.parallel.plain_state import StateBefore, StatesBefore, restored
from shoal.trace import EXPENSIVE

_OWN = "shoal"
"""Namespace of Shoal's own operators, such as ring attention; all of them are expensive."""

BACKEND = "inductor"
"""torch.compile's backend for compile=blocks."""

_WRAPPED = "_orig_mod"
"""The name of a module in the wrapper that `torch.compile` returns."""

_GRAPHS_PER_BLOCK = 8
"""Graphs that a block may have: without gradients, in evaluation, between its collectives."""

_Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes what a forward runs within, first and again."""


def compile_blocks(
    blocks: Sequence[nn.Module],
    recompute: str,
    compile: str = "none",
    device: torch.device | None = None,
    again: Container[int] | None = None,
) -> None:
    """Wrap the blocks' forward, within their hooks, so that recomputing does not run these again.

    Args:
        blocks: The blocks; those of one class share their graphs.
        recompute: none, selective or full.
        compile: none or blocks.
        device: Device of the parameters; None for a CPU.
        again: Places of the blocks that recompute; None for all. Others keep everything.
    """
    compiler: Any = None
    if compile == "blocks":
        compiler = compiled
    elif recompute == "selective" and device is not None and device.type != "cpu":
        compiler = partial(torch.compile, backend="aot_eager")
    for number, block in enumerate(blocks):
        forward, policy = block.forward, recompute if again is None or number in again else "none"
        if policy == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _keep_expensive)
            if compiler is None:
                forward = _recomputed(block, forward, contexts)
            else:  # the graph changes buffers once
                forward = partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
        if compiler is not None and (compile == "blocks" or policy == "selective"):
            forward = _with_room(compiler(forward), _GRAPHS_PER_BLOCK * len(blocks))
        if policy == "full":
            forward = _recomputed(block, forward, noop_context_fn)
        if forward is not block.forward:
            block.forward = forward


def _recomputed(block: nn.Module, forward: Callable[..., Any], contexts: _Contexts) -> Callable[..., Any]:
    """Return a block's forward that backward runs again, within `contexts`, in the state that it ran in."""
    states = StatesBefore(block)

    def with_states() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = contexts()
        return first, _Again(states.take(), again) if torch.is_grad_enabled() else again

    def call(*arguments: Any, **named: Any) -> Any:
        # A graph changes buffers once.
        chosen = contexts if torch.compiler.is_compiling() else with_states
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=chosen, **named)

    return call


@final
class _Again(AbstractContextManager[None]):
    """What a forward runs again within, once for each backward: its state, and another context."""

    def __init__(self, before: Sequence[StateBefore], within: AbstractContextManager[Any]) -> None:
        self._before, self._within = before, within

    def __enter__(self) -> None:
        with ExitStack() as entered:
            entered.enter_context(restored(self._before))
            entered.enter_context(self._within)
            self._entered = entered.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled as blocks are."""
    result: Callable[..., Any] = torch.compile(function, backend=BACKEND)
    return result


def _with_room(function: Callable[..., Any], graphs: int) -> Callable[..., Any]:
    """Return a compiled function that may have this many graphs in whichever thread calls it.

    Beyond the limits torch runs eagerly, and only warns. From torch 2.12 on a limit counts in the thread that
    sets it, and backward recomputes a block in autograd's thread of the device. Older releases have one limit
    for all threads, which each call then finds as it is wanted. torch.compile's own argument, from 2.13 on,
    leaves out the limit of all graphs together.
    """

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            config: Any = torch._dynamo.config
            for limit in ("recompile_limit", "accumulated_recompile_limit"):
                if getattr(config, limit) < graphs:
                    setattr(config, limit, graphs)
        return function(*arguments, **named)

    return call


def _keep_expensive(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    expensive = operator in EXPENSIVE or operator.namespace == _OWN
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def uncompiled(model: nn.Module) -> nn.Module:
    """Return a model without what `torch.compile` or `compile()` made of it and of its modules, in place.

    A wrapper adds `_orig_mod.` to names, and a module that compiles its calls would compile the hooks that a
    Plan adds. It warns if there were any, and says how to compile under a Plan.
    """
    was_compiled = False
    while _WRAPPED in model._modules:
        model, was_compiled = model.get_submodule(_WRAPPED), True
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            while child is not None and _WRAPPED in child._modules:
                child, was_compiled = child.get_submodule(_WRAPPED), True
            parent._modules[name] = child
    for module in model.modules():
        if module._compiled_call_impl is not None:
            module._compiled_call_impl, was_compiled = None, True
    if was_compiled:
        warnings.warn(
            "the model was compiled before it is laid over ranks, and computes without that: its names are "
            "those of the plain model; to compile its blocks, give the Plan compile=blocks",
            stacklevel=3,
        )
    return model


def plain_key(key: str) -> str:
    """Return a name of a `state_dict` as it is without `torch.compile`."""
    return key.replace(f"{_WRAPPED}.", "")

"""Refuse terms of a loss that read weights themselves, such as a penalty, where they would count wrongly.

If ranks that tensor parallelism joins each have a part of a gradient, the parts are summed. A term that reads
the weight itself is whole on each of these ranks, and would be summed as well. In a pipeline the loss is
computed where the last stage is, and a term there would leave out the weights of other stages.

Refuse calls of torch that would be silently wrong on a rank's parts of a model.

`torch.nn.utils.clip_grad_norm_`, `get_total_norm` and `clip_grads_with_norm_` take the norm of the tensors
that they get: under tp, ep and pp that is the norm of one rank's part of the gradient. `torch.autograd.grad`
over parameters, and `backward(inputs=...)`, give the gradient of one rank's samples, or nothing where the
parameters that compute are others. Terms of a loss that read weights are checked there too (`loss_terms.py`).

`torch.amp.GradScaler` skips a step if a gradient that it sees is not finite. Here the ranks that hold parts
of one state tell each other.

Parameters are found by marks on tensors, which end with these. torch's own modules look up the functions
that are replaced here at each call, so it does not matter how a caller imported what it calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.nn.utils import clip_grad

from shoal.errors import LayoutError
from shoal.models.task import children_of
from shoal.parallel.axes import Axes
from shoal.parallel.local_shards import NO_NORM, Mark, Owned, local_part

_SUMMED = "_shoal_summed"
_OF_STAGE = "_shoal_of_stage"
_PRODUCTS = ("Mul", "Div", "Mm", "Mv", "Bmm", "Dot", "Addmm", "Addmv", "Baddbmm", "Convolution")
"""Beginnings of the names of autograd's functions that multiply."""


@dataclass(slots=True)
class _Check:
    """Whether any parameter was marked."""

    is_needed: bool = False


_check = _Check()


def mark_summed(computing: Mapping[str, nn.Parameter], owned: Iterable[Owned]) -> None:
    """Mark the parameters that compute and whose gradients are summed over ranks with equal values.

    Args:
        computing: The model's own parameters, by name.
        owned: This rank's parts of the trained parameters.
    """
    for each in owned:
        times = each.family.factor * each.family.summed.size * each.family.shard.size
        if times > 1.5 and each.parameter is not computing[each.name]:
            _check.is_needed = True
            setattr(computing[each.name], _SUMMED, (each.name, round(times)))


def mark_stage(computing: Mapping[str, nn.Parameter], owned: Iterable[Owned]) -> None:
    """Mark the parameters of a pipeline's stage.

    Args:
        computing: The stage's own parameters, by name.
        owned: This rank's parts of the trained parameters.
    """
    for name, each in (*computing.items(), *((each.name, each.parameter) for each in owned)):
        setattr(each, _OF_STAGE, name)


def require_no_terms(outputs: Iterable[Tensor | GradientEdge]) -> None:
    """Check the graph of losses for terms that read marked parameters themselves.

    What a model computes comes from layers that communicate, which are autograd functions of Python. A term
    of weights alone comes from no such function. The graph is followed down to the first of these functions.

    Args:
        outputs: What backward begins with.

    Raises:
        LayoutError: There is such a term.
    """
    if not _check.is_needed:
        return
    # The backward of a pipeline begins with edges, which have no grad_fn; its losses are checked before.
    roots = [getattr(each, "grad_fn", None) for each in outputs]
    for name, times in _terms(roots, _SUMMED, lambda node: isinstance(node, BackwardCFunction)):
        raise LayoutError(
            f"the loss has a term that reads {name} itself, such as a penalty. Ranks have parts of this "
            f"parameter's gradient, which are summed: the term would count {times} times",
            possible="the same term of parameters() of the object that shoal.parallelize returned, or "
            "weight_decay of the optimizer",
            change="write the term over these parameters",
        )


def require_no_terms_of_stage(loss: Tensor, output: Any, hidden: Tensor) -> None:
    """Check the graph of a pipeline's loss for terms that read the last stage's parameters themselves.

    Args:
        loss: The loss.
        output: The model's output from which the loss was computed.
        hidden: What the last stage received, of which all that it computes is made.

    Raises:
        LayoutError: There is such a term.
    """
    ends = {each.grad_fn for each in _tensors_of(output) if each.grad_fn is not None}

    def is_computed(node: Node) -> bool:
        return node in ends or getattr(node, "variable", None) is hidden

    for name in _terms([loss.grad_fn], _OF_STAGE, is_computed, factors_count=False):
        raise LayoutError(
            f"the loss has a term that reads {name} itself, such as a penalty. In a pipeline the last stage "
            "computes the loss: the term would leave out the weights of other stages",
            possible="a loss of the model's output and the targets, weight_decay of the optimizer, or pp=1",
            change="leave the term out; add its gradient to .grad of parameters() after forward_backward",
        )


def _tensors_of(output: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors of an output, also those in attributes of objects."""
    if isinstance(output, Tensor):
        yield output
    elif depth and not isinstance(output, type | nn.Module):
        held = {**(children_of(output) or {}), **getattr(output, "__dict__", {})}
        for each in held.values():
            yield from _tensors_of(each, depth - 1)


def _terms(
    roots: Iterable[Node | None],
    mark: str,
    is_computed: Callable[[Node], bool],
    *,
    factors_count: bool = True,
) -> Iterator[Any]:
    """Yield the marks of parameters that are read by a function which uses nothing that a model computed.

    Args:
        roots: Where the graph begins.
        mark: Name of the attribute of a parameter that holds its mark.
        is_computed: Whether a node is something that a model computed, below which the graph is not followed.
        factors_count: Whether to yield also a parameter that only makes a factor of what the model computed,
            such as `logits * scale.exp()`.
    """
    users: defaultdict[Node, list[Node]] = defaultdict(list)
    terms: list[tuple[Node, Any]] = []
    ahead = [node for node in roots if node is not None]
    seen, computed = set(ahead), []
    while ahead:
        node = ahead.pop()
        if is_computed(node):
            computed.append(node)
            continue
        for source, _ in node.next_functions:
            if source is None:
                continue
            users[source].append(node)
            marked = getattr(getattr(source, "variable", None), mark, None)
            if marked is not None:
                terms.append((node, marked))
            elif source not in seen:
                seen.add(source)
                ahead.append(source)
    from_model: set[Node] = set()
    while terms and computed:
        if (node := computed.pop()) not in from_model:
            from_model.add(node)
            computed += users[node]
    for user, marked in terms:
        if user in from_model or (not factors_count and _is_factor(user, users, from_model)):
            continue
        yield marked


def _is_factor(node: Node, users: Mapping[Node, list[Node]], from_model: set[Node]) -> bool:
    """Return whether the values made from a node are used only in products with what a model computed."""
    ahead, seen = [node], {node}
    while ahead:
        node = ahead.pop()
        if not users.get(node):
            return False  # the loss itself
        for user in users[node]:
            if user not in from_model and user not in seen:
                seen.add(user)
                ahead.append(user)
            elif user in from_model and not user.name().startswith(_PRODUCTS):
                return False
    return True


_REDUCED = "_shoal_reduced"
_PARTS = "_shoal_parts"
_INPUTS = 3  # position of `inputs` among the arguments after the outputs


def mark_parts(module: nn.Module, owned: Sequence[Owned], axes: Axes) -> None:
    """Mark the parameters of a model of which this rank has parts, or computes a part of the gradient.

    Args:
        module: The model.
        owned: This rank's parts of the trained parameters.
        axes: The axes that the model is laid over.
    """
    computing = dict(module.named_parameters())
    parts = Mark(lambda: axes.parts)
    mark_summed(computing, owned)
    if axes.pp.size > 1:
        mark_stage(computing, owned)
    for each in owned:
        setattr(each.parameter, _PARTS, parts)
        if axes.world.size > 1 or each.parameter is not computing[each.name]:
            setattr(each.parameter, _REDUCED, each.name)
            setattr(computing[each.name], _REDUCED, each.name)
        if each.cut is not None:
            setattr(each.parameter, NO_NORM, f"a block of {each.name}")
        elif each.family.shard.size > 1 and each.family.mesh is None:
            setattr(each.parameter, NO_NORM, f"rows of {each.name}")
        elif axes.pp.size > 1:
            setattr(each.parameter, NO_NORM, f"{each.name}, and no parameters of other stages")


def _require_norm(tensors: Iterable[Any]) -> None:
    for each in tensors:
        part = getattr(each, NO_NORM, None)
        if part is not None:
            raise LayoutError(
                f"torch.nn.utils takes the norm of the gradients that it gets, and this rank has {part}",
                possible="clip_gradients(limit), gradient_norm() and measure_gradient() of the object that "
                "shoal.parallelize returned: they take the norm over all ranks",
                change="call clip_gradients(limit) on all ranks",
            )


def _of_whole_norm(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        tensors = next(iter((*arguments, *named.values())))
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        _require_norm(tensors)
        if arguments:
            return function(tensors, *arguments[1:], **named)
        return function(**{**named, next(iter(named)): tensors})

    return checked


def _of_whole_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(outputs: Any, *arguments: Any, **named: Any) -> Any:
        for each in arguments[_INPUTS] if len(arguments) > _INPUTS else ():
            name = getattr(each, _REDUCED, None)
            if name is not None:
                raise LayoutError(
                    f"torch.autograd was asked for the gradient of {name} alone, which would be one rank's",
                    possible="backward(), after which .grad of parameters() has the gradient over all ranks; "
                    "torch.autograd.grad with respect to inputs and activations",
                    change="call backward() without inputs, and read .grad",
                )
        require_no_terms(outputs)
        return function(outputs, *arguments, **named)

    return checked


class _Given(NamedTuple):
    """What a GradScaler reads of an optimizer."""

    param_groups: list[dict[str, Any]]


def _with_own_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter with its gradient: torch takes no DTensors beside tensors."""
    if parameter.grad is None or not hasattr(parameter, _PARTS):
        return parameter
    own = local_part(parameter).detach()
    own.grad = local_part(parameter.grad)
    return own


def _on_all_parts(unscale: Callable[..., dict[torch.device, torch.Tensor]]) -> Callable[..., Any]:
    @wraps(unscale)
    def checked(scaler: Any, optimizer: Any, *arguments: Any) -> dict[torch.device, torch.Tensor]:
        given = [each for group in optimizer.param_groups for each in group["params"]]
        parts_here = _Given([{"params": [_with_own_gradient(each) for each in given]}])
        found = unscale(scaler, parts_here, *arguments)
        # torch changes gradients there without counting it, and norms may be known from before.
        torch.autograd.graph.increment_version([each.grad for each in given if each.grad is not None])
        parts = {mark(): each.device for each in given if (mark := getattr(each, _PARTS, None)) is not None}
        for axis, device in parts.items():
            if axis is not None and axis.size > 1:
                total = sum((each.to(device) for each in found.values()), torch.zeros((), device=device))
                axis.all_reduce(total, "found_inf").wait()
                found[device] = total.clamp(max=1.0)
        return found

    return checked


def _replace(modules: Sequence[tuple[Any, str]], checked: Callable[..., Any]) -> None:
    function = checked(getattr(*modules[0]))
    for module, name in modules:
        setattr(module, name, function)


_replace([(clip_grad, "_get_total_norm"), (nn.utils, "get_total_norm")], _of_whole_norm)
_replace([(clip_grad, "_clip_grads_with_norm_"), (nn.utils, "clip_grads_with_norm_")], _of_whole_norm)
_replace([(torch.autograd, "_engine_run_backward")], _of_whole_gradients)
_replace([(GradScaler, "_unscale_grads_")], _on_all_parts)

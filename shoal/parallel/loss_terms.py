"""Refuse terms of a loss that read weights themselves, such as a penalty, where they would count too often.

If ranks that tensor parallelism joins each have a part of a gradient, the parts are summed. A term that reads
the weight itself is whole on each of these ranks, and would be summed as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.autograd.function import BackwardCFunction

from shoal.errors import LayoutError
from shoal.parallel.owned import Owned

__all__ = ["mark_summed", "require_no_terms"]

_SUMMED = "_shoal_summed"


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


def require_no_terms(outputs: Iterable[Any]) -> None:
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
    users: defaultdict[Any, list[Any]] = defaultdict(list)
    terms: list[tuple[Any, tuple[str, int]]] = []
    ahead = [node for each in outputs if (node := getattr(each, "grad_fn", None)) is not None]
    seen, computed = set(ahead), []
    while ahead:
        node = ahead.pop()
        if isinstance(node, BackwardCFunction):
            computed.append(node)
            continue
        for source, _ in node.next_functions:
            if source is None:
                continue
            users[source].append(node)
            term = getattr(getattr(source, "variable", None), _SUMMED, None)
            if term is not None:
                terms.append((node, term))
            elif source not in seen:
                seen.add(source)
                ahead.append(source)
    if not terms:
        return
    from_layers = set()
    while computed:
        if (node := computed.pop()) not in from_layers:
            from_layers.add(node)
            computed += users[node]
    for user, (name, times) in terms:
        if user not in from_layers:
            raise LayoutError(
                f"the loss has a term that reads {name} itself, such as a penalty. Ranks have parts of this "
                f"parameter's gradient, which are summed: the term would count {times} times",
                possible="the same term of parameters() of the object that shoal.parallelize returned, or "
                "weight_decay of the optimizer",
                change="write the term over these parameters",
            )

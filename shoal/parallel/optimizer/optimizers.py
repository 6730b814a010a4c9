"""Checks and notifications of optimizer steps on a model that is laid over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shoal.errors import LayoutError, TrainingError
from shoal.parallel.axes import Axes
from shoal.parallel.communication import Axis
from shoal.parallel.data.strategy import Strategy
from shoal.parallel.device import on_device
from shoal.parallel.local_shards import NO_NORM, PART, Mark, Owned

# Marks are attributes of the tensors, so that they end with them.
_COMPUTES = "_shoal_computes"
_FIXED = "_shoal_fixed"
_CHANGED = "_shoal_changed"
_AVERAGED = "_shoal_averaged"

_OF_WHOLE_PARAMETERS = ("Adafactor", "LAMB", "LARS", "Lamb", "Muon", "SOAP", "Shampoo")
"""Names of optimizers whose update of an element depends on others of its parameter."""

_OF_ALL_PARAMETERS = (
    *("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"),
    *("DoG", "LBFGS", "Prodigy"),
)
"""Names of optimizers whose update of an element depends on all parameters, as by a step size for all."""

_NOT_OF_DTENSORS = {
    ("torch", "Adafactor"),
    ("torch", "Muon"),
    ("torch", "Rprop"),
    ("transformers", "Adafactor"),
}
"""Packages and names of optimizers that fail with some DTensors, because of limits or errors of their own."""


def follow_optimizers(
    module: nn.Module,
    owned: Sequence[Owned],
    fixed: Iterable[tuple[str, nn.Parameter]],
    changed: Callable[[], None],
    axes: Axes,
) -> None:
    """Refuse steps that would train nothing or train wrongly, and report all other steps.

    A step is refused if the optimizer was made before its model was laid out, or if it needs whole
    parameters, or all of them, and has only a part. An optimizer that decides by the loss gets the mean over
    ranks, of which its gradients are those.

    Args:
        module: The model.
        owned: The parameters that optimizers may change.
        fixed: The parameters that were not trained when the model was laid out, with their names.
        changed: Called after a step of an optimizer that has some of `owned`; a bound method, not kept alive.
        axes: The axes of the Plan.
    """
    given = {each.parameter for each in owned}
    for name, parameter in module.named_parameters():
        if parameter not in given:
            setattr(parameter, _COMPUTES, name)
    for name, parameter in fixed:
        setattr(parameter, _FIXED, name)
    called: Mark[Callable[[], None]] = Mark(weakref.WeakMethod(changed))  # type: ignore[arg-type]
    averaged = Mark(lambda: axes.averaged)
    for each in owned:
        setattr(each.parameter, _CHANGED, called)
        setattr(each.parameter, _AVERAGED, averaged)
        setattr(each.parameter, PART, _part_of(each))


def _part_of(owned: Owned) -> tuple[str, str]:
    """Return which part of the parameter the optimizer has, and the parameter's name."""
    if owned.cut is not None:
        return "a block", owned.name
    return ("rows" if owned.family.shard.size > 1 else ""), owned.name


def _names_of(optimizer: Optimizer) -> set[str]:
    return {kind.__name__ for kind in type(optimizer).__mro__}


def _require_whole(optimizer: Optimizer) -> None:
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(optimizer).__mro__}
    takes_blocks = _names_of(optimizer).isdisjoint(_OF_WHOLE_PARAMETERS)
    fails_with_rows = not kinds.isdisjoint(_NOT_OF_DTENSORS)
    if takes_blocks and not fails_with_rows:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            part, name = getattr(parameter, PART, ("", ""))
            if (part == "a block" and not takes_blocks) or (part == "rows" and fails_with_rows):
                kind = type(optimizer).__name__
                raise LayoutError(
                    f"{kind} needs whole parameters, and a rank has {part} of {name}",
                    possible="for rows, shoal.parallel.WholeParameters, which the Trainer uses for adafactor "
                    "and muon; for blocks from tp or ep, elementwise optimizers such as AdamW",
                    change="change the Plan or the optimizer"
                    if part == "a block"
                    else f"make WholeParameters(parallel, parameters, {kind}), or set optimizer.whole=true",
                )


def needs_all_parameters(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's update of an element depends on all parameters."""
    return not _names_of(optimizer).isdisjoint(_OF_ALL_PARAMETERS)


def _require_all(optimizer: Optimizer) -> None:
    """Check that an optimizer that makes one step from all parameters has all of them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (part := getattr(parameter, NO_NORM, None)) is not None:
                kind = type(optimizer).__name__
                raise LayoutError(
                    f"{kind} makes its step from all parameters together, and a rank has {part}",
                    possible="a Plan without tp, ep and pp, or an optimizer such as AdamW",
                    change="change the Plan or the optimizer",
                )


def _with_mean_loss(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step whose closure returns the mean of all ranks' losses."""
    mark: Mark[Axis] | None = getattr(optimizer.param_groups[0]["params"][0], _AVERAGED, None)
    axis = None if mark is None else mark()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None or axis is None or axis.size == 1:
        return args, kwargs

    def mean_loss() -> torch.Tensor:
        mean = torch.as_tensor(closure()).detach().clone()
        axis.all_reduce(mean, "loss").wait()
        return mean / axis.size

    return (optimizer, mean_loss), {}


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    _require_whole(optimizer)
    if needs_all_parameters(optimizer):
        _require_all(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = getattr(parameter, _FIXED, None)
            if name is not None and parameter.requires_grad:
                raise LayoutError(
                    f"{type(optimizer).__name__} has the parameter {name}, which was not trained when the "
                    "model was laid over ranks, so it gets no gradient",
                    possible="parameters that are frozen after shoal.parallelize, and released later",
                    change=f"call requires_grad_(False) on {name} after shoal.parallelize",
                )
            name = getattr(parameter, _COMPUTES, None)
            if name is not None and parameter.requires_grad:
                raise LayoutError(
                    f"{type(optimizer).__name__} has the model's own parameter {name}, which is only for "
                    "compute: it gets no gradient, and values written to it are lost",
                    possible="an optimizer of parameters() of the object that shoal.parallelize returned",
                    change="make the optimizer after shoal.parallelize, from its parameters()",
                )
    return _with_mean_loss(optimizer, args, kwargs) if "LBFGS" in _names_of(optimizer) else None


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    told = {
        method
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (method := getattr(parameter, _CHANGED, None)) is not None
    }
    for method in told:
        changed = method()
        if changed is not None:
            changed()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


class GradientNorm(NamedTuple):
    """Norms of a gradient, on the device.

    Attributes:
        whole: Euclidean norm of the whole gradient, a scalar in fp64; equal on every rank.
        names: Names of the parameters of which this rank has a part with a gradient.
        parts: Euclidean norm of the gradient of each of these parts, `[names]`, fp64.
        sums: Sums over the ranks of the numbers that `measure_gradient` got beside the gradient, fp64.
    """

    whole: torch.Tensor
    names: Sequence[str]
    parts: torch.Tensor
    sums: torch.Tensor


def measure_gradient(
    owned: Sequence[Owned], parts: Axis, device: torch.device, beside: Sequence[float] = ()
) -> GradientNorm:
    """Return the norms of the gradient; all ranks call it together, and no host waits for its device.

    Args:
        owned: This rank's parts of the parameters.
        parts: The ranks that together hold one whole state.
        device: Device on which to sum.
        beside: Further numbers to sum over these ranks, in the same message.
    """
    graded = [(each, gradient) for each in owned if (gradient := each.gradient) is not None]
    norms = torch.zeros(0, dtype=torch.float64, device=device)
    if graded:
        norms = torch.stack(_norms(graded)).double()
    squares = norms.square()
    copies = tuple(each.family.copies for each, _ in graded)
    if max(copies, default=1) > 1:
        squares = squares / on_device(copies, device)
    total = squares.sum()
    sums = torch.stack([total, *(total.new_full((), number) for number in beside)])
    parts.all_reduce(sums, "gradient norm").wait()
    return GradientNorm(sums[0].sqrt(), [each.name for each, _ in graded], norms, sums[1:])


def _norms(graded: Sequence[tuple[Owned, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the norm of each gradient; of those in files as they were when they were written."""
    known = [
        None if each.stored is None or (whole := each.parameter.grad) is None else each.stored.norm_of(whole)
        for each, _ in graded
    ]
    others = [gradient for (_, gradient), norm in zip(graded, known, strict=True) if norm is None]
    computed = iter(torch._foreach_norm(others) if others else ())
    return [next(computed) if norm is None else norm for norm in known]


def limit_gradients(owned: Sequence[Owned], norm: torch.Tensor, limit: float) -> None:
    """Scale this rank's part of the gradient down, if the whole gradient's norm is above `limit`."""
    gradients = [gradient for each in owned if (gradient := each.gradient) is not None]
    factor = (limit / norm).clamp(max=1.0)
    # This is one kernel only if the gradients and the factor have one dtype; otherwise one for each gradient.
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        of_dtype = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_mul_(of_dtype, factor.to(dtype))


_CYCLE = 256
"""Steps are compared modulo this, so that sums of squares over many ranks stay exact in fp64."""


@final
class StepCount:
    """Counts the steps of this rank's optimizers; several that follow one backward make one step.

    Args:
        strategies: The strategies of this rank's stages, which count backwards and learn of steps.
        is_stage: Whether other ranks have other stages: then a rank may have no optimizer.

    Attributes:
        made: Number of steps; negative while this rank may have no optimizer.
    """

    def __init__(self, strategies: Sequence[Strategy], *, is_stage: bool) -> None:
        self.made = -1 if is_stage else 0
        self._strategies = strategies
        self._backwards = 0

    def note(self) -> None:
        """Note that an optimizer changed parameters."""
        backwards = sum(each.backwards for each in self._strategies)
        if backwards != self._backwards:
            self.made = max(self.made, 0) + 1
            self._backwards = backwards
        for each in self._strategies:
            each.changed()

    def compared_norm(self, owned: Sequence[Owned], parts: Axis, device: torch.device) -> torch.Tensor:
        """Return the norm of the whole gradient, a scalar in fp64, of ranks that made equally many steps.

        Args:
            owned: This rank's parts of the parameters.
            parts: The ranks that together hold one whole state.
            device: Device on which to sum.

        Raises:
            TrainingError: They made different numbers of steps.
        """
        number = float(0 if self.made < 0 else self.made % _CYCLE + 1)
        measured = measure_gradient(owned, parts, device, (float(number > 0), number, number**2))
        ranks, total, squares = measured.sums.tolist()
        if ranks * squares != total**2:
            made = torch.zeros(parts.size, dtype=torch.float64, device=device)
            made[parts.index] = self.made
            parts.all_reduce(made, "steps").wait()
            require_equal_steps(dict(zip(parts.members, map(int, made.tolist()), strict=True)))
        return measured.whole


def require_equal_steps(made: Mapping[int, int]) -> None:
    """Check that all ranks that have an optimizer made equally many steps.

    Args:
        made: The number of steps by rank; negative for a rank without an optimizer.

    Raises:
        TrainingError: They did not.
    """
    ranks: dict[int, list[str]] = {}
    for rank, number in made.items():
        if number >= 0:
            ranks.setdefault(number, []).append(str(rank))
    if len(ranks) > 1:
        who = "; ".join(f"{number} on rank {', '.join(ranks[number])}" for number in sorted(ranks))
        raise TrainingError(
            "ranks made different numbers of optimizer steps, so their weights do not fit together: "
            f"{who}. Call optimizer.step() equally often on all ranks; gradient_norm() is equal on all of "
            "them, and can decide"
        )

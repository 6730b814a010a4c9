"""Whether a model's own loss of whole samples is the mean of its losses of parts: a small forward tells.

Context parallelism gives a rank a part of each sample, and averages the losses of the parts. A loss that
shifts its labels, sums, or weighs classes is another one then. It is refused when its argument is given: a
model may be used without its own loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.models.nested import tensors_in
from shoal.parallel.axes import Axes
from shoal.parallel.context.positions import local_sequence
from shoal.parallel.hugging_face.layout import has_tensor_plan
from shoal.parallel.model_probe import Probe, difference, required_arguments

_LABELS = 4  # of a sample, few enough for any model's positions


def refuse_losses(
    model: nn.Module, probe: Probe, divided: Probe, length: int, axes: Axes, context: str
) -> None:
    """Make a model refuse arguments of which it computes a loss that differs over parts of samples.

    Models of transformers are left as they are: they refuse every loss of their own under cp.

    Args:
        model: The model, which gets a hook for each such argument.
        probe: A copy of it.
        divided: A copy that is divided among the ranks.
        length: Tokens of a sample that both take.
        axes: The Plan's axes; all ranks call this together.
        context: The Plan's kind of context parallelism.
    """
    if axes.cp.size == 1 or has_tensor_plan(model):
        return
    takes = inspect.signature(model.forward).parameters.values()
    required = required_arguments(model)
    for name in [each.name for each in takes if each.default is None or each.name in required]:
        try:
            expected = [each for seed in (0, 1) for each in _loss_of(probe, name, length, seed)]
            if not expected:
                continue
            found = [_loss_over(divided, name, length, seed, axes, context) for seed in (0, 1)]
        except Exception:  # no tokens are taken by this name
            continue
        pairs = zip(found, expected, strict=True)
        differs = torch.tensor([float(difference(each, right) > 1) for each, right in pairs])
        differs = differs.to(probe.device)
        axes.world.all_reduce(differs, "probe").wait()
        if bool(
            differs.all()
        ):  # rounding may send a token to another expert, but not for other tokens as well
            model.register_forward_pre_hook(_Refusal(model, name), with_kwargs=True)


def ignores_first_label(model: nn.Module) -> bool | None:
    """Return whether the loss that a model computes of `labels` leaves out the first of each sample.

    So does one that predicts each label from the tokens before it. None for a model that cannot be asked.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        return None
    try:
        probe = Probe(model, next(model.parameters()).device)
        tokens, labels = probe.inputs(_LABELS, 0), probe.inputs(_LABELS, 2)
        losses = []
        for left_out in ([], [0], [-1]):
            given = labels.clone()
            given[:, left_out] = -100
            losses.append(_numbers(probe.output(tokens, named={"labels": given}))[-1])
    except Exception:  # it takes no tokens, or has no such loss
        return None
    return difference(losses[1], losses[0]) <= 1 < difference(losses[2], losses[0])


def _loss_of(probe: Probe, name: str, length: int, seed: int) -> list[Tensor]:
    """Return the loss that comes with an argument; none if none does."""
    tokens = probe.inputs(length, seed)
    is_required = name in required_arguments(probe.module)
    without = [] if is_required else _numbers(probe.output(tokens))
    found = _numbers(probe.output(tokens, named={name: probe.inputs(length, seed + 2)}))
    return found[-1:] if len(found) > len(without) else []


def _loss_over(divided: Probe, name: str, length: int, seed: int, axes: Axes, context: str) -> Tensor:
    """Return the mean of the ranks' losses of their parts."""
    tokens, targets = (
        local_sequence(divided.inputs(length, each), axes.cp, context) for each in (seed, seed + 2)
    )
    loss = _numbers(divided.output(tokens, named={name: targets}))[-1] / axes.cp.size
    axes.cp.all_reduce(loss, "probe").wait()
    return loss


def _numbers(output: Any) -> list[Tensor]:
    """Return the tensors of one float in an output, in fp32; the one that is called a loss comes last."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = [each for each in tensors_in(output) if each.is_floating_point() and not each.dim()]
    return [each.float() for each in sorted(found, key=lambda each: each is loss)]


@final
class _Refusal:
    """A hook before a model's forward that refuses one argument.

    Args:
        model: The model.
        name: The argument's name.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._takes = inspect.signature(model.forward)
        self._name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Raise a ModelError if the argument is given."""
        if self._takes.bind_partial(*args, **named).arguments.get(self._name) is not None:
            raise ModelError(
                f"{self._name} were given to {type(module).__name__}, and over parts of samples its loss of "
                "them differs from one device's",
                possible="a loss that is the mean over positions, of targets that are already shifted, such "
                "as shoal.models.next_token_loss(output, targets)",
                change=f"leave out {self._name}, and compute such a loss of the output; or leave out cp",
            )

"""Whether layers that are divided among ranks compute what one device does: a small backward tells.

Context parallelism is right where attention alone mixes a sequence and every position is counted from the
whole, and so is tensor parallelism that splits the sequence. A parameter that every rank of tensor
parallelism has whole gets its whole gradient only if it works on all features, or if its ranks' gradients
are summed. No list of layers knows that of every model. So all ranks run a copy of the model, first alone and
then divided as the model will be, and compare the outputs, and then the gradients in training mode. Shoal's
own transformer is not asked.

Whether a model's own loss of whole samples is the mean of its losses of parts: a small forward tells.

Context parallelism gives a rank a part of each sample, and averages the losses of the parts. A loss that
shifts its labels, sums, or weighs classes is another one then. It is refused when its argument is given: a
model may be used without its own loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from shoal.errors import ModelError, PlanError, UserError
from shoal.models import Transformer
from shoal.models.experts import set_auxiliary_scale
from shoal.models.task import tensors_in
from shoal.parallel.axes import Axes
from shoal.parallel.context.positions import local_sequence
from shoal.parallel.hugging_face.layout import has_tensor_plan
from shoal.parallel.local_shards import Cut
from shoal.parallel.model_probe import (
    LARGE,
    Probe,
    cannot_probe,
    difference,
    first_floats,
    is_hugging_face,
    required_arguments,
)
from shoal.parallel.tensor.vocabulary import SplitLogits
from shoal.spec.plan import Plan

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


_LENGTH = 16
"""Tokens of a sample, about; some models take no more, and attention may have a window."""

_SHORT = 1 << 34
"""Parameters times tokens of a forward that takes about a second on one core."""

_OF_ITS_OWN, _OF_ALL = 1e-2, 1e-5
"""Rounding moves a gradient by less than this share of its largest element, or of that of all gradients."""


class Divided(NamedTuple):
    """The parameters of a model that is divided among the ranks, by name.

    Attributes:
        cuts: This rank's block of each parameter that tensor parallelism cuts.
        narrowed: The parameters that ranks of tensor parallelism have whole, and compute with a part.
        experts: The parameters of which expert parallelism gives each rank some.
    """

    cuts: Mapping[str, Cut]
    narrowed: frozenset[str]
    experts: frozenset[str]


Divide = Callable[[nn.Module, Axes], Divided]
"""Cuts the parameters of a model and divides its layers among the ranks, in place."""


@final
class DivisionProbe:
    """A copy of a model that was made before the model was changed.

    Args:
        model: The model.
        plan: The Plan.
        device: Device of this rank.
        sequence: Tokens of a sample, if known, for models that take no other length.
    """

    def __init__(self, model: nn.Module, plan: Plan, device: torch.device, sequence: int | None) -> None:
        self._model = model
        self._plan = plan
        self._sequence = sequence
        self._probe: Probe | None = None
        self._unknown: Exception | None = None
        self._splits_stream = plan.tp > 1 and plan.tensor != "plain"
        if type(model) is not Transformer and plan.cp * plan.tp > 1:
            try:
                self._probe = Probe(model, device)
            except Exception as error:  # whatever the model's own code raises
                self._unknown = error

    def require_equal(self, axes: Axes, divide: Divide) -> None:
        """Check that the model computes the same divided among the ranks; all of them call this together.

        A model that takes no plain tokens, or no other input of one tensor, passes with a warning.

        Args:
            axes: The Plan's axes.
            divide: Divides a model as this one will be.

        Raises:
            PlanError: It computes something else, and would not with tensor=plain.
            ModelError: It computes something else.
        """
        if self._probe is not None:
            axes = _unrecorded(axes)
            self._share_values(self._probe, axes)
            try:
                lengths = self._lengths(self._probe)
            except Exception as error:  # whatever the model's own code raises
                self._unknown = error
            else:
                refusal = self._difference(self._probe, lengths, axes, divide)
                if refusal is not None:
                    raise refusal
        if self._unknown is not None and axes.world.index == 0:
            cannot_probe(self._model, f"it computes the same under {self._plan}", self._unknown)

    def _lengths(self, probe: Probe) -> list[int]:
        """Return the lengths that the Plan divides and that one device takes, the best one first."""
        plan, first = self._plan, None
        multiple = plan.cp * (2 if plan.cp > 1 and plan.context == "ring" else 1)
        multiple *= plan.tp if self._splits_stream else 1
        wanted = dict.fromkeys([-(-_LENGTH // multiple) * multiple, multiple, self._sequence or multiple])
        taken = []
        for length in wanted:
            try:
                probe.run(probe.inputs(length))
                taken.append(length)
            except Exception as error:  # the model takes no such length
                first = first or error
        if first is not None and not taken:
            raise first
        return taken

    def _own_length(self, probe: Probe, lengths: list[int]) -> int | None:
        """Return the length of the user's samples, if a forward of one takes less than about a second."""
        size = sum(parameter.numel() for parameter in probe.module.parameters())
        length = self._sequence
        return length if length in lengths and length * size <= _SHORT else None

    def _share_values(self, probe: Probe, axes: Axes) -> None:
        """Give all ranks rank 0's values, as the model will have."""
        tensors = () if probe.is_new else (*probe.module.parameters(), *probe.module.buffers())
        for pending in [axes.world.broadcast(each.data, "probe") for each in tensors]:
            pending.wait()

    def _difference(
        self,
        probe: Probe,
        lengths: list[int],
        axes: Axes,
        divide: Divide,
    ) -> UserError | None:
        other = probe.copy()
        divided = divide(other.module, axes)
        names = _require_few_gradients(probe, other, divided)
        for length in lengths:
            try:
                # Rounding may send a token to another expert, but not for other tokens as well.
                for each in dict.fromkeys([length, self._own_length(probe, lengths) or length]):
                    if all(self._differs_at(probe, other, each, axes, seed) for seed in (0, 1)):
                        return self._refused()
                wrong: list[str] = []
                for seed in (0, 1):
                    wrong = self._wrong_gradients(probe, other, divided, names, length, axes, seed)
                    if not wrong:
                        refuse_losses(self._model, probe, other, length, axes, self._plan.context)
                        return None
                return self._refused_gradients(wrong, divided)
            except PlanError:  # a window that is shorter: the forward says so, with the user's lengths
                continue
            except UserError:
                raise
            except Exception as error:
                if is_hugging_face(self._model):
                    raise self._refused(f"raises {type(error).__name__}: {error}") from error
                self._unknown = error
                return None
        return None

    def _differs_at(self, probe: Probe, other: Probe, length: int, axes: Axes, seed: int) -> bool:
        tokens = probe.inputs(length, seed)
        expected = probe.run(tokens)
        found = other.output(local_sequence(tokens, axes.cp, self._plan.context))
        split = _split_logits(found)
        if split is not None:
            found = split.local
            expected = expected.narrow(-1, split.first_row, found.shape[-1])
        found = first_floats(found)
        if axes.cp.size > 1 and expected.dim() > 1 and expected.shape[1] == length:
            expected = local_sequence(expected, axes.cp, self._plan.context)
        if found.shape != expected.shape:
            raise ValueError(f"its output {list(found.shape)} has no place in {list(expected.shape)}")
        differs = torch.tensor([float(difference(found, expected) > 1)], device=found.device)
        axes.world.all_reduce(differs, "probe").wait()
        return bool(differs)

    def _wrong_gradients(
        self,
        probe: Probe,
        other: Probe,
        divided: Divided,
        names: Sequence[str],
        length: int,
        axes: Axes,
        seed: int,
    ) -> list[str]:
        """Return the parameters whose gradients over ranks differ from one device's, in training mode.

        The loss is a sum of the output with fixed random factors, so that a rank's part of it is the sum over
        its part of the output. A model that draws random numbers beside dropout is not asked.
        """
        tokens = probe.inputs(length, seed)
        factors = _factors(probe, tokens) if names else None
        if factors is None:
            return []
        expected = self._gradients(probe, tokens, factors, names)
        part = local_sequence(tokens, axes.cp, self._plan.context)
        if axes.cp.size > 1 and factors.dim() > 1 and factors.shape[1] == length:
            factors = local_sequence(factors, axes.cp, self._plan.context)
        found = self._gradients(other, part, factors, names)
        largest = max((float(each.abs().max()) for each in expected.values() if each.numel()), default=0.0)
        differs = torch.zeros(len(names), device=probe.device)
        for number, name in enumerate(names):
            axes.cp.all_reduce(found[name], "probe").wait()
            if name not in divided.cuts:
                axes.tp.all_reduce(found[name], "probe").wait()
                is_sum = self._splits_stream or name in divided.narrowed
                found[name] /= 1 if is_sum else axes.tp.size
            cut = divided.cuts.get(name)
            right = expected[name] if cut is None else cut.of(expected[name])
            own = float(right.abs().max()) if right.numel() else 0.0
            limit = _OF_ITS_OWN * own + _OF_ALL * largest
            differs[number] = float((found[name] - right).abs().max() > limit) if right.numel() else 0.0
        axes.world.all_reduce(differs, "probe").wait()
        return [name for name, each in zip(names, differs.tolist(), strict=True) if each]

    def _gradients(
        self, probe: Probe, tokens: Tensor, factors: Tensor, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return the gradients of parameters; zeros if the output does not depend on one."""
        parameters = dict(probe.module.named_parameters())
        with probe.training():
            output = probe.call(tokens)
            split = _split_logits(output)
            found = first_floats(output if split is None else split.logits)
            if found.shape != factors.shape:
                raise ValueError(f"its output {list(found.shape)} has no place in {list(factors.shape)}")
            (found * factors).sum().backward()
        gradients = {}
        for name in names:
            gradient = parameters[name].grad
            parameters[name].grad = None
            gradients[name] = (
                torch.zeros_like(parameters[name]) if gradient is None else gradient.contiguous()
            )
        return gradients

    def _refused_gradients(self, names: Sequence[str], divided: Divided) -> UserError:
        plan, shown = self._plan, names[0]
        others = f", and so do those of {len(names) - 1} others" if len(names) > 1 else ""
        given = (
            f"{type(self._model).__name__} cannot be trained under {plan}: the gradient of {shown} over "
            f"ranks differs from one device's{others}"
        )
        whole = [name for name in names if name not in divided.cuts]
        if plan.cp == 1 and self._splits_stream:
            return PlanError(
                given,
                possible="tensor=plain, or a model in which only what the layout splits mixes the sequence, "
                "and whose other parameters work on a part of the sequence",
                change="add tensor=plain",
            )
        if plan.cp == 1 and whole:
            return ModelError(
                given,
                possible="parameters that work on all heads and features; in the layout's `partial` those "
                "that work on a rank's own",
                change=f"take {whole[0]!r} out of the TensorLayout's `partial`"
                if whole[0] in divided.narrowed
                else f"add {whole[0]!r} to the TensorLayout's `partial`",
            )
        return self._refused(f"differs from one device's in training, and so does the gradient of {shown}")

    def _refused(self, problem: str = "differs from one device's") -> UserError:
        name, plan = type(self._model).__name__, self._plan
        if plan.cp > 1:
            return ModelError(
                f"{name} cannot run under context parallelism: its output over ranks {problem}",
                possible="models in which attention alone mixes the sequence, by shoal's causal_attention or "
                "transformers' AttentionInterface, and positions are those of the whole sequence",
                change="leave out cp"
                + ("; if that does not help, add tensor=plain" if self._splits_stream else ""),
            )
        if not self._splits_stream:
            return ModelError(
                f"{name} cannot run under tensor parallelism: its output over ranks {problem}",
                possible="a TensorLayout whose layers are split by outputs and then by inputs, with only "
                "what treats heads and features apart between them",
                change="correct the model's TensorLayout, or leave out tp",
            )
        return PlanError(
            f"tensor={plan.tensor} splits the sequence of {name} between blocks, and its output over ranks "
            f"{problem}",
            possible="tensor=plain, or a model in which only what the layout splits mixes the sequence",
            change="add tensor=plain",
        )


def _unrecorded(axes: Axes) -> Axes:
    """Return the axes that a forward uses, without spans in the Timeline."""
    return replace(
        axes,
        world=axes.world.unrecorded(),
        cp=axes.cp.unrecorded(),
        tp=axes.tp.unrecorded(),
        sequence=axes.sequence.unrecorded(),
        ep=axes.ep.unrecorded(),
    )


def _require_few_gradients(probe: Probe, other: Probe, divided: Divided) -> list[str]:
    """Return the trained parameters whose gradients are compared, and make both copies compute only these.

    The smallest come first, as long as their gradients have room: what is divided wrongly in a large model is
    mostly a vector. Experts' gradients are not compared.
    """
    set_auxiliary_scale(probe.module, 0.0)
    set_auxiliary_scale(other.module, 0.0)
    sizes = {name: each.numel() for name, each in probe.module.named_parameters() if each.requires_grad}
    names, total = [], 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        total += sizes[name]
        if total <= LARGE and name not in divided.experts:
            names.append(name)
    for module in (probe.module, other.module):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in names)
    return [name for name in sizes if name in names]


def _factors(probe: Probe, tokens: Tensor) -> Tensor | None:
    """Return a random factor for each element of the output; None if that is random in training mode."""
    outputs = []
    for seed in (0, 1):
        with probe.training(seed=seed):
            outputs.append(first_floats(probe.call(tokens)).detach())
    if difference(*outputs) > 1:
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.randn(outputs[0].shape, generator=generator).to(probe.device)


def _split_logits(output: Any) -> SplitLogits | None:
    parts = tuple(output.values()) if isinstance(output, Mapping) else output
    for each in (
        output,
        getattr(output, "logits", None),
        *(parts if isinstance(parts, tuple | list) else ()),
    ):
        if isinstance(each, SplitLogits):
            return each
    return None

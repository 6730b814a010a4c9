"""Whether layers that are divided among ranks compute what one device does: a small forward tells.

Context parallelism is right where attention alone mixes a sequence and every position is counted from the
whole, and so is tensor parallelism that splits the sequence. No list of layers knows that of every model. So
all ranks run a copy of the model, first alone and then divided as the model will be, and compare the outputs.
Shoal's own transformer is not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from shoal.errors import ModelError, PlanError, UserError
from shoal.models import Transformer
from shoal.parallel.axes import Axes
from shoal.parallel.context.positions import local_sequence
from shoal.parallel.model_probe import Probe, cannot_probe, difference, first_floats, is_hugging_face
from shoal.parallel.tensor.vocabulary import SplitLogits
from shoal.plan import Plan

__all__ = ["DivisionProbe"]

_LENGTH = 16
"""Tokens of a sample, about; some models take no more, and attention may have a window."""

Divide = Callable[[nn.Module, Axes], None]
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
        if type(model) is not Transformer and (plan.cp > 1 or self._splits_stream):
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
                if self._differs(self._probe, lengths, axes, divide):
                    raise self._refused()
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

    def _share_values(self, probe: Probe, axes: Axes) -> None:
        """Give all ranks rank 0's values, as the model will have."""
        tensors = () if probe.is_new else (*probe.module.parameters(), *probe.module.buffers())
        for pending in [axes.world.broadcast(each.data, "probe") for each in tensors]:
            pending.wait()

    def _differs(
        self,
        probe: Probe,
        lengths: list[int],
        axes: Axes,
        divide: Divide,
    ) -> bool:
        other = probe.copy()
        divide(other.module, axes)
        for length in lengths:
            try:
                # Rounding may send a token to another expert, but not for other tokens as well.
                return all(self._differs_at(probe, other, length, axes, seed) for seed in (0, 1))
            except PlanError:  # a window that is shorter: the forward says so, with the user's lengths
                continue
            except UserError:
                raise
            except Exception as error:
                if is_hugging_face(self._model):
                    raise self._refused(f"raises {type(error).__name__}: {error}") from error
                self._unknown = error
                return False
        return False

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


def _split_logits(output: Any) -> SplitLogits | None:
    for each in (output, getattr(output, "logits", None)):
        if isinstance(each, SplitLogits):
            return each
    return None

"""One forward's batch from the user's data: the model's inputs, the targets, and the loss.

===========================  ==============================  =======================================
a batch that is              the model gets                  the loss is
===========================  ==============================  =======================================
a pair, or a longer tuple    all but the last                `loss(output, last)`
a pair with `Packed` inputs  its tokens and `position_ids`   `loss(output, last)`
a mapping with `labels`      the mapping, by keywords        the output's `loss`
the same, and a `loss`       the rest of it, by keywords     `loss(output, labels)`
a mapping without `labels`   the mapping, by keywords        the output's, or `loss(output, mapping)`
anything else                it                              the output's, or `loss(output, it)`
===========================  ==============================  =======================================

If the first of a pair is a mapping, it is passed by keywords; if it is a tuple or a list, as several
arguments. The `loss` of pairs is `next_token_loss` by default.

Context parallelism cuts what is as long as a sample, except `position_ids`: a model gets those of the whole
sample, and with them its documents.

To `next_token_loss` the auxiliary loss is added that a mixture of experts of Hugging Face returns, `aux_loss`
times the model's coefficient, as the model adds it to its own loss; one's own `loss` gets it in the output.

A causal model of Hugging Face computes its own loss of `labels` from whole sequences and whole logits. If a
Plan cuts these, the labels are shifted here, and `next_token_loss` computes an equal loss from the parts.

The number of elements in a mean loss: integer targets count if they are not -100, except the first label of a
sample if the model's own loss leaves it out; with all other targets each sample counts as one. `counted`
overrides this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn

from shoal.data import Packed
from shoal.errors import ModelError
from shoal.models import next_token_loss
from shoal.models.loss import IGNORED, cross_entropy
from shoal.models.nested import map_tensors, tensors_in
from shoal.parallel import Parallel
from shoal.parallel.documents import DocumentsGuard
from shoal.parallel.loss_probe import ignores_first_label

_MASK = "attention_mask"
_POSITIONS = "position_ids"

Loss = Callable[[Any, Any], torch.Tensor]
"""A function from the model's output and the targets to the mean loss of a micro-batch."""

Counted = Callable[[Any], Any]
"""A function from the targets, or a batch that is a mapping, to the number of elements in its mean loss."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What is trained on, and how it is read.

    Attributes:
        samples: Samples, or a map-style dataset.
        sequence: Tokens of a sample; with it, pipeline stages are cut so that activations fit the devices.
        workers: Processes that prepare data on each rank; see `shoal.data.open_feed`.
        counted: A function from the targets of a micro-batch, or from the micro-batch if it is a mapping, to
            the number of elements in its mean loss. By default integer targets count that are not -100; with
            others, each sample counts as one.
    """

    samples: Any
    sequence: int | None = None
    workers: int = 0
    counted: Counted | None = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward.

    Attributes:
        arguments: Positional arguments of the model.
        named: Keyword arguments of the model.
        targets: Argument of the loss beside the output; None if the output holds its loss.
        loss: Function of the output and the targets; None if the output holds its loss.
        counted: Number of elements in the mean loss.
        may_differ: Whether another micro-batch may count another number.
    """

    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    targets: Any
    loss: Loss | None
    counted: float
    may_differ: bool

    @property
    def first(self) -> torch.Tensor | None:
        """Return the first tensor that the model gets: `input_ids`, if there is one."""
        ids = self.named.get("input_ids")
        if isinstance(ids, torch.Tensor):
            return ids
        return next(tensors_in((self.arguments, self.named)), None)

    @property
    def tokens(self) -> int:
        """Number of elements of that tensor."""
        return 0 if self.first is None else self.first.numel()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """Return the micro-batch with the function's result in place of each tensor."""
        arguments, named, targets = map_tensors(function, (self.arguments, self.named, self.targets))
        return replace(self, arguments=arguments, named=named, targets=targets)

    def mean_loss(self, output: Any) -> torch.Tensor:
        """Return the mean loss over the elements that count.

        Raises:
            ModelError: The output should hold its loss, and does not.
        """
        if self.loss is not None:
            return self.loss(output, self.targets)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor):
            raise ModelError(
                f"the model gave a {type(output).__name__} without a loss",
                possible="a batch with `labels`, for a model that computes its loss from them, or a loss "
                "function of the output",
                change="put labels into the batch, or give loss= to the Trainer",
            )
        return loss


@final
class Reader:
    """Make MicroBatches from batches of data.

    Args:
        model: The model, before it is laid over ranks.
        loss: The user's loss; None for the default.
        counted: The user's count of elements; None for the default.
        packed: Whether the data says that it holds documents that are kept apart.
        sequence: Tokens of a sample, if they are known.

    Raises:
        ModelError: The data holds such documents, and the model does not keep them apart.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        counted: Counted | None,
        *,
        packed: bool = False,
        sequence: int | None = None,
    ) -> None:
        self._loss = loss
        self._coefficient = auxiliary_coefficient(model)
        self._next_token_loss: Loss = partial(self._with_auxiliary, next_token_loss)
        self._counted = counted
        self._shifts = _shifts_labels(model)
        if loss is None and counted is None and (asked := ignores_first_label(model)) is not None:
            self._is_first_left_out = asked
            self._shifts &= asked  # decoders such as BART's do not, whatever their loss is called
        else:
            self._is_first_left_out = self._shifts
        self._name = type(model).__name__
        self._takes = inspect.signature(model.forward)
        self._documents, self._is_hugging_face = DocumentsGuard(model), hasattr(model, "loss_type")
        if packed:
            self._documents.require(is_promised=True, length=sequence or 1)

    def compile_loss(self, compile: Callable[[Any], Any]) -> None:
        """Compute the loss of next tokens by a compiled function; a loss of the user stays as it is."""
        loss = partial(next_token_loss, cross_entropy=compile(cross_entropy))
        self._next_token_loss = partial(self._with_auxiliary, loss)

    @property
    def is_default_loss(self) -> bool:
        """Whether the loss is not the user's."""
        return self._loss is None

    def read(self, batch: Any, parallel: Parallel, samples: int, *, all_count: bool) -> MicroBatch:
        """Return the micro-batch, cut to this rank's part of the sequences.

        Args:
            batch: A batch of the data, on the host.
            parallel: The model as it is laid over the ranks.
            samples: Number of samples that it holds.
            all_count: Whether the data says that no target is -100.

        Raises:
            ModelError: The model's forward does not take what the batch holds.
        """
        plan = parallel.plan
        arguments, named, targets, loss = self._parts(batch, is_cut=plan.tp * plan.cp * plan.pp > 1)
        self._require_taken(arguments, named)
        may_drop = parallel.axes.cp.size > 1 or _POSITIONS in named
        if may_drop and self._is_hugging_face and _is_all_ones(named.get(_MASK)):
            # It says nothing, and transformers looks for documents only in batches without a mask.
            named = {**named, _MASK: None}
        self._require_documents(batch, named)
        if parallel.axes.cp.size > 1:
            arguments, named, targets = parallel.local_sequence((arguments, named, targets))
            batch = parallel.local_sequence(batch)
        count = self._count(batch, targets, loss)
        if count is None or (all_count and self._counted is None):
            return MicroBatch(arguments, named, targets, loss, samples, may_differ=False)
        return MicroBatch(arguments, named, targets, loss, count, may_differ=True)

    def _with_auxiliary(self, loss: Loss, output: Any, targets: Any) -> torch.Tensor:
        """Add the auxiliary loss of routers, as a model of transformers adds it to its own loss."""
        value, auxiliary = loss(output, targets), getattr(output, "aux_loss", None)
        if not isinstance(auxiliary, torch.Tensor):
            return value
        if self._coefficient is None:
            raise ModelError(
                f"{self._name} returns an aux_loss, and nothing says by which coefficient it counts",
                possible="router_aux_loss_coef of the model or of its configuration, or a loss of your own",
                change="set router_aux_loss_coef on the model, or give loss= to the Trainer",
            )
        return value + self._coefficient * auxiliary

    def _parts(self, batch: Any, *, is_cut: bool) -> tuple[tuple[Any, ...], dict[str, Any], Any, Loss | None]:
        if isinstance(batch, (tuple, list)) and len(batch) > 1 and not hasattr(batch, "_fields"):
            *inputs, targets = batch
            loss = self._next_token_loss if self._loss is None else self._loss
            first = inputs[0]
            if len(inputs) == 1 and isinstance(first, Packed):
                return (first.tokens,), {_POSITIONS: first.position_ids}, targets, loss
            if len(inputs) == 1 and isinstance(first, Mapping):
                return (), dict(first), targets, loss
            if len(inputs) == 1 and isinstance(first, (tuple, list)):
                return tuple(first), {}, targets, loss
            return tuple(inputs), {}, targets, loss
        if isinstance(batch, Mapping):
            rest = {key: value for key, value in batch.items() if key != "labels"}
            labels = batch.get("labels")
            if labels is None:
                return (), rest, None if self._loss is None else batch, self._loss
            if self._loss is not None:
                return (), rest, labels, self._loss
            if is_cut and self._shifts:
                return (), rest, F.pad(labels, (0, 1), value=IGNORED)[..., 1:], self._next_token_loss
            return (), dict(batch), None, None
        if isinstance(batch, (tuple, list)) and len(batch) == 1:
            batch = batch[0]
        return (batch,), {}, None if self._loss is None else batch, self._loss

    def _require_taken(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        try:
            self._takes.bind(*arguments, **named)
        except TypeError as error:
            by_place = f"{len(arguments)} by place" if arguments else ""
            raise ModelError(
                f"{self._name} cannot be called with what the batch holds ({', '.join(named) or by_place}): "
                f"{error}",
                possible=f"{self._name}.forward{self._takes}",
                change="give batches with these inputs: pairs of inputs and targets, or mappings from "
                "argument names of the forward; a collate function of shoal.data.MapSamples can make them",
            ) from None

    def _require_documents(self, batch: Any, named: Mapping[str, Any]) -> None:
        """Check that the model keeps documents apart if the batch holds several in a sample."""
        positions = named.get(_POSITIONS)
        mask = named.get(_MASK)
        if not isinstance(positions, torch.Tensor):
            return
        if mask is not None:
            if self._is_hugging_face and _has_documents(positions, mask):
                raise ModelError(
                    f"{self._name} was given position_ids that begin anew in a sample, and an attention_mask "
                    "with padding, with which it does not keep documents apart",
                    possible="packed documents without attention_mask, or one document in a sample with it",
                    change="leave out attention_mask; let padding begin anew too, with labels of -100",
                )
            return
        is_promised = not isinstance(batch, Mapping) and isinstance(batch[0], Packed)
        if is_promised or (positions.dim() == 2 and bool((positions.diff() < 0).any())):
            self._documents.require(is_promised=is_promised, length=positions.shape[-1])

    def _count(self, batch: Any, targets: Any, loss: Loss | None) -> float | None:
        """Return how many elements count; None if each sample counts as one."""
        if self._counted is not None:
            return float(self._counted(batch if isinstance(batch, Mapping) else targets))
        counted = targets
        if loss is None and isinstance(batch, Mapping):
            counted = batch.get("shift_labels")
            if counted is None:
                counted = batch.get("labels")
                if self._is_first_left_out and isinstance(counted, torch.Tensor) and counted.dim() > 1:
                    counted = counted[..., 1:]
        if not isinstance(counted, torch.Tensor) or not _is_integer(counted):
            return None
        return float((counted != IGNORED).sum())


def _is_all_ones(mask: Any) -> bool:
    """Return whether it is a mask `[batch, seq]` that hides nothing."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask == 1).all())


def _has_documents(positions: torch.Tensor, mask: Any) -> bool:
    """Return whether positions begin anew among tokens that a mask `[batch, seq]` does not hide."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or positions.shape != mask.shape:
        return False
    is_seen = mask != 0
    return bool(((positions.diff() < 0) & is_seen[:, 1:] & is_seen[:, :-1]).any())


def auxiliary_coefficient(model: Any) -> float | None:
    """Return what a model of transformers multiplies its auxiliary loss by; None if it does not say."""
    config = getattr(model, "config", None)
    for holder in (model, config, getattr(config, "text_config", None)):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if isinstance(value := getattr(holder, name, None), (int, float)):
                return float(value)
    return None


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _shifts_labels(model: nn.Module) -> bool:
    """Return whether it is a model of transformers that predicts each label from the tokens before it."""
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "loss_type") or getattr(config, "is_encoder_decoder", False):
        return False
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"

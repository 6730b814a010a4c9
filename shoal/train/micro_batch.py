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

Whether a user's loss of whole samples is the mean of its losses of parts: asked before the first step.

Context parallelism gives a rank a part of each sample. A loss that shifts the targets by itself, sums, or
weighs classes is another one then. So it is computed of random outputs in the form of the model's: once of
whole samples, and once of each rank's part, weighed by the targets that count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data import Packed, Samples, fetch, key_of
from shoal.data.permutation import generators_put_aside
from shoal.errors import ModelError
from shoal.models import next_token_loss
from shoal.models.loss import IGNORED, cross_entropy
from shoal.models.task import map_tensors, tensors_in
from shoal.parallel import Parallel
from shoal.parallel.context.positions import local_sequence, whole_sequence
from shoal.parallel.division_probe import ignores_first_label
from shoal.parallel.documents import DocumentsGuard
from shoal.parallel.pipeline.outputs import plain_output
from shoal.record import NullRecorder, Recorder
from shoal.spec.timeline import Kind, Lane

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


@final
class Inputs:
    """Move micro-batches to a device, on a GPU by a stream of their own.

    The copies run beside the compute that the device still has to do, from pinned memory: from ordinary
    memory the driver copies at a twentieth of the rate, and the host waits for it.

    Args:
        device: Device on which this rank computes.
        recorder: Recorder of the spans of copies, and on a GPU of compute's wait for them.
    """

    def __init__(self, device: torch.device, recorder: Recorder | None = None) -> None:
        self._device = device
        self._recorder = NullRecorder() if recorder is None else recorder
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def move(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch on the device; work that is enqueued from now on may use it."""
        if self._stream is None:
            with self._recorder.span(Kind.COPY, "inputs"):
                return micro_batch.map(lambda tensor: tensor.to(self._device, non_blocking=True))
        current = torch.cuda.current_stream(self._device)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu":
                return tensor
            # torch's allocator keeps the pinned copy until the device has read it, and uses it again.
            copy = tensor.pin_memory().to(self._device, non_blocking=True)
            copy.record_stream(current)  # its memory is not given away while that stream uses it
            return copy

        copying = self._recorder.span(Kind.COPY, "inputs", lane=Lane.COPY)
        with torch.cuda.stream(self._stream), copying:
            moved = micro_batch.map(copied)
        with self._recorder.span(Kind.DATA_WAIT, "inputs"):
            current.wait_stream(self._stream)
        return moved


_EQUAL = 1e-4
"""Rounding moves a mean in fp32 by less than this share of it."""


def require_divided_loss(parallel: Parallel, reader: Reader, samples: Samples[Any], seed: int) -> None:
    """Check a user's loss on the first sample, if context parallelism cuts it; all ranks call this together.

    A loss that cannot be computed of random outputs passes.

    Args:
        parallel: The model as it is laid over the ranks.
        reader: Makes micro-batches, with the loss.
        samples: The samples.
        seed: The run's seed.

    Raises:
        ModelError: The loss of parts differs from that of whole samples.
    """
    axes, device, plan = parallel.axes, parallel.device, parallel.plan
    if axes.cp.size == 1 or reader.is_default_loss:
        return
    was_training = parallel.module.training
    parallel.module.eval()
    with generators_put_aside(), torch.no_grad():
        batch = fetch(samples, np.arange(1), lambda: [key_of(seed, 0, 0)])
        read = Inputs(device).move(reader.read(batch, parallel, 1, all_count=False))
        output = plain_output(parallel.evaluate(*read.arguments, **read.named))
    parallel.module.train(was_training)
    length = 0 if read.first is None or read.first.dim() < 2 else read.first.shape[1]

    def is_part(tensor: Tensor) -> bool:
        return tensor.dim() > 1 and tensor.shape[1] == length

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        shape = list(tensor.shape)
        if is_part(tensor):
            shape[1] *= axes.cp.size
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)

    def gathered(tensor: Tensor) -> Tensor:
        return whole_sequence(tensor.contiguous(), axes.cp, plan.context) if is_part(tensor) else tensor

    def own(tensor: Tensor) -> Tensor:
        is_whole = tensor.dim() > 1 and tensor.shape[1] == length * axes.cp.size
        return local_sequence(tensor, axes.cp, plan.context) if is_whole else tensor

    differs = torch.zeros(1, device=device)
    if output is not None and read.loss is not None:
        whole, targets = map_tensors(drawn, output), map_tensors(gathered, read.targets)
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        expected = torch.zeros((), dtype=torch.float64, device=device)
        with generators_put_aside(), torch.no_grad():
            try:
                expected += read.loss(whole, targets)
                part = read.loss(map_tensors(own, whole), read.targets) if read.counted else 0.0
                sums[0] += part * read.counted
                sums[1] += read.counted
            except Exception:  # the loss takes no such outputs
                sums[2] = 1.0
        axes.cp.all_reduce(sums, "probe").wait()
        found = sums[0] / sums[1]
        differs += float(not sums[2] and abs(found - expected) > _EQUAL * abs(expected))
    axes.world.all_reduce(differs, "probe").wait()
    if differs:
        raise ModelError(
            f"cp={axes.cp.size} was given, and the loss of parts of a sample differs from that of the whole",
            possible="a loss that is the mean over positions, of targets that are already shifted; with "
            "counted=, if it does not count the targets that are not -100 alike",
            change="shift the targets in the data, give counted= for weights, or leave out cp",
        )

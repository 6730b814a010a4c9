"""A model laid over the ranks, as the one who trains it sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn, final

import torch
from torch import nn

from shoal.errors import LayoutError, TrainingError
from shoal.models import logits_of
from shoal.models.dropout import Dropout, token_keys
from shoal.models.experts import set_auxiliary_scale
from shoal.parallel.access import refuse_copies
from shoal.parallel.axes import Axes
from shoal.parallel.context.positions import local_sequence, residual_positions
from shoal.parallel.data.strategy import Strategy
from shoal.parallel.layout import Cut
from shoal.parallel.micro_batches import run_one_by_one
from shoal.parallel.optimizer.norm import gradient_norm, scale_gradients
from shoal.parallel.optimizer.optimizers import follow_optimizers
from shoal.parallel.owned import fixed_parameters
from shoal.parallel.pipeline.runtime import Loss, MicroBatch, Pipeline
from shoal.parallel.state import State
from shoal.parallel.whole import Whole
from shoal.plan import Plan, SettledPlan

__all__ = ["Parallel"]


@final
class Parallel(nn.Module):
    """A model laid over the ranks; `shoal.parallelize` makes one.

    It is used like the model. After `backward()` the gradients of `parameters()` are averages over all
    data-parallel ranks; after the optimizer's step the next call computes with the new weights. Its
    parameters and its `state_dict()` have the model's names and shapes, in fp32; what ranks share are
    DTensors cut along their first dim, as FSDP2 has them.

    Attributes:
        module: The model. Its own parameters are what computes; they are up to date within `gathered()`.
        plan: The Plan that was applied; its `split` says how many blocks each pipeline stage has.
        axes: The groups that it communicates over.
        owned: What this rank owns, with where it lies in the whole parameters.
        frozen: What this rank has of the parameters that are not trained.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        axes: Axes,
        strategies: Sequence[Strategy],
        *,
        whole: Whole,
        cuts: Mapping[str, Cut],
        device: torch.device,
        pipeline: Pipeline | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.plan = plan
        self.axes = axes
        self.owned = [owned for strategy in strategies for owned in strategy.owned]
        self.frozen = [frozen for strategy in strategies for frozen in strategy.frozen]
        self._whole = whole
        self._cuts = cuts
        self._strategies = strategies
        self._state = State(module, whole, self.owned, self.frozen, cuts, axes)
        self._pipeline = pipeline
        self._device = device
        self._fixed = fixed_parameters(module, self.frozen)
        self._has_dropout = hasattr(module, "dropout_keys") and any(
            isinstance(layer, Dropout) and layer.p > 0 for layer in module.modules()
        )
        follow_optimizers(module, self.owned, self.changed)
        computing = set(module.parameters())
        if not all(owned.parameter in computing for owned in self.owned):
            refuse_copies(module, self._stale)
        self.set_micro_batches(1)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward.

        In a pipeline it gives no gradients; the last stage gives its output, a tensor, to all ranks.

        Raises:
            TrainingError: Gradients were asked for in a pipeline.
        """
        if self._pipeline is not None and torch.is_grad_enabled():
            raise TrainingError(
                f"the Plan {self.plan} has a pipeline, whose forwards and backwards take turns: call "
                "forward_backward(...) in place of the model, or the model within torch.no_grad()"
            )
        if self._pipeline is not None:
            output = self.evaluate(*inputs, **named)
            return self._pipeline.broadcast(None if output is None else logits_of(output))
        return self.module(*inputs, **named)

    @torch.no_grad()
    def evaluate(self, *inputs: Any, **named: Any) -> Any:
        """The model's output without gradients; in a pipeline where the last stage is, and None elsewhere."""
        if self._pipeline is None:
            return self.module(*inputs, **named)
        return self._pipeline.forward(*inputs)

    def forward_backward(
        self,
        micro_batches: Iterator[MicroBatch],
        count: int,
        loss: Loss,
        prepare: Callable[[int, Any], None] = lambda number, inputs: None,
    ) -> torch.Tensor:
        """Makes forward and backward of all micro-batches of a step, as the Plan's schedule orders them.

        Args:
            micro_batches: Pairs of what the model gets and the targets of its output.
            count: How many to take.
            loss: From the model's output and the targets to the mean loss of a micro-batch.
            prepare: Called before each forward with the micro-batch's number and what the model gets.

        Returns:
            The mean loss of this rank's micro-batches; in a pipeline 0 where the last stage is not.
        """
        self.set_micro_batches(count)
        if self._pipeline is not None:
            return self._pipeline.run(micro_batches, count, loss, prepare)

        def forward(number: int, inputs: Any, targets: Any) -> torch.Tensor:
            prepare(number, inputs)
            return loss(self(inputs), targets)

        forwards = (partial(forward, number, *pair) for number, pair in enumerate(micro_batches))
        return run_one_by_one(forwards, count, self.accumulate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank's optimizer changes, and what is not trained, with the names that the model has.

        Args:
            prefix: Put before the names.
            recurse: Whether those of the model too; it has all of them.
            remove_duplicate: Of a parameter with several names only the first is given, whatever this says.
        """
        if not recurse:
            return
        prefix = prefix + "." if prefix else ""
        here = {**self._fixed, **{each.name: each.parameter for each in self.owned}}
        for name in self._whole.parameters:
            if name in here:
                yield prefix + name, here[name]

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        """This rank's part of the model by its names: trained parameters in fp32, as the optimizer has them.

        What ranks share are DTensors, which `torch.distributed.checkpoint` saves and loads. In a pipeline
        each rank has the tensors of its stages.

        Args:
            destination: A dict to put it into; a new one by default.
            prefix: Put before the names.
            keep_vars: Has no meaning here: tensors are detached, in the memory where training keeps them.

        Raises:
            ModelError: Tensor or expert parallelism cuts parameters; see `full_state_dict`.
        """
        state = {} if destination is None else destination
        state.update({prefix + key: tensor for key, tensor in self._state.named().items()})
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes up whole tensors, or what `state_dict` gave; changes nothing if one does not fit.

        Args:
            state_dict: By the model's names; all of them on every rank, in a pipeline too.
            strict: Whether names have to be the same.
            assign: Must be False: training keeps its tensors where they are.

        Returns:
            `missing_keys` and `unexpected_keys`, as of any module.

        Raises:
            ModelError: A tensor has another shape, or names differ and `strict` is set.
            LayoutError: `assign` was given.
        """
        if assign:
            raise LayoutError(
                "load_state_dict was given assign=True, which would replace tensors that ranks share",
                possible="assign=False: values are copied to where training keeps them",
                change="leave out assign",
            )
        missing, unexpected = self._state.load(state_dict, strict=strict)
        self.changed()
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes up a whole `state_dict` of the model, such as `full_state_dict` gave; all ranks call it.

        Args:
            state: On rank 0 the whole model; what other ranks give is not looked at.

        Raises:
            ModelError: Names or shapes are not the model's; nothing is changed then.
        """
        self._state.load_from_first(state)
        self.changed()

    def requires_grad_(self, requires_grad: bool = True) -> Parallel:
        """Trains all parameters from now on, or none."""
        for parameter in (*self.parameters(), *self.module.parameters()):
            parameter.requires_grad_(requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Parallel:
        """Itself, if it is there already.

        Raises:
            LayoutError: It is to go to another device, or to get another type.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is None and (device is None or torch.device(device).type == self._device.type):
            return self
        return self._apply(None)

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise LayoutError(
            "a model that is laid over ranks was to change its device or its types",
            possible="a move before shoal.parallelize; for bf16, precision=bf16 in the Plan",
            change="move or cast the model before it is laid out",
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
            if not hasattr(model, name):
                raise
        raise AttributeError(
            f"Parallel has no attribute {name!r}; the model has: module.{name}. If torch's "
            "get_model_state_dict looked for it: call state_dict(), or shoal.save with an optimizer"
        )

    def __deepcopy__(self, memory: dict[int, Any]) -> NoReturn:
        raise LayoutError(
            "a model that is laid over ranks was to be copied or pickled, and it stands for process groups",
            possible="clones of named_parameters() for an average; full_state_dict() for a whole model",
            change="take one of these",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__deepcopy__({})

    def saved_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of the `state_dict`, as this rank has them."""
        return self._whole.buffers_of(self.module)

    def buffers_to_save(self) -> dict[str, torch.Tensor]:
        """The buffers of which this rank is the one to save them."""
        return {name: each for name, each in self.saved_buffers().items() if name in self._whole.mine}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within it the caller changes no weights, so that several forwards need not gather them anew."""
        with ExitStack() as stack:
            for strategy in self._strategies:
                stack.enter_context(strategy.unchanged())
            yield

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """For all micro-batches of a step but the last: backward adds to the gradients.

        Replicated and ZeRO-1 communicate nothing within it.
        """
        with ExitStack() as stack:
            for strategy in self._strategies:
                stack.enter_context(strategy.accumulate())
            yield

    def set_micro_batches(self, number: int) -> None:
        """Says over how many micro-batches the caller averages the loss of a step; at first it is one.

        A model's auxiliary losses, such as a router's, begin their own backward, and are scaled alike. Where
        tensor parallelism splits the sequence, each rank adds its part of a sum to them.
        """
        split = self.axes.sequence.size // self.axes.cp.size
        set_auxiliary_scale(self.module, 1 / (number * split))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, also those within a step that is given up between its micro-batches.

        After a whole step the optimizer's own `zero_grad` does as much.

        Args:
            set_to_none: Gradients become None whatever this says.
        """
        if self._pipeline is not None:
            self._pipeline.clear()
        for strategy in self._strategies:
            strategy.clear()
        for owned in self.owned:
            owned.give(None)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Bring every parameter of `module` up to date while it lasts, and whole, except what tp and ep cut.

        All ranks enter it together.
        """
        with ExitStack() as stack:
            for strategy in self._strategies:
                stack.enter_context(strategy.gathered())
            yield

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model as `module.state_dict()` names it, under any Plan; all ranks call it together.

        A device holds one whole parameter at a time, rank 0's host all of them. Each is summed over all
        ranks, so this is for an export now and then, not for every step.

        Returns:
            On rank 0 copies on the CPU, of trained parameters in fp32, as the optimizer has them; on other
            ranks nothing.
        """
        keeps = self.axes.world.index == 0
        state = {}
        parts = self._whole.gather(
            self.module, self.owned, self.frozen, self._cuts, self.axes.world, self._device
        )
        for key, tensor in parts:
            if keeps:
                state[key] = tensor.to("cpu", copy=True)
        return state

    def changed(self) -> None:
        """To be called after owned parameters were changed other than after a backward."""
        for strategy in self._strategies:
            strategy.changed()

    def local(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a batch `[batch, ...]` that all ranks have.

        Raises:
            PlanError: The batch does not divide.
        """
        SettledPlan.of(self.plan.replace(microbatch=None), len(batch))
        return batch.chunk(self.axes.dp.size)[self.axes.dp.index]

    def local_sequence(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of `[batch, seq, ...]` along the sequence: what context parallelism cuts.

        Tokens and targets are cut alike, after targets were shifted.

        Raises:
            PlanError: The sequence does not divide.
        """
        return local_sequence(tensor, self.axes.cp, self.plan.context)

    def set_dropout(self, seed: int, samples: torch.Tensor, inputs: torch.Tensor) -> None:
        """Fixes the masks of dropout in the next forward, so that they do not depend on the layout.

        Only of models that take keys, as Shoal's do; in others dropout draws from torch's generator.

        Args:
            seed: Of the training.
            samples: Where the samples of the forward stand in all data, `[batch]`, int64.
            inputs: What the forward will get, `[batch, seq / cp]`.
        """
        if self._has_dropout:
            part = inputs.shape[1] * self.axes.cp.size // self.axes.sequence.size
            positions = residual_positions(part, self.axes, self.plan.context, samples.device)
            self.module.dropout_keys = token_keys(seed, 0, samples, positions)

    def gradient_norm(self) -> float:
        """The Euclidean norm of the whole averaged gradient; the same on every rank."""
        return gradient_norm(self.owned, self.axes.parts, self._device)

    def clip_gradients(self, limit: float) -> float:
        """Scales the whole gradient down to the norm `limit` if it is above it.

        Returns:
            The norm before.
        """
        norm = self.gradient_norm()
        if norm > limit:
            scale_gradients(self.owned, limit / norm)
        return norm

    def _stale(self) -> str | None:
        return next((each.stale for each in self._strategies if each.stale is not None), None)

"""A model laid over the ranks, with the interface for training it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Self, final

import torch
from torch import nn

from shoal.errors import LayoutError, TrainingError
from shoal.models.dropout import Dropout, token_keys
from shoal.parallel.axes import Axes
from shoal.parallel.context.positions import local_sequences, residual_positions
from shoal.parallel.data.strategy import Strategy, in_all
from shoal.parallel.full_state import State, Whole
from shoal.parallel.local_shards import Cut, fixed_parameters, require_trained
from shoal.parallel.micro_batches import (
    Arguments,
    AuxiliaryLosses,
    Batch,
    own_rows,
    require_step,
    run_one_by_one,
)
from shoal.parallel.offload.storage import Storage
from shoal.parallel.optimizer.optimizers import (
    GradientNorm,
    StepCount,
    follow_optimizers,
    limit_gradients,
    measure_gradient,
)
from shoal.parallel.pipeline.messages import MicroBatch
from shoal.parallel.pipeline.runtime import Loss, Pipeline
from shoal.parallel.weight_hooks import answer_as_model, mark_laid_out, refuse_copies
from shoal.spec.plan import Plan


class ModelFace(nn.Module):
    """A module around a model, with the model's names; it cannot be moved, cast, copied or pickled.

    Args:
        module: The model.
        device: This rank's device.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.device = device

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model, with the name `prefix`, and the modules within it, as the model itself does.

        The names fit those of `named_parameters()`. In a pipeline other stages' parts are placeholders.
        """
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model's own children with their names, as the model itself does."""
        yield from self.module.named_children()

    def train(self, mode: bool = True) -> Self:
        """Set the model to training or evaluation; return this object."""
        self.training = mode
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function with each module of the model, and with the model; return this object."""
        self.module.apply(fn)
        return self

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its name in `named_modules()`."""
        return self.module.get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return this rank's part of a parameter by its name in `named_parameters()`.

        Raises:
            AttributeError: This rank has none with the name.
        """
        for name, parameter in self.named_parameters():
            if name == target:
                return parameter
        raise AttributeError(f"this rank has no part of a parameter with the name {target!r}")

    def get_buffer(self, target: str) -> torch.Tensor:
        """Return a buffer of the model by its name."""
        return self.module.get_buffer(target)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model itself, if it already has the device and type.

        Raises:
            LayoutError: It would move to another device, or get another type.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is None and (device is None or torch.device(device).type == self.device.type):
            return self
        return self._apply(None)

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise LayoutError(
            "a model that is laid over ranks cannot change its device or its types",
            possible="a move before shoal.parallelize; for bf16, precision=bf16 in the Plan",
            change="move or cast the model before shoal.parallelize",
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
            if not hasattr(model, name):
                raise
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}; the model has it as module.{name}. If torch's "
            "get_model_state_dict looked for it, call state_dict(), or shoal.save with an optimizer"
        )

    def __deepcopy__(self, memory: dict[int, Any]) -> NoReturn:
        raise LayoutError(
            "a model that is laid over ranks cannot be copied or pickled: it holds process groups",
            possible="for an average, clones of named_parameters(); for a whole model, full_state_dict()",
            change="use one of these",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__deepcopy__({})


@final
class Parallel(ModelFace):
    """A model laid over the ranks; `shoal.parallelize` makes one.

    Use it like the model. After `backward()` the gradients of `parameters()` are averages over all
    data-parallel ranks; after the optimizer's step the next call computes with the new weights. Its
    parameters and its `state_dict()` have the model's names and shapes, in fp32; parameters that ranks share
    are DTensors cut along their first dim, as in FSDP2.

    Attributes:
        module: The model. Its own parameters do the computing; they are up to date within `gathered()`.
        plan: The Plan that was applied; its `split` says how many blocks each pipeline stage has.
        axes: The groups over which it communicates.
        owned: This rank's parts of the trained parameters, with their place in the whole parameters.
        frozen: This rank's parts of the parameters that are not trained.
        device: This rank's device.
        strategies: One for each stage of this rank.
        storage: Where state is kept outside of the device; None if all is on it.
        loads: How often this rank loaded values of each trained parameter, by name; whoever loads counts.
        steps: Counts the steps of this rank's optimizers.
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
        storage: Storage | None = None,
    ) -> None:
        super().__init__(module, device)
        self.plan = plan
        self.axes = axes
        self.owned = [owned for strategy in strategies for owned in strategy.owned]
        self.frozen = [frozen for strategy in strategies for frozen in strategy.frozen]
        self._whole = whole
        self._cuts = cuts
        self.strategies = strategies
        self._state = State(module, whole, self.owned, self.frozen, cuts, axes)
        self.loads = self._state.loads
        self._pipeline = pipeline
        self.storage = storage
        self._fixed = fixed_parameters(module, self.frozen)
        dropouts = (layer.p for layer in module.modules() if isinstance(layer, Dropout))
        self._has_dropout = hasattr(module, "dropout_keys") and any(dropouts)
        self.steps = StepCount(strategies, is_stage=pipeline is not None)
        follow_optimizers(module, self.owned, self._fixed.items(), self.steps.note, axes)
        mark_laid_out(module)
        own = {owned.parameter for owned in self.owned}
        if plan.sharding.cuts_weights or not own <= set(module.parameters()):
            refuse_copies(module, self._stale)
            computing = dict(module.named_parameters())
            answer_as_model(module, {computing[each.name]: each.give for each in self.owned})
        self._auxiliary = AuxiliaryLosses(module, axes.sequence.size // axes.cp.size)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output.

        In a pipeline there are no gradients, and the last stage sends its output to all ranks.

        Raises:
            TrainingError: Gradients were asked for in a pipeline.
            ModelError: In a pipeline, the output holds something of every block, such as `hidden_states`.
        """
        if self._pipeline is not None and torch.is_grad_enabled():
            raise TrainingError(
                f"the Plan {self.plan} has a pipeline, whose forwards and backwards take turns: call "
                "forward_backward(...) instead of the model, or call the model within torch.no_grad()"
            )
        if self._pipeline is not None:
            return self._pipeline.broadcast(self.evaluate(*inputs, **named))
        return self._auxiliary.run(inputs, named)

    @torch.no_grad()
    def evaluate(self, *inputs: Any, **named: Any) -> Any:
        """Return the output without gradients; in a pipeline, None except on the last stage's rank."""
        if self._pipeline is None:
            return self.module(*inputs, **named)
        return self._pipeline.forward(Arguments(inputs, named))

    def forward_backward(
        self,
        micro_batches: Iterator[MicroBatch],
        count: int,
        loss: Loss,
        prepare: Callable[[int, Any], None] = lambda number, inputs: None,
    ) -> torch.Tensor:
        """Run forward and backward of all micro-batches of a step, in the order of the Plan's schedule.

        Args:
            micro_batches: Pairs of the model's inputs and the targets of its output. Inputs that are a
                mapping are passed by keywords; see `Arguments`. Their shapes may differ.
            count: Number of micro-batches to take.
            loss: A function from the model's output and the targets to the mean loss of a micro-batch.
            prepare: Called before each forward with the micro-batch's number and the model's inputs.

        Returns:
            The sum of its losses over `mean_of(count)`; in a pipeline 0 except on the last stage's rank.
        """
        require_step(self.plan, count, loss)
        mean_of = self.mean_of(count)

        def begin(number: int, inputs: Any) -> None:
            self.begin_micro_batch(number)
            prepare(number, inputs)

        def forward(number: int, inputs: Any, targets: Any) -> torch.Tensor:
            begin(number, inputs)
            return loss(Arguments.of(inputs, self.module.forward).give(self), targets)

        with self._auxiliary.dividing_by(mean_of):
            if self._pipeline is not None:
                return self._pipeline.run(micro_batches, count, loss, begin, mean_of=mean_of)
            forwards = (partial(forward, number, *pair) for number, pair in enumerate(micro_batches))
            return run_one_by_one(forwards, count, self.accumulate, mean_of=mean_of)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's trained and untrained parts of parameters, with the model's names.

        Args:
            prefix: Put before the names.
            recurse: Whether to include the parameters of the model; the object itself has none.
            remove_duplicate: Ignored: a parameter with several names is always given once, with the first.
        """
        if not recurse:
            return
        prefix = prefix + "." if prefix else ""
        here = {**self._fixed, **{each.name: each.parameter for each in self.owned}}
        for name in self._whole.parameters:
            if name in here:
                yield prefix + name, here[name]

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        """Return this rank's part of the model by its names; trained parameters in fp32.

        Parameters that ranks share are DTensors, which `torch.distributed.checkpoint` saves and loads. In a
        pipeline each rank has the tensors of its stages.

        Args:
            destination: A dict to fill; a new one by default.
            prefix: Put before the names.
            keep_vars: Ignored: tensors are detached, in the memory where training keeps them.

        Raises:
            ModelError: Tensor or expert parallelism cuts parameters; see `full_state_dict`.
        """
        state = {} if destination is None else destination
        state.update({prefix + key: tensor for key, tensor in self._state.named().items()})
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load whole tensors, or those of `state_dict`; change nothing if one does not fit.

        If the next backward finds other weights than before, it forgets what compression left out of earlier
        gradients.

        Args:
            state_dict: Tensors by the model's names; every rank gives all of them, in a pipeline too.
            strict: Whether names have to be the same.
            assign: Must be False: training keeps its tensors where they are.

        Returns:
            `missing_keys` and `unexpected_keys`, as for any module.

        Raises:
            ModelError: A tensor has another shape, or names differ and `strict` is set.
            LayoutError: `assign` was given.
        """
        if assign:
            raise LayoutError(
                "load_state_dict was given assign=True, which would replace tensors that ranks share",
                possible="assign=False, which copies values into the existing tensors",
                change="leave out assign",
            )
        self._expect_others()
        missing, unexpected = self._state.load(state_dict, strict=strict)
        self.changed()
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a whole `state_dict` of the model, such as one from `full_state_dict`; all ranks call it.

        What compression left out of earlier gradients is forgotten as in `load_state_dict`.

        Args:
            state: On rank 0 the whole model; the argument of other ranks is ignored.

        Raises:
            ModelError: Names or shapes are not the model's; then nothing is changed.
        """
        self._expect_others()
        self._state.load_from_first(state)
        self.changed()

    def requires_grad_(self, requires_grad: bool = True) -> Parallel:
        """Train all parameters from now on, or none; raise a LayoutError if none was trained before."""
        if requires_grad and self._pipeline is None:
            require_trained(self.owned)
        for each in (*self.parameters(), *self.module.parameters()):
            each.requires_grad_(requires_grad)
        return self

    def saved_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of the `state_dict`, as this rank has them."""
        return self._whole.buffers_of(self.module)

    def buffers_to_save(self) -> dict[str, torch.Tensor]:
        """Return the buffers that this rank saves."""
        return {name: each for name, each in self.saved_buffers().items() if name in self._whole.mine}

    def unchanged(self) -> AbstractContextManager[None]:
        """Promise not to change weights within it, so that several forwards need not gather them anew."""
        return in_all(strategy.unchanged() for strategy in self.strategies)

    def accumulate(self) -> AbstractContextManager[None]:
        """Make backward add to the gradients; use it for all micro-batches of a step except the last.

        Replicated data parallel and ZeRO-1 communicate nothing within it.
        """
        each = [strategy.accumulate() for strategy in self.strategies]
        return in_all([self._auxiliary.accumulating(), *each])

    def mean_of(self, number: int) -> float:
        """Return what to divide the sum of `number` losses of a step by; with shares, the mean over ranks."""
        if (shares := self.plan.shared) is None:
            return number
        return shares.mean_of(
            number, shares.most if self.plan.is_padded else shares.of_rank(self.axes.dp.index)
        )

    def set_micro_batches(self, number: int | None) -> None:
        """Set how many micro-batches this rank makes in a step: a model's auxiliary losses are divided by it.

        With None, as at first, they get the factor that the loop puts on `next_token_loss`.
        """
        self._auxiliary.divide_by(None if number is None else self.mean_of(number))

    def begin_micro_batch(self, number: int) -> None:
        """Tell the number of the next forward in its step: a padded rank's routers have no losses of more."""
        if self.plan.is_padded and (shares := self.plan.shared) is not None:
            self._auxiliary.begin_micro_batch(counts=number < shares.of_rank(self.axes.dp.index))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those of a step that was abandoned between its micro-batches.

        After a whole step the optimizer's own `zero_grad` is enough. Gradients always become None.
        """
        if self._pipeline is not None:
            self._pipeline.clear()
        for strategy in self.strategies:
            strategy.clear()
        for owned in self.owned:
            owned.give(None)

    def gathered(self) -> AbstractContextManager[None]:
        """Keep every parameter of `module` up to date while it lasts, and whole, except what tp and ep cut.

        All ranks enter it together.
        """
        gathered = in_all(strategy.gathered() for strategy in self.strategies)
        return self._state.writable(gathered) if self.plan.exchanged.keeps_values else gathered

    @property
    def chances_to_load(self) -> int:
        """How often `loads` may have grown, equal on all ranks."""
        return self._state.chances

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model, named as in `module.state_dict()`, under any Plan; all ranks call it.

        A device holds one whole parameter at a time, rank 0's host all of them. Each is summed over all
        ranks, so use this for an occasional export, not in every step.

        Returns:
            On rank 0, copies on the CPU, with trained parameters in fp32, as the optimizer has them; on other
            ranks an empty dict.
        """
        state = {}
        parts = self._whole.gather(
            self.module, self.owned, self.frozen, self._cuts, self.axes.world, self.device
        )
        for key, tensor in parts:
            if self.axes.world.index == 0:
                state[key] = tensor.to("cpu", copy=True)
        return state

    def set_step(self, steps: int) -> None:
        """Set the number of steps made, on which compression depends; backwards count it on."""
        for strategy in self.strategies:
            strategy.set_step(steps)

    def changed(self) -> None:
        """Report that owned parameters were changed other than after a backward; call it then."""
        for each in self.strategies:
            each.changed()

    def local(self, batch: Batch) -> Batch:
        """Return this rank's rows of a batch that all ranks have: a tensor `[batch, ...]`, or several.

        See `own_rows` for batches that are dicts, lists, tuples or dataclasses.

        Raises:
            PlanError: The batch does not divide.
            ModelError: Its tensors have different numbers of rows.
        """
        return own_rows(batch, self.plan, self.axes.dp)

    def local_sequence(self, batch: Batch) -> Batch:
        """Return this rank's part of `[batch, seq, ...]` along the sequence, as context parallelism cuts it.

        Tokens and targets are cut alike, after targets were shifted. See `local_sequences` for batches that
        are dicts, lists, tuples or dataclasses.

        Raises:
            PlanError: The sequence does not divide.
        """
        return local_sequences(batch, self.axes.cp, self.plan.context)

    def set_dropout(self, seed: int, samples: torch.Tensor, inputs: torch.Tensor) -> None:
        """Fix the dropout masks of the next forward, so that they do not depend on the layout.

        Works only for models that take keys, as Shoal's do; in others dropout draws from torch's generator.

        Args:
            seed: Seed of the training.
            samples: Positions of the forward's samples in all data, `[batch]`, int64.
            inputs: Input of the next forward, `[batch, seq / cp]`.
        """
        if self._has_dropout:
            part = inputs.shape[1] * self.axes.cp.size // self.axes.sequence.size
            positions = residual_positions(part, self.axes, self.plan.context, samples.device)
            self.module.dropout_keys = token_keys(seed, 0, samples, positions)

    def gradient_norm(self) -> float:
        """Return the norm of the whole averaged gradient; a `TrainingError` if ranks made unequal steps."""
        return self.steps.compared_norm(self.owned, self.axes.parts, self.device).item()

    def measure_gradient(self) -> GradientNorm:
        """Return the norms of the whole averaged gradient and of its parts, as they lie on the device."""
        return measure_gradient(self.owned, self.axes.parts, self.device)

    def clip_gradients(self, limit: float) -> float:
        """Scale the whole gradient down to the norm `limit` if it is larger; return the norm before that."""
        norm = self.steps.compared_norm(self.owned, self.axes.parts, self.device)
        limit_gradients(self.owned, norm, limit)
        return norm.item()

    def _expect_others(self) -> None:
        """Tell compressed exchanges that other weights are about to be loaded."""
        for strategy in self.strategies:
            for exchange in strategy.exchanges().values():
                exchange.expect_others()

    def _stale(self) -> str | None:
        return next((each.stale for each in self.strategies if each.stale is not None), None)

"""The training for a comparison of a Task, which is a model with inputs and a loss of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import nn

from shoal.errors import ConfigError, ModelError, PlanError
from shoal.models import Task, batch_normalizations, build_or_task, map_tensors, sample_count
from shoal.models.tiny_hugging_face import kind_of, kinds
from shoal.parallel import require_layout, require_trainable
from shoal.spec.plan import Plan, SettledPlan
from shoal.testing.check.trial import Trial, require_counts, without_dropout

_ALONG = ("pp", "cp", "ep")  # degrees that split a model or a sample in ways that Shoal must know


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTrial:
    """The training of a Task that is compared.

    Attributes:
        model: The factory of the Task, in the form that `shoal.models.build_or_task` takes.
        model_options: Keyword arguments of the factory.
        steps: Number of optimizer steps.
        batch: Samples in one step, over all ranks: the size of a batch of the Task.
        seed: Seed of the first weights.
        dropout: Whether torch's own dropout stays on; then each forward has a seed of its own.
        buffers: Whether the buffers of the first rank are compared, such as running statistics. On one device
            each rank then has buffers of its own.
        resumed_before: Step, from 0, before which the state is saved, and loaded into a new model; None if it
            never is.

    Raises:
        ConfigError: A number is out of range.
    """

    model: str
    batch: int
    model_options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 3
    seed: int = 0
    dropout: bool = False
    buffers: bool = False
    resumed_before: int | None = None

    def __post_init__(self) -> None:
        require_counts(self, steps=1, batch=1, seed=0)

    @property
    def size(self) -> str:
        """Size of a step, in words."""
        return f"{self.batch} samples"

    def seed_forward(self, chosen: Sequence[int]) -> None:
        """Seed the random numbers of the forward of these samples, if dropout is on."""
        if self.dropout:
            torch.manual_seed(chosen[0])

    def samples(self) -> TaskSamples:
        """Return the samples of all batches."""
        task = build_or_task(self.model, overrides=self.model_options)
        assert isinstance(task, Task)
        return TaskSamples(task, self.batch)

    def build_with_values(self, device: torch.device | str) -> nn.Module:
        """Return the model with its first values.

        Raises:
            ModelError: The model has nothing to train.
        """
        torch.manual_seed(self.seed)
        model = self.samples().task.build()
        require_trainable(model)
        return (model if self.dropout else without_dropout(model)).to(device)

    def statistics(self) -> list[str]:
        """Return the names of the model's layers of batch normalization."""
        return batch_normalizations(self.build_with_values("cpu"))

    def depends_on_micro_batches(self) -> bool:
        """Return True: it is not known what a Task's model and loss do with a micro-batch."""
        return True

    def batch_of(self, step: int) -> list[int]:
        """Return the samples of step number `step`, from 0: batches come one after the other."""
        return list(range(step * self.batch, (step + 1) * self.batch))

    def require_possible(self) -> Callable[[Plan], None]:
        """Check what can be checked before any rank starts; see `Trial.require_possible`."""
        model = self.build_with_values("cpu")

        def require(plan: Plan) -> None:
            large = [axis for axis in _ALONG if getattr(plan, axis) > 1]
            if large:
                given = f"{large[0]}={getattr(plan, large[0])}"
                raise PlanError(
                    f"{given} was given, and {self.model} is a Task, with inputs of its own",
                    possible="dp and tp, with any sharding",
                    change=f"leave out {' and '.join(large)}, or give a model that takes tokens",
                )
            require_layout(model, plan, 1)
            SettledPlan.of(plan, self.batch)

        return require


AnyTrial = Trial | TaskTrial


@final
class TaskSamples:
    """The samples of a Task's batches, by number.

    Args:
        task: The Task that has the batches.
        size: Samples in a batch.
    """

    def __init__(self, task: Task, size: int) -> None:
        self.task = task
        self._size = size

    def rows(self, indices: Sequence[int]) -> Any:
        """Return these samples, which must all be of one batch."""
        number = indices[0] // self._size
        places = torch.tensor([index - number * self._size for index in indices])
        return map_tensors(lambda tensor: tensor[places], self.task.batch(number))


def trial_of(
    model: str,
    options: Mapping[str, Any],
    *,
    sizes: Mapping[str, int | None],
    default_batch: int,
    masked: bool = False,
    boundaries: bool = False,
    **numbers: int,
) -> AnyTrial:
    """Return the trial of a model that takes tokens, or of a Task.

    Args:
        model: The model, in the form that `shoal.models.build_or_task` takes.
        options: Changes to the model.
        sizes: `batch` and `sequence` of `Trial`; None where they are not given.
        default_batch: Sequences in one step if `batch` is not given.
        masked: Whether a kind of Hugging Face's models predicts masked tokens; if it does only that, it does.
        boundaries: Whether samples are packed documents.
        numbers: `steps` and `seed` of `Trial`.

    Raises:
        ModelError: The Task's batch holds no samples.
        ConfigError: A size was given that the Task sets itself.
    """
    kind = kind_of(model)
    if kind is None and masked:
        raise ConfigError(
            f"masked tokens were asked for, and {model} is not a kind of Hugging Face's models",
            possible="hf:KIND, such as hf:bert",
            change="leave out --masked",
        )
    made = None if kind else build_or_task(model, overrides=options, device="cpu" if ":" in model else "meta")
    if not isinstance(made, Task):
        given = {name: size for name, size in sizes.items() if size is not None}
        trial = Trial(model=model, model_options=options, **{"batch": default_batch, **given}, **numbers)  # type: ignore[arg-type]
        masked = masked or (kind is not None and kinds().get(kind) == "masked")
        return replace(trial, masked=masked, boundaries=boundaries)
    if boundaries:
        raise ConfigError(
            f"packed documents were asked for, and {model} says itself what a batch is",
            possible="models that take tokens",
            change="leave out --boundaries",
        )
    held = sample_count(made.batch(0))
    if not held:
        raise ModelError(
            f"the first batch of {model} holds no tensor with samples",
            possible="tensors with samples along dim 0, in dicts, lists, tuples or dataclasses",
            change="correct what the Task's `batch` gives",
        )
    for name, size in sizes.items():
        if size is not None and (name, size) != ("batch", held):
            raise ConfigError(
                f"{name}={size} was given, and {model} says itself what a batch is",
                possible=f"batches of {held} samples, as it gives them",
                change=f"leave out --{name}",
            )
    return TaskTrial(model=model, model_options=options, batch=held, **numbers)  # type: ignore[arg-type]

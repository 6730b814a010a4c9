"""Compares one Plan after another on the same ranks, and starts such ranks on this machine."""

from __future__ import annotations

import itertools
import pickle
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, final

import torch
import torch.distributed as dist

from shoal.collectives.values import broadcast_value, gather_value
from shoal.errors import ConfigError, TrainingError, UserError, WorkerError
from shoal.launch.local import Nursery, StopSignal, World, choose_device, join, launch
from shoal.models import batch_normalizations, map_tensors
from shoal.parallel import Parallel, own_device, parallelize
from shoal.parallel.micro_batches import run_one_by_one
from shoal.scratch import scratch_folder
from shoal.spec.plan import DEGREES, Mesh, Plan, SettledPlan
from shoal.testing.check.distributed import (
    RankStep,
    fragment_of,
    gradient_of,
    groups_freed,
    trace_under,
    train_under,
)
from shoal.testing.check.forward import ForwardReference, first_fault
from shoal.testing.check.reference import Tolerance
from shoal.testing.check.task_trial import AnyTrial, TaskSamples, TaskTrial
from shoal.testing.check.trial import CLIP, OPTIMIZER, Trial
from shoal.testing.check.verdict import Verdict, judge, may_be_of_forward, with_fault
from shoal.train import load, save
from shoal.train.learning_rate import learning_rate
from shoal.train.optimizer import groups_by_decay


def train_task_under(trial: TaskTrial, plan: Plan, device: torch.device) -> list[RankStep]:
    """Train as one rank of the default process group.

    Raises:
        UserError: The model cannot be laid out, or the Plan does not fit.
        TrainingError: It is refused only after the first step.
    """
    steps: list[RankStep] = []
    try:
        with ExitStack() as groups:
            for step in _steps(trial, SettledPlan.of(plan, trial.batch), device, groups):
                steps.append(step)
    except UserError as error:
        if not steps:
            raise
        raise TrainingError(f"refused too late, after the first step: {error.given}") from error
    return steps


def _laid_out(
    trial: TaskTrial, plan: Plan, device: torch.device, groups: ExitStack
) -> tuple[Parallel, torch.optim.Optimizer]:
    """Return the model with its first values under the Plan, whose groups live for a context."""
    model = trial.build_with_values(device)
    parallel = parallelize(model, plan, device=device, offload_folder=tempfile.gettempdir())
    groups.enter_context(groups_freed(parallel))
    parts = groups_by_decay(parallel.owned, OPTIMIZER.weight_decay)
    return parallel, torch.optim.AdamW(parts, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)


def _save_and_load(
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    again: Parallel,
    resumed: torch.optim.Optimizer,
) -> None:
    """Save the state of training, and load it into another model and optimizer."""
    world = parallel.axes.world
    with tempfile.TemporaryDirectory() if world.index == 0 else nullcontext("") as folder:
        common = broadcast_value(folder) if world.size > 1 else folder
        save(common, parallel, optimizer)
        load(common, again, resumed)  # all ranks have read it when it returns on one


def _steps(
    trial: TaskTrial, plan: SettledPlan, device: torch.device, groups: ExitStack
) -> Iterator[RankStep]:
    samples, microbatch = trial.samples(), plan.microbatch
    parallel, optimizer = _laid_out(trial, plan, device, groups)
    # Statistics of batches differ between ranks, and with shares ranks make unlike numbers of forwards.
    is_comparable = not batch_normalizations(parallel.module) and parallel.plan.shared is None
    has_buffers = trial.buffers and parallel.axes.world.index == 0
    for number in range(trial.steps):
        if number == trial.resumed_before:
            again, resumed = _laid_out(trial, plan, device, groups)
            _save_and_load(parallel, optimizer, again, resumed)
            parallel, optimizer = again, resumed
        data = parallel.axes.data
        rate = learning_rate(OPTIMIZER, step=number, steps=trial.steps, batch=trial.batch)
        for group in optimizer.param_groups:
            group["lr"] = rate
        own = parallel.local(torch.tensor(trial.batch_of(number))).tolist()
        micro = [own[start : start + microbatch] for start in range(0, len(own), microbatch)]
        parallel.set_micro_batches(len(micro))
        forwards = (partial(_loss, trial, samples, chosen, parallel, device) for chosen in micro)
        total = run_one_by_one(
            forwards, len(micro), parallel.accumulate, mean_of=parallel.mean_of(len(micro))
        )
        data.all_reduce(total, "loss").wait()
        gradients = [fragment_of(owned, gradient_of(owned)) for owned in parallel.owned]
        norm = parallel.clip_gradients(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        parameters = [fragment_of(owned, owned.local) for owned in parallel.owned]
        evaluation = _evaluated(trial, samples, micro, parallel, device) if is_comparable else None
        named = parallel.module.named_buffers(remove_duplicate=False) if has_buffers else ()
        buffers = {name: buffer.cpu().clone() for name, buffer in named}
        yield RankStep(total.item() / data.size, norm, own, gradients, parameters, evaluation, buffers)


def _evaluated(
    trial: TaskTrial,
    samples: TaskSamples,
    micro: Sequence[Sequence[int]],
    parallel: Parallel,
    device: torch.device,
) -> float:
    """Return the mean loss of all ranks' micro-batches in evaluation."""
    parallel.module.eval()
    with torch.no_grad():
        losses = [_loss(trial, samples, chosen, parallel, device).float() for chosen in micro]
        total = torch.stack(losses).mean()
    parallel.module.train()
    parallel.axes.data.all_reduce(total, "validation").wait()
    return total.item() / parallel.axes.data.size


def _loss(
    trial: TaskTrial,
    samples: TaskSamples,
    chosen: Sequence[int],
    parallel: Parallel,
    device: torch.device,
) -> torch.Tensor:
    part = map_tensors(lambda tensor: tensor.to(device), samples.rows(chosen))
    trial.seed_forward(chosen)
    return samples.task.loss(parallel, part)


_TIMEOUT = 300.0  # seconds; also the time limit of the other ranks for the first one's reference
_USER_ERROR, _STOPPED = 2, 130

Value = TypeVar("Value")
Tell = Callable[[Verdict], object]
Trained = tuple[list[RankStep], Verdict | None]
"""The results of all steps on a rank, or the verdict if it did not run them."""


@final
class Comparison:
    """Compares Plans with one device, as one rank of the default process group. All ranks call it together.

    Args:
        trial: The training to compare.
        device: The device of this rank.
    """

    def __init__(self, trial: AnyTrial, device: torch.device) -> None:
        self._trial = trial
        self._device = device
        self._tolerances: dict[tuple[str, int | None, int], Tolerance] = {}
        self._forwards: dict[str, ForwardReference] = {}

    def check(self, plan: Plan) -> Verdict | None:
        """Train under a Plan and compare the results with the reference.

        Returns:
            The verdict on the first rank, None on the others.
        """
        ranks = _gathered(self._trained(plan))
        verdict = None if ranks is None else self._judged(plan, ranks)
        # This also keeps ranks together: the first rank's reference takes longer than a group waits to form.
        traced = isinstance(self._trial, Trial) and not self._trial.boundaries  # documents run one by one
        if _told(verdict is not None and may_be_of_forward(verdict)) and traced:
            assert isinstance(self._trial, Trial)
            traces = _gathered(trace_under(self._trial, plan, self._device))
            if traces is not None and verdict is not None:
                reference = self._forward_reference(self._trial, plan.precision)
                verdict = with_fault(verdict, first_fault(self._trial, Mesh.of(plan), traces, reference))
            if dist.is_initialized():
                dist.barrier()
        return verdict

    def _trained(self, plan: Plan) -> Trained:
        try:
            if isinstance(self._trial, TaskTrial):
                return train_task_under(self._trial, plan, self._device), None
            return train_under(self._trial, plan, self._device), None
        except UserError as error:
            return [], Verdict(str(plan), "refused", reason=str(error))
        except TrainingError as error:
            return [], Verdict(str(plan), "failed", reason=str(error))

    def _judged(self, plan: Plan, ranks: Sequence[Trained]) -> Verdict:
        for _, ended in ranks:
            if ended is not None:
                return ended
        return judge(self._trial, plan, self._tolerance(plan), [steps for steps, _ in ranks])

    def _forward_reference(self, trial: Trial, precision: str) -> ForwardReference:
        if precision not in self._forwards:
            self._forwards[precision] = ForwardReference.measure(trial, precision, self._device)
        return self._forwards[precision]

    def _tolerance(self, plan: Plan) -> Tolerance:
        settled = SettledPlan.of(plan, self._trial.batch)
        depends = self._trial.depends_on_micro_batches()
        has_buffers = isinstance(self._trial, TaskTrial) and self._trial.buffers
        key = plan.precision, settled.microbatch if depends else None, settled.dp if has_buffers else 1
        if key not in self._tolerances:
            precision, microbatch, ranks = key
            self._tolerances[key] = Tolerance.measure(self._trial, precision, self._device, microbatch, ranks)
        return self._tolerances[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckJob:
    """The Plans to compare, one after the other.

    Attributes:
        trial: The training to compare.
        plans: The Plans, all for the same number of ranks.
        device: "auto", "cpu" or "cuda".
    """

    trial: AnyTrial
    plans: Sequence[Plan]
    device: str = "auto"


def compare_here(job: CheckJob, world: World, tell: Tell) -> list[Verdict]:
    """Compare all Plans of a job, as one of the ranks of `world`; join the ranks first and leave them after.

    Args:
        job: The job, equal on all ranks.
        world: The ranks.
        tell: Function that is called with each verdict on the first rank.

    Returns:
        The verdicts on the first rank; an empty list on the others.
    """
    device = own_device(choose_device(job.device, world.local_rank))
    join(world, device, timeout=_TIMEOUT)
    comparison = Comparison(job.trial, device)
    verdicts = []
    for plan in job.plans:
        verdict = comparison.check(plan)
        if verdict is not None:
            verdicts.append(verdict)
            tell(verdict)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return verdicts


def compare_locally(job: CheckJob, tell: Tell, nursery: Nursery | None = None) -> list[Verdict]:
    """Compare all Plans of a job on ranks that this call starts on this machine.

    The ranks stay from Plan to Plan. When a rank fails, its Plan is broken, and new ranks compare the Plans
    after it.

    Args:
        job: The Plans to compare.
        tell: Function that is called with each verdict, in the process that has it. Pickle must be able to
            import it by name.
        nursery: The process that ranks are forked from; None to start a program for each.

    Raises:
        UserError: An argument cannot work.
        WorkerError: The ranks were stopped.
    """
    ranks = job.plans[0].ranks
    choose_device(job.device, 0)  # refused here, and not by each rank
    if ranks == 1:
        return compare_here(job, World(rank=0, ranks=1, local_rank=0, master=("", 0)), tell)
    verdicts: list[Verdict] = []
    with scratch_folder() as folder:
        file, results = folder / "job", folder / "results"
        while len(verdicts) < len(job.plans):
            left = CheckJob(trial=job.trial, plans=job.plans[len(verdicts) :], device=job.device)
            file.write_bytes(pickle.dumps((left, tell, results)))
            results.write_bytes(b"")
            try:
                launch([sys.executable, "-m", "shoal.testing.check", str(file)], ranks, nursery=nursery)
                verdicts += _read(results)
            except WorkerError as error:
                if error.exit_code in (_USER_ERROR, _STOPPED):
                    raise
                verdicts += _read(results)
                if len(verdicts) < len(job.plans):
                    broken = Verdict(str(job.plans[len(verdicts)]), "broken", reason=str(error))
                    tell(broken)
                    verdicts.append(broken)
    return verdicts


def serve(file: Path, world: World, stop: StopSignal) -> int:
    """Run as a rank that `compare_locally` started; the first rank writes the verdicts to a file."""
    job, tell, results = pickle.loads(file.read_bytes())

    def keep(verdict: Verdict) -> None:
        with results.open("ab") as out:
            pickle.dump(verdict, out)
        tell(verdict)

    compare_here(job, world, keep)
    return 0


def _told(value: bool) -> bool:
    """Return the first rank's value, on all ranks."""
    return bool(broadcast_value(value)) if dist.is_initialized() else value


def _gathered(value: Value) -> list[Value] | None:
    """Return the values of all ranks on the first rank, None on the others."""
    return gather_value(value) if dist.is_initialized() else [value]


def _read(results: Path) -> list[Verdict]:
    verdicts = []
    with results.open("rb") as file:
        while True:
            try:
                verdicts.append(pickle.load(file))
            except EOFError:
                return verdicts


Pair = tuple[Hashable, Hashable]

_CHOICES = ("replicate", "shard", "tensor", "context", "schedule", "recompute")


def with_axes(plans: Sequence[Plan], least: int) -> list[Plan]:
    """Return the Plans in which at least `least` of the degrees are larger than 1.

    `ep` counts as a degree, although its ranks are those of dp and cp.

    Raises:
        ConfigError: No Plan has so many.
    """
    counts = [sum(getattr(plan, degree) > 1 for degree in DEGREES) for plan in plans]
    most = max(counts, default=0)
    if most < least:
        raise ConfigError(
            f"axes={least} was given, and no Plan has more than {most} degrees above 1",
            possible=f"up to {most} for this model and so many ranks",
            change=f"give --axes {most} or less, or more --ranks",
        )
    return [plan for plan, count in zip(plans, counts, strict=True) if count >= least]


def covering(plans: Sequence[Plan], count: int) -> list[Plan]:
    """Return a sample of the Plans that covers as many pairs of settings as possible.

    All degrees together are one setting; each choice is another. So a large enough sample has every
    combination of degrees with every sharding, with every kind of tensor and context parallelism, and so on,
    and every pair of these choices. The algorithm is greedy: the next Plan is always the first of those with
    the most new pairs; once no pair is new, all pairs count as new again. The same Plans give the same
    sample. (All-pairs testing: Cohen et al. 1997, doi:10.1109/32.605761.)

    Args:
        plans: The Plans to choose from.
        count: The number of Plans wanted.

    Returns:
        At most `count` Plans, in the order of `plans`.

    Raises:
        ConfigError: `count` is not positive.
    """
    if count < 1:
        raise ConfigError(
            f"sample={count} was given",
            possible="1 or more",
            change="give a larger --sample, or leave it out",
        )
    left = {index: _pairs(plan) for index, plan in enumerate(plans)}
    chosen: list[int] = []
    seen: set[Pair] = set()
    while left and len(chosen) < count:
        index = max(left, key=lambda each: len(left[each] - seen))
        if left[index] <= seen and seen:
            seen = set()
            continue
        seen |= left.pop(index)
        chosen.append(index)
    return [plans[index] for index in sorted(chosen)]


def _pairs(plan: Plan) -> set[Pair]:
    settings: list[Hashable] = [tuple(getattr(plan, degree) for degree in DEGREES)]
    settings += [(name, getattr(plan, name)) for name in _CHOICES]
    return set(itertools.combinations(settings, 2))

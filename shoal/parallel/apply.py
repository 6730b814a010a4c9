"""Applying a Plan to a model: every technique in one visible order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from shoal.errors import ModelError, PlanError
from shoal.parallel.axes import Axes
from shoal.parallel.blocks import find_blocks
from shoal.parallel.bucket import Fill
from shoal.parallel.context import context_parallel, require_context
from shoal.parallel.expert import cut_experts, expert_parallel, require_experts
from shoal.parallel.layout import Cut
from shoal.parallel.naive import naive
from shoal.parallel.parallel import Parallel
from shoal.parallel.positions import require_sequence, residual_positions
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.replicated import replicated
from shoal.parallel.strategy import Setup, Strategy
from shoal.parallel.tensor import TensorCuts, cut_tensors, layout_of, tensor_parallel
from shoal.parallel.tensor_layout import TensorLayout
from shoal.parallel.zero1 import zero1
from shoal.parallel.zero2 import zero2
from shoal.parallel.zero3 import zero3
from shoal.plan import Plan
from shoal.record import NullRecorder, Recorder

__all__ = ["parallelize", "require_executable", "require_layout", "require_trainable"]

_STRATEGIES: Mapping[str, Callable[[Setup], Strategy]] = {
    "none": replicated,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
}
_BEYOND = ("pp",)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parallelize(
    model: nn.Module,
    plan: Plan | str,
    *,
    blocks: Sequence[nn.Module] | None = None,
    layout: TensorLayout | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    recorder: Recorder | None = None,
) -> Parallel:
    """Lays a model over the ranks of the default process group, or over this process alone if there is none.

    Every rank calls it with the same model and Plan. The model is changed in place and must no longer be used
    but through what is returned. A model with values begins with rank 0's. A model built on the meta device
    gets its values here, one bucket at a time, from its method `initialize_parameter(name, tensor, seed)`, so
    that no rank ever holds more of it than the Plan says.

    Args:
        model: Any module. Its trained parameters are fp32, or bf16 or fp16 that become fp32 in the optimizer.
        plan: A Plan or its text form.
        blocks: The repeated parts whose parameters are used in their own forward only; by default the
            elements of the outermost `ModuleList`s and `Sequential`s.
        layout: Which layers tensor parallelism splits how; by default what Shoal knows of the model.
        seed: For a model built on the meta device.
        device: Where a model built on the meta device gets its values.
        recorder: Where the spans of collectives go.

    Raises:
        PlanError: The Plan does not fit the number of ranks, or asks for what cannot be run.
        ModelError: The model cannot be laid out.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    require_executable(plan)
    require_trainable(model)
    axes = Axes.build(plan, recorder if recorder is not None else NullRecorder())
    blocks = list(find_blocks(model) if blocks is None else blocks)

    layout = None if plan.tp == 1 else layout_of(model) if layout is None else layout
    split = TensorCuts({}, {}) if layout is None else cut_tensors(model, layout, plan, axes.tp.index)
    experts = cut_experts(model, axes.ep) if plan.ep > 1 else {}
    named = dict(model.named_parameters())  # a parameter that two modules share has one name
    cuts = {name: cut for name, cut in {**split.cuts, **experts}.items() if name in named}
    _require_trained(cuts, named)
    fill = _first_values(model, seed, torch.device(device), axes, cuts)
    if layout is not None:
        tensor_parallel(model, layout, split, axes.tp, plan)
    context_parallel(model, axes.cp, plan.context)
    expert_parallel(
        model,
        axes.ep,
        axes.sequence,
        lambda part, on: residual_positions(part, axes, plan.context, on),
    )
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(_DTYPES[plan.precision])
    recompute_blocks(blocks, plan.recompute)
    setup = Setup(
        model=model,
        blocks=blocks,
        axes=axes,
        dtype=_DTYPES[plan.precision],
        bucket=plan.bucket,
        fill=fill,
        cuts=cuts,
        narrowed=frozenset(split.narrowed),
        experts=frozenset(experts),
    )
    strategy = naive(setup) if plan.exchange == "naive" else _STRATEGIES[plan.shard](setup)
    return Parallel(model, plan, axes, strategy)


def require_executable(plan: Plan) -> None:
    """Checks that this version can execute a Plan.

    Raises:
        PlanError: It cannot.
    """
    beyond = [f"{degree}={getattr(plan, degree)}" for degree in _BEYOND if getattr(plan, degree) > 1]
    if beyond:
        raise PlanError(
            f"the Plan {plan} asks for {', '.join(beyond)}, which this version does not execute",
            possible="data, tensor, context and expert parallelism: dp, shard, replicate, tp, cp, ep",
            change=f"leave out {', '.join(beyond)}, and use dp={plan.dp * plan.pp} for as many ranks",
        )


def require_layout(model: nn.Module, plan: Plan, sequence: int, layout: TensorLayout | None = None) -> None:
    """Checks that a Plan can be laid over a model, and over sequences of that many tokens; changes nothing.

    Raises:
        PlanError: It cannot.
        ModelError: The model lacks what the Plan cuts.
    """
    if plan.tp > 1:
        cut_tensors(model, layout if layout is not None else layout_of(model), plan, 0)
    require_context(model, plan.cp, plan.context, plan.tp)
    require_sequence(sequence, plan.cp, plan.context)
    if plan.tensor != "plain" and (sequence // plan.cp) % plan.tp:
        raise PlanError(
            f"a sequence of {sequence} tokens over cp={plan.cp} does not divide over tp={plan.tp}",
            possible=f"sequences of a multiple of {plan.cp * plan.tp} tokens, or tensor=plain",
            change="change the sequence, or add tensor=plain",
        )
    require_experts(model, plan.ep)


def require_trainable(model: nn.Module) -> None:
    """Checks that a model has parameters to train, of types that can be trained.

    Raises:
        ModelError: It does not.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ModelError(
            f"{type(model).__name__} has no parameter that requires a gradient",
            possible="a module with at least one trained parameter",
            change="set requires_grad on what is to be trained",
        )
    for name, parameter in trained.items():
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"the parameter {name} is {parameter.dtype}",
                possible="fp32, bf16 or fp16 parameters; the Plan's precision says what computes",
                change="call model.float() before",
            )


def _require_trained(cuts: Mapping[str, Cut], named: Mapping[str, nn.Parameter]) -> None:
    frozen = [name for name in cuts if not named[name].requires_grad]
    if frozen:
        raise ModelError(
            f"{frozen[0]} is split over ranks, and is not trained",
            possible="splitting parameters that are trained",
            change="train it, or use tp=1 and ep=1",
        )


def _first_values(
    model: nn.Module, seed: int, device: torch.device, axes: Axes, cuts: Mapping[str, Cut]
) -> Fill:
    """Gives fixed tensors their values, cuts the parameters, and says how a bucket's are filled."""
    tensors = [*model.parameters(), *model.buffers()]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    on_meta = [tensor for tensor in tensors if tensor.is_meta]
    if not on_meta:
        for pending in [axes.world.broadcast(tensor.data, "first values") for tensor in tensors]:
            pending.wait()
        for name, cut in cuts.items():
            trained[name].data = cut.of(trained[name].data).clone()
        return lambda name, tensor: _copy(trained[name], tensor)
    if not hasattr(model, "initialize_parameter") or len(on_meta) != len(trained):
        raise ModelError(
            f"{type(model).__name__} has tensors on the meta device that cannot be given values",
            possible="on the meta device: trained parameters only, of a model with a method "
            "initialize_parameter(name, tensor, seed)",
            change="build the model on a real device, or add the method",
        )
    _leave_meta(model, device, {id(trained[name]): cut for name, cut in cuts.items()})

    def fill(name: str, tensor: torch.Tensor) -> None:
        cut = cuts.get(name)
        whole = tensor if cut is None else tensor.new_empty(cut.shape)
        model.initialize_parameter(name, whole, seed)  # type: ignore[operator]
        if cut is not None:
            tensor.copy_(cut.of(whole))

    return fill


def _copy(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    tensor.copy_(parameter.detach())


def _leave_meta(model: nn.Module, device: torch.device, cuts: Mapping[int, Cut]) -> None:
    """Puts parameters without memory of their own in place of those on the meta device, by identity cut."""
    placeholder = torch.full((), torch.nan, device=device)
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in replaced:
                cut = cuts.get(id(parameter))
                shape = parameter.shape if cut is None else cut.block_shape
                replaced[parameter] = nn.Parameter(
                    placeholder.expand(shape), requires_grad=parameter.requires_grad
                )
            setattr(module, name, replaced[parameter])

"""Applying a Plan to a model: every technique in one visible order."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.collectives.values import all_gather_value
from shoal.errors import LayoutError, ModelError, PlanError
from shoal.models import Transformer, mixtures_of
from shoal.models.task import find_blocks
from shoal.parallel.axes import Axes
from shoal.parallel.compiled import compile_blocks, uncompiled
from shoal.parallel.context.context import context_parallel, require_context
from shoal.parallel.context.positions import require_sequence, residual_positions
from shoal.parallel.data.naive import naive
from shoal.parallel.data.replicated import resident
from shoal.parallel.data.strategy import Setup, Strategy
from shoal.parallel.data.zero3 import zero3
from shoal.parallel.device import memory_of_a_rank, place
from shoal.parallel.division_probe import Divided, DivisionProbe
from shoal.parallel.exchange.compressed_sums import Compressing
from shoal.parallel.expert.expert import cut_experts, expert_parallel, require_experts
from shoal.parallel.full_state import Whole
from shoal.parallel.hugging_face.layout import has_tensor_plan, leave_weights, refuse_some_logits
from shoal.parallel.hugging_face.routers import RouterLogits, gather_router_logits
from shoal.parallel.hugging_face.sequence import refuse_own_loss, split_stream, use_no_cache
from shoal.parallel.loss_terms import mark_parts
from shoal.parallel.offload.storage import Storage
from shoal.parallel.offload.stored_activations import store_activations
from shoal.parallel.parallel import Parallel
from shoal.parallel.parameter_init import take_first_values
from shoal.parallel.pipeline.pieces import Batch, Pieces, Room, cut_pieces, device_name, settled_on_device
from shoal.parallel.pipeline.runtime import Pipeline, StageEntry, StageHere
from shoal.parallel.pipeline.split_backward import Deferral, put_off_products
from shoal.parallel.pipeline.stage_layout import StageLayout
from shoal.parallel.pipeline.stages import take_stages
from shoal.parallel.precision import cast_inputs, kept_in_fp32, use_float8
from shoal.parallel.tensor.tensor import TensorCuts, cut_tensors, layout_of, tensor_parallel
from shoal.parallel.tensor.tensor_layout import TensorLayout
from shoal.parallel.weight_hooks import is_laid_out
from shoal.record import NullRecorder, Recorder
from shoal.spec.plan import Plan, block_choices

_TRAINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel")
"""Names of torch's classes of models that share their work among devices by themselves."""


def require_module(model: Any) -> None:
    """Check that a model is a module which nothing has laid over ranks.

    Raises:
        ModelError: It is no module.
        LayoutError: Shoal or torch has laid it, or a part of it, over ranks already.
    """
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if inspect.isclass(model) else f"a {type(model).__name__}"
        raise ModelError(
            f"{kind} was given as the model", possible="a torch.nn.Module", change="give the module itself"
        )
    for name, module in model.named_modules():
        by = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)
        if by is not None or is_laid_out(module):
            what = f"its module {name}" if name else "the model"
            raise LayoutError(
                f"{what} is laid over ranks already" + (f", by {by}" if by is not None else ""),
                possible="a plain module, laid over ranks once; parts that two models share in one of them",
                change="make the model anew" if by is None else f"give the module without {by}",
            )


def plan_of(given: Any) -> Plan:
    """Return a Plan that is given as such, or as its text form.

    Raises:
        PlanError: It is neither, or the text cannot be read.
    """
    if isinstance(given, Plan):
        return given
    if not isinstance(given, str):
        raise PlanError(
            f"a {type(given).__name__} was given as the Plan",
            possible="a shoal.Plan, or its text form, such as dp=2,shard=zero1",
            change="write the text form",
        )
    if given == "auto":
        raise PlanError(
            "the Plan auto was given, which only `shoal train` can choose",
            possible="a Plan that shoal.choose or `shoal plan` found, or its text form",
            change="call shoal.choose(workload, cluster, batch=...).best.plan, or write a Plan",
        )
    return Plan.parse(given)


def require_blocks(model: nn.Module, blocks: Sequence[Any]) -> None:
    """Check that blocks are modules of a model.

    Raises:
        ModelError: One is not.
    """
    modules = set(model.modules())
    for block in blocks:
        if not isinstance(block, nn.Module) or block not in modules:
            shown = repr(block) if isinstance(block, str) else f"a {type(block).__name__}"
            raise ModelError(
                f"blocks= holds {shown}, which is no module of the {type(model).__name__}",
                possible="modules of the model, such as the elements of model.layers",
                change="give the modules themselves, or leave out blocks",
            )


def require_trainable(model: nn.Module) -> None:
    """Check that a model has parameters to train, of types that can be trained.

    Raises:
        ModelError: It is no module, has none, or one has another type.
        LayoutError: It is laid over ranks already.
    """
    require_module(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"{type(model).__name__} has no parameter that requires a gradient",
            possible="a module with at least one trained parameter",
            change="set requires_grad on the parameters to train",
        )
    require_parameters(model)


def require_parameters(model: nn.Module) -> None:
    """Check that a model has parameters; that those to train, if there are some, are of types that can be."""
    if next(model.parameters(), None) is None:
        raise ModelError(
            f"{type(model).__name__} has no parameters",
            possible="a module with parameters, trained or not",
            change="give the module that has the parameters",
        )
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ModelError(
                f"the embedding {name} has sparse=True",
                possible="embeddings with sparse=False: ranks sum dense gradients",
                change=f"make {name} with sparse=False",
            )
    for name, parameter in model.named_parameters():
        is_wide = parameter.dtype == torch.float64 or parameter.is_complex()  # fp32 would not hold it
        if is_wide or (name in trained and parameter.dtype not in _TRAINED_DTYPES):
            raise ModelError(
                f"the parameter {name} is {parameter.dtype}",
                possible="fp32, bf16 or fp16 parameters; the Plan's precision sets the type for compute",
                change="call model.float() before shoal.parallelize",
            )


_DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""The type of the weights that compute, by its bytes."""


def parallelize(
    model: nn.Module,
    plan: Plan | str,
    *,
    blocks: Sequence[nn.Module] | None = None,
    layout: TensorLayout | None = None,
    stages: StageLayout | None = None,
    batch: Batch | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    recorder: Recorder | None = None,
    offload_folder: Path | str | None = None,
) -> Parallel:
    """Lay a model over the ranks of the default process group, or over this process if there is no group.

    Every rank calls it with the same model and Plan. The model is changed in place; use only the returned
    object afterwards. A model with values begins with rank 0's values. A model built on the meta device gets
    its values here, one bucket at a time, from its method `initialize_parameter(name, tensor, seed)`, so that
    no rank ever holds more of it than the Plan says.

    Args:
        model: Any module. Its trained parameters are fp32, or bf16 or fp16 that become fp32 in the optimizer.
            If none is trained, as of a teacher, the model only computes.
        plan: A Plan or its text form.
        blocks: The repeated parts whose parameters are used in their own forward only; by default the
            elements of the outermost `ModuleList`s and `Sequential`s.
        layout: Which layers tensor parallelism splits, and how; by default the layout that Shoal knows for
            the model.
        stages: How the model is cut into pipeline stages; its blocks are then the `blocks`. By default the
            cut that Shoal knows for the model.
        batch: Samples and tokens of an optimizer step. With it, pipeline stages that are cut by cost also
            leave room for activations; without it, only states must fit the devices.
        seed: Seed of the values of a model built on the meta device.
        device: This rank's device: the model is moved there, and a GPU becomes the current one. By default
            the device that the model is on; a model on the meta device gets its values on the CPU.
        recorder: Recorder of the spans of collectives, and of waits for files.
        offload_folder: Folder for the files of a Plan with `offload`, best on a fast local disk.

    Raises:
        PlanError: The Plan does not fit the number of ranks, or asks for what cannot be run.
        LayoutError: The model, or a part of it, is laid over ranks already.
        ConfigError: State is to be in files, and there is no folder, or none with enough space.
        ModelError: The model cannot be laid out.
    """
    require_module(model)
    plan = plan_of(plan)
    model = uncompiled(model)
    require_parameters(model)
    leave_weights(model)
    _require_counted_routers(model, plan)
    on = place(model, device)
    recorder = recorder if recorder is not None else NullRecorder()
    if blocks is not None:
        require_blocks(model, blocks)
    blocks = [uncompiled(block) for block in blocks] if blocks is not None else list(find_blocks(model))
    probe = DivisionProbe(model, plan, on, None if batch is None else batch.sequence)
    _choose_products(plan, blocks, on)
    given, layout = layout, None if plan.tp == 1 else layout_of(model) if layout is None else layout
    pieces = None
    if plan.pp > 1:
        pieces = _cut(model, plan, layout, stages, batch, on)
        plan = plan.replace(split=pieces.split)
    axes = Axes.build(plan, recorder, are_ends_tied=pieces is not None and bool(pieces.tied))
    if plan.sharding.cuts_weights and not blocks:
        warnings.warn(
            f"{type(model).__name__} has no ModuleList or Sequential, so {plan.shard} keeps all of its "
            "weights from the beginning of a forward to the end of its backward; name its repeated parts: "
            "blocks=[...]",
            stacklevel=2,
        )

    split = TensorCuts({}, {}) if layout is None else cut_tensors(model, layout, plan, axes.tp.index)
    experts = cut_experts(model, axes.ep) if plan.ep > 1 else {}
    probe.require_equal(axes, partial(_divide_copy, plan=plan, layout=given))
    del probe  # it may hold values in another type
    named = dict(model.named_parameters())  # a parameter that two modules share has one name
    summed = frozenset() if layout is None else layout.partial_of(named)
    cuts = {name: cut for name, cut in {**split.cuts, **experts}.items() if name in named}
    dtype = _DTYPES[plan.element_bytes]
    in_fp32 = kept_in_fp32(model)
    whole = Whole.of(model, pieces, axes, lambda name: torch.float32 if name in in_fp32 else dtype)
    _cast_frozen(model, dtype, in_fp32)
    first_values = take_first_values(model, seed, on, axes, cuts)
    unfilled = {name for name, each in named.items() if each.is_meta and not each.requires_grad}
    if plan.compile == "auto" and on.type != "cpu":
        plan = plan.replace(compile="blocks")
    storage = Storage.of(plan, on, None if offload_folder is None else Path(offload_folder), recorder)
    deferral = Deferral() if pieces is not None and plan.has_halves else None
    _divide_layers(model, plan, axes, layout, split, deferral)
    if dtype != torch.float32:
        cast_inputs(model, blocks, dtype)
    setup = Setup(
        model=model,
        blocks=blocks,
        axes=axes,
        dtype=dtype,
        in_fp32=in_fp32,
        bucket=plan.bucket,
        wire=torch.bfloat16 if plan.reduce == "bf16" else torch.float32,
        compressing=Compressing.of(plan),
        first_values=first_values,
        cuts=cuts,
        narrowed=summed.union(split.narrowed),
        experts=frozenset(experts),
        storage=storage,
        unfilled=frozenset(unfilled),
    )
    if pieces is None:
        _compile(blocks, len(blocks), plan, on)
        strategies, pipeline = [_strategy(setup, plan)], None
    else:
        strategies, pipeline = _staged(setup, pieces, plan, deferral, recorder, on)
    if storage is not None and storage.tiers.activations == "file":
        here = [blocks] if pieces is None else [pieces.blocks_of(each) for each in pieces.of(axes.pp.index)]
        store_activations(storage, model, plan, here, len(blocks))
    mark_parts(model, [owned for strategy in strategies for owned in strategy.owned], axes)
    return Parallel(
        model,
        plan,
        axes,
        strategies,
        whole=whole,
        cuts=cuts,
        device=on,
        pipeline=pipeline,
        storage=storage,
    )


def _choose_products(plan: Plan, blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Set the type in which products round their operands."""
    if plan.precision == "fp8":
        use_float8(blocks, device)
    elif plan.precision == "tf32":
        torch.set_float32_matmul_precision("high")


def _divide_layers(
    model: nn.Module,
    plan: Plan,
    axes: Axes,
    layout: TensorLayout | None,
    split: TensorCuts,
    deferral: Deferral | None,
) -> None:
    """Apply what divides a layer among ranks: tensor, context and expert parallelism, in this order."""
    if layout is not None:
        tensor_parallel(model, layout, split, axes.tp, plan, deferral)
        if has_tensor_plan(model) and plan.tensor != "plain":
            split_stream(model, layout, axes)
    if has_tensor_plan(model):
        use_no_cache(model)
        if plan.cp > 1 or (layout is not None and (plan.tensor != "plain" or layout.head is not None)):
            refuse_own_loss(model)
        if plan.cp > 1 or (layout is not None and plan.tensor != "plain"):
            refuse_some_logits(model)
        gather_router_logits(model, axes)
    context_parallel(model, axes.cp, plan.context)
    _limit_samples(model, plan.cp)
    expert_parallel(
        model,
        axes.ep,
        axes.sequence,
        lambda part, on: residual_positions(part, axes, plan.context, on),
    )


def _divide_copy(model: nn.Module, axes: Axes, *, plan: Plan, layout: TensorLayout | None) -> Divided:
    """Cut the parameters of a copy of the model, and divide its layers among the ranks."""
    split, narrowed = TensorCuts({}, {}), frozenset[str]()
    if plan.tp > 1:
        layout = layout_of(model) if layout is None else layout  # the copy may have fewer layers
        split = cut_tensors(model, layout, plan, axes.tp.index)
        narrowed = layout.partial_of(name for name, _ in model.named_parameters()).union(split.narrowed)
    experts = cut_experts(model, axes.ep) if plan.ep > 1 else {}
    for name, parameter in model.named_parameters():
        cut = {**split.cuts, **experts}.get(name)
        if cut is not None:
            parameter.data = cut.of(parameter.data).contiguous()
    _divide_layers(model, plan, axes, layout, split, None)
    return Divided(split.cuts, narrowed, frozenset(experts))


def _cast_frozen(model: nn.Module, dtype: torch.dtype, in_fp32: frozenset[str]) -> None:
    """Cast the parameters that are not trained to the type that computes; the strategy casts the others."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if name in in_fp32 else dtype)


def _cut(
    model: nn.Module,
    plan: Plan,
    layout: TensorLayout | None,
    stages: StageLayout | None,
    batch: Batch | None,
    device: torch.device,
) -> Pieces:
    """Cut the model into stages. With a split by cost, all ranks get the stages for rank 0's kind of device.

    The arguments are those of `parallelize`.
    """
    if plan.split != "cost":
        return cut_pieces(model, plan, stages)
    first = next(model.parameters()).device
    limit = memory_of_a_rank(model, device if first.type == "meta" else first)
    if stages is None:
        name = device_name(device)
        name = all_gather_value(name)[0] if dist.is_initialized() else name
        plan = settled_on_device(model, plan, batch, name, limit)
    room = None
    if plan.split == "cost" and limit is not None:
        room = Room(limit, batch, {} if layout is None else cut_tensors(model, layout, plan, 0).cuts)
    return cut_pieces(model, plan, stages, room)


def _staged(
    setup: Setup,
    pieces: Pieces,
    plan: Plan,
    deferral: Deferral | None,
    recorder: Recorder,
    device: torch.device,
) -> tuple[list[Strategy], Pipeline]:
    """Return a strategy for each stage of this rank, and the pipeline that runs them."""
    axis = setup.axes.pp
    beside = RouterLogits.of(setup.model, setup.dtype)
    stages = take_stages(setup.model, pieces.layout, pieces.of(axis.index), beside)
    if deferral is not None:
        put_off_products(setup.model, deferral)
    here: list[StageHere] = []
    taken: frozenset[str] = frozenset()  # the first stage owns what two stages of this rank share
    for stage in stages:
        entry = StageEntry(stage)
        blocks = pieces.blocks_of(stage.index)
        names = stage.names - taken
        lent = names & frozenset[str]().union(*(each.names for each in stages if each is not stage))
        own = replace(
            setup,
            blocks=blocks,
            names=names,
            tied=pieces.tied,
            lent=lent,
            entry=entry,
            compressing=Compressing.of(plan),
        )
        _compile(blocks, len(setup.blocks), plan, device)
        taken |= stage.names
        here.append(StageHere(entry, _strategy(own, plan), deferral))
    return (
        [stage.strategy for stage in here],
        Pipeline(plan, here, pieces.times, axis, recorder, device),
    )


def _compile(blocks: Sequence[nn.Module], every: int, plan: Plan, device: torch.device) -> None:
    """Compile and recompute the blocks of a stage, of `every` ones that the model has."""
    again = block_choices(plan, len(blocks), every).recomputed
    compile_blocks(blocks, plan.recomputed.policy, plan.compile, device, again)


def _strategy(setup: Setup, plan: Plan) -> Strategy:
    if plan.exchange == "naive":
        return naive(setup)
    return zero3(setup, plan.sharding) if plan.sharding.cuts_weights else resident(setup, plan.sharding)


def require_layout(model: nn.Module, plan: Plan, sequence: int, layout: TensorLayout | None = None) -> None:
    """Check that a Plan can be laid over a model, with sequences of this many tokens; change nothing.

    Raises:
        PlanError: The Plan does not fit the model or the sequence.
        ModelError: The model lacks a part that the Plan cuts.
    """
    if plan.tp > 1:
        layout = layout if layout is not None else layout_of(model)
        cut_tensors(model, layout, plan, 0)
        layout.partial_of(name for name, _ in model.named_parameters())
    require_context(model, plan.cp, plan.context, plan.tp, sequence)
    require_sequence(sequence, plan.cp, plan.context)
    if plan.tensor != "plain" and (sequence // plan.cp) % plan.tp:
        raise PlanError(
            f"a sequence of {sequence} tokens over cp={plan.cp} does not divide over tp={plan.tp}",
            possible=f"sequences of a multiple of {plan.cp * plan.tp} tokens, or tensor=plain",
            change="change the sequence length, or add tensor=plain",
        )
    require_experts(model, plan.ep)
    _require_counted_routers(model, plan)
    if plan.pp > 1:
        cut_pieces(model, plan)


def _require_counted_routers(model: nn.Module, plan: Plan) -> None:
    """Refuse a model with routers if ranks are padded and forwards run again while others are under way."""
    if plan.is_padded and plan.pp > 1 and plan.recompute != "none" and mixtures_of(model):
        raise PlanError(
            f"shares={plan.shares} was given with pp={plan.pp}, recompute={plan.recompute}, and the losses "
            "of the model's routers would count micro-batches that are made again",
            possible="shares with recompute=none or pp=1, or a model without experts",
            change="leave out recompute or shares",
        )


def _limit_samples(model: nn.Module, parts: int) -> None:
    """Make a transformer refuse samples longer than its context; a rank has one of `parts` of each."""
    if parts == 1 or not isinstance(model, Transformer):
        return
    limit = model.config.seq

    def require_length(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens: torch.Tensor = next(iter((*arguments, *named.values())))
        length = tokens.shape[-1] * parts
        if length > limit:
            raise ModelError(
                f"a sample of {length} tokens is longer than the model's context",
                possible=f"up to {limit} tokens, {limit // parts} on each of cp={parts} ranks",
                change="shorten the samples, or give the model a larger `seq`",
            )

    model.register_forward_pre_hook(require_length, with_kwargs=True)

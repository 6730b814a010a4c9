"""What a model and a Plan have to be before one is laid over ranks by the other."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.errors import LayoutError, ModelError, PlanError
from shoal.parallel.access import is_laid_out
from shoal.plan import Plan

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

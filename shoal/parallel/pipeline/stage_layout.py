"""The parts of a model that become pipeline stages: named by the user, or known to Shoal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.errors import ModelError
from shoal.models import Transformer

_WITHOUT_PLAN = {"gpt2": (("wte", "wpe", "drop"), "h", ("ln_f",))}
"""Models of transformers whose configuration does not say their pieces: embedding, blocks, end."""


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The pieces of a model, by names of modules, in the order in which its forward runs them.

    The model's forward passes each block the hidden state as first argument, and each block returns it, alone
    or as the first of a tuple. Only the hidden state goes from stage to stage, so the forward must not use
    what else a block returns. All other work of the forward runs on every stage, and must hold no trained
    parameter.

    Attributes:
        embed: Modules that make the first hidden state from the model's input; none if the first block takes
            that.
        blocks: The `ModuleList`, `ModuleDict` or `Sequential` of blocks; "" if the model itself is one.
        end: Modules that make the output from the last block's hidden state; none if that is the output.
            Methods of modules may stand among them.
        shared: The modules of `embed` whose parameters the end uses as well, such as in a method.
    """

    embed: tuple[str, ...] = ("embed",)
    blocks: str = "blocks"
    end: tuple[str, ...] = ("norm", "head")
    shared: tuple[str, ...] = ()


def stages_of(model: nn.Module) -> StageLayout:
    """Return the layout in the model's `stage_layout`, or the one that Shoal knows for it.

    Shoal knows its own models, causal models of Hugging Face, and `Sequential`s. Call it before any part of
    the model is replaced.

    Raises:
        ModelError: There is no such layout.
    """
    declared = getattr(model, "stage_layout", None)
    if isinstance(declared, StageLayout):
        return declared
    if isinstance(model, Transformer):
        if model.head is None:
            return StageLayout(end=("norm", "unembed"), shared=("embed",))
        return StageLayout()
    if isinstance(model, nn.Sequential):
        return StageLayout(embed=(), blocks="", end=())
    if hasattr(getattr(model, "config", None), "base_model_pp_plan"):
        return _of_hugging_face(model)
    raise ModelError(
        f"nothing says how {type(model).__name__} is cut into stages",
        possible="Shoal's own transformers, Hugging Face's causal models, a Sequential, or any model with a "
        "StageLayout",
        change="give the model a StageLayout as its attribute `stage_layout`, or use pp=1",
    )


def parameters_by_piece(model: nn.Module, layout: StageLayout) -> tuple[frozenset[str], ...]:
    """Return the names, as in `named_parameters()`, of each piece's parameters: embedding, blocks, end.

    A tied parameter is in the first and in the last piece.

    Raises:
        ModelError: The layout names a missing module, or a trained parameter is in no piece.
    """
    names: dict[nn.Parameter, str] = {parameter: name for name, parameter in model.named_parameters()}
    *others, end = parts_by_piece(model, layout)
    modules = [[named_part(model, name) for name in piece] for piece in (*others, (*end, *layout.shared))]
    found = tuple(
        frozenset(names[each] for part in piece if isinstance(part, nn.Module) for each in part.parameters())
        for piece in modules
    )
    everywhere = frozenset[str]().union(*found)
    for parameter, name in names.items():
        if parameter.requires_grad and name not in everywhere:
            raise ModelError(
                f"the parameter {name} of {type(model).__name__} is in no piece of its StageLayout",
                possible=f"parameters of {', '.join((*layout.embed, layout.blocks, *layout.end))}",
                change="name its module in `embed` or `end`",
            )
    return found


def tied_names(model: nn.Module, layout: StageLayout) -> frozenset[str]:
    """Return the names of the parameters that the first and the last piece share.

    If these pieces are on different ranks, each has a parameter with the name, and the gradient is the sum of
    both. The name is the one in `named_parameters()` of the whole model: the embedding's.
    """
    first, *_, last = parameters_by_piece(model, layout)
    return first & last


def parts_by_piece(model: nn.Module, layout: StageLayout) -> list[tuple[str, ...]]:
    """Return the names of the modules and methods of each piece.

    Raises:
        ModelError: The module that the layout gives as blocks has no elements.
    """
    blocks = named_part(model, layout.blocks)
    if not isinstance(blocks, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        raise ModelError(
            f"the StageLayout's blocks, {layout.blocks!r}, are a {type(blocks).__name__}",
            possible="a ModuleList, a ModuleDict or a Sequential, whose elements are the blocks",
            change="correct the name",
        )
    # named_children() would return a block only once if the list has it twice
    return [layout.embed, *((_child(layout.blocks, key),) for key in blocks._modules), layout.end]


def named_part(model: nn.Module, name: str) -> Any:
    """Return the module or method with this name.

    Raises:
        ModelError: The model has none.
    """
    parent, _, key = name.rpartition(".")
    try:
        holder = model.get_submodule(parent)
        part: object = getattr(holder, key) if key else model
    except AttributeError:
        part = None
    if not callable(part):
        raise ModelError(
            f"the StageLayout names {name}, and {type(model).__name__} has no such module",
            possible="names in named_modules(); in `end` also names of methods",
            change="correct the name",
        )
    return part


def _of_hugging_face(model: Any) -> StageLayout:
    """Return the layout from `config.base_model_pp_plan`, which names the base model's parts in order."""
    plan = model.config.base_model_pp_plan
    prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
    base = model.get_submodule(prefix)
    if plan:
        parts = [name for name in plan if isinstance(getattr(base, name, None), nn.Module)]
        lists = [name for name in parts if isinstance(getattr(base, name), nn.ModuleList)]
        if len(lists) != 1:
            raise _unknown(model)
        place = parts.index(lists[0])
        embed, blocks, end = tuple(parts[:place]), lists[0], tuple(parts[place + 1 :])
    elif model.config.model_type in _WITHOUT_PLAN:
        embed, blocks, end = _WITHOUT_PLAN[model.config.model_type]
    else:
        raise _unknown(model)
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    return StageLayout(_within(prefix, embed), _child(prefix, blocks), (*_within(prefix, end), *names[:1]))


def _within(prefix: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_child(prefix, name) for name in names)


def _child(parent: str, key: str) -> str:
    return f"{parent}.{key}" if parent else key


def _unknown(model: nn.Module) -> ModelError:
    return ModelError(
        f"the configuration of {type(model).__name__} does not define its stages",
        possible="models of transformers with one list of layers in `base_model_pp_plan`, or a StageLayout",
        change="give a StageLayout, or use pp=1",
    )

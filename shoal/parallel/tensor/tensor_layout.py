"""The layers of a model that tensor parallelism splits, and how, as the user or Shoal describes them.

Find and check the layers of a model that a `TensorLayout` names.

Tensor parallelism replaces the `forward` of a layer that it splits. So it refuses a layer that does more than
multiply or look up. It also refuses a layer whose outputs would be cut across parts: of a fused query, key
and value, the first rank would get all queries, and the last one all values.

The layers that multiply in a model with LoRA's adapters, for tensor parallelism.

A layer that is split by outputs gives each rank some rows of W and the same rows of B. A is whole on each
rank, and only its product, `rank` wide, is gathered or has its gradient summed. A layer that is split by
inputs gives each rank some columns of W and of A. Their products are summed apart, and B is whole on each
rank.

Attention that tensor parallelism splits, and that shapes its projections for all heads of the model.

A rank has some of the heads. `view(B, T, heads, head_dim)` with the model's number of heads fails there, and
`view(B, T, heads, -1)` would silently give every head a part of its features. Where the residual stream is
split along the sequence, T of the module's input is a part of the projections' T. So the first forward of
each split module is watched: its projections may only be viewed as the rank's own heads, for each position.
The error names the module, and the view to write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import ModelError, PlanError, nearest
from shoal.models import base_layer
from shoal.spec.plan import divisors


@dataclass(frozen=True, slots=True)
class Split:
    """The split of the linear layers within one module.

    A layer has its name within the module, which may be dotted: `inner.query`. A rank gets equal blocks of a
    layer's outputs or inputs, one after another. The outputs of a fused layer, such as of query, key and
    value, must therefore lie part by part: all of the first head, then all of the second.

    Attributes:
        columns: Layers that are split by outputs and all read the module's input, each with the number of
            parts that must stay whole: heads, or features.
        rows: Layers that are split by inputs and write the module's output, each with its number of parts.
        by_part: The fused layers among `columns`. A layer is refused if it is not named here and has more
            outputs for each part than the rows take.
    """

    columns: Mapping[str, int]
    rows: Mapping[str, int]
    by_part: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The layers of a model that are split, and how.

    Patterns are those of `fnmatch.fnmatchcase`, and match whole names: `*` stands for any text, dots too, `?`
    for one character, `[01]` for one of these characters. `blocks.*.attention` is the attention of every
    block; the pattern "" is the model itself.

    Attributes:
        splits: The split of each module, by pattern of the names in `named_modules()`.
        embedding: Name, not a pattern, of the `nn.Embedding` of tokens, which is split by the vocabulary;
            None if none can be split. Then only `tensor=plain` works, since the sequence is split at the
            embedding.
        head: Name of the `nn.Linear` that gives logits, split by the vocabulary; None if the embedding's
            weight does, in the model's method `unembed(hidden)`. The model's output is `SplitLogits`.
        sequence: Whether the model works if the embedding gives a part of the sequence; if not, only
            `tensor=plain` works.
        partial: Patterns of the names in `named_parameters()`, for parameters that every rank has whole and
            that work on its own heads or features, such as a norm of each head. Each rank has a part of their
            gradient's sum.
    """

    splits: Mapping[str, Split] = field(default_factory=dict)
    embedding: str | None = "embed"
    head: str | None = "head"
    sequence: bool = True
    partial: tuple[str, ...] = ()

    def partial_of(self, names: Iterable[str]) -> frozenset[str]:
        """Return the parameters of a model that `partial` names, out of the names of all.

        Raises:
            PlanError: A pattern matches no parameter.
        """
        known = list(names)
        found = {pattern: {name for name in known if fnmatchcase(name, pattern)} for pattern in self.partial}
        for pattern, matches in found.items():
            if not matches:
                raise PlanError(
                    f"the layout's `partial` names {pattern}, and the model has no such parameter",
                    possible="patterns for names in named_parameters()",
                    change="correct the pattern, or leave it out",
                )
        return frozenset().union(*found.values())


def matching_modules(model: nn.Module, layout: TensorLayout) -> Iterator[tuple[str, nn.Module, Split]]:
    """Yield name, module and split of each module that a pattern of the layout matches.

    Raises:
        PlanError: A pattern matches no module.
    """
    for pattern, split in layout.splits.items():
        found = [pair for pair in model.named_modules() if fnmatchcase(pair[0], pattern)]
        if not found:
            names = [name for name, _ in model.named_modules()]
            raise PlanError(
                f"the layout names {pattern}, and {type(model).__name__} has no such module"
                f"{nearest(pattern, names)}",
                possible="patterns for names in named_modules(); * stands for any text",
                change="correct the pattern, or leave it out",
            )
        yield from ((name, module, split) for name, module in found)


def full_name(name: str, child: str) -> str:
    """Return the full name in the model of a module's child; the model's own name is empty."""
    return f"{name}.{child}" if name else child


def linear_layer(module: nn.Module, name: str, child: str) -> nn.Linear:
    """Return the layer `child` of a module; its name may be dotted.

    Args:
        module: A module that the layout matched.
        name: The module's name in the model.
        child: The layer's name in the module.

    Raises:
        PlanError: The layer does not exist, or is no linear layer that only multiplies.
    """
    full = full_name(name, child)
    layers = dict(module.named_modules(remove_duplicate=False))
    if child not in layers:
        linear = [each for each, layer in layers.items() if isinstance(layer, nn.Linear)]
        raise PlanError(
            f"the layout splits {full}, and {type(module).__name__} has no such layer"
            f"{nearest(child, linear)}",
            possible=", ".join(linear) or "modules that hold nn.Linear layers",
            change="correct the name, or leave it out of the layout",
        )
    layer = layers[child]
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise PlanError(
            f"the layout splits {full}, which is a {type(layer).__name__}",
            possible="nn.Linear layers",
            change="correct the name, or leave it out of the layout",
        )
    if "weight" not in dict(layer.named_parameters(recurse=False)):
        raise PlanError(
            f"the layout splits {full}, whose weight is computed from other parameters",
            possible="nn.Linear layers with a weight of their own",
            change="remove the parametrization, or leave it out of the layout",
        )
    return layer


def require_whole_parts(module: nn.Module, name: str, split: Split) -> None:
    """Check that equal blocks of every layer's rows and columns hold whole parts, such as heads.

    Raises:
        PlanError: A layer's width is no multiple of its parts, or a layer may be fused.
    """
    given = {child: linear_layer(module, name, child).out_features for child in split.columns}
    taken = {child: linear_layer(module, name, child).in_features for child in split.rows}
    for child, units, width in (
        *((child, units, given[child]) for child, units in split.columns.items()),
        *((child, units, taken[child]) for child, units in split.rows.items()),
    ):
        if units < 1 or width % units:
            raise PlanError(
                f"the layout gives {full_name(name, child)} {units} parts, and it is {width} wide",
                possible="a number of heads or features that divides the width",
                change="correct the number in the layout",
            )
    for child in split.by_part:
        if child not in split.columns:
            raise PlanError(
                f"the layout's `by_part` names {full_name(name, child)}, which it does not split by outputs",
                possible=", ".join(split.columns) or "layers in `columns`",
                change="correct the name, or leave it out of `by_part`",
            )
    sizes = {taken[child] // units for child, units in split.rows.items()}
    for child, units in split.columns.items():
        size = given[child] // units
        if (
            split.rows
            and child not in split.by_part
            and (size not in sizes or units > max(split.rows.values()))
        ):
            takes = ", ".join(
                f"{full_name(name, row)} has {parts} parts of {taken[row] // parts} inputs"
                for row, parts in split.rows.items()
            )
            raise PlanError(
                f"{full_name(name, child)} has {units} parts of {size} outputs, and {takes}: a fused layer, "
                "such as query, key and value in one, would be cut in the wrong places",
                possible="a layer for each of them; or outputs in the order of parts: all outputs of the "
                "first head, then all of the second",
                change="split the layer in two or three; or, if its outputs are in this order, add "
                f"by_part=({child!r},) to the Split",
            )


def vocabulary_weight(model: nn.Module, name: str, kind: type[nn.Embedding] | type[nn.Linear]) -> Tensor:
    """Return the weight `[vocab, width]` of the embedding or the head that a layout names.

    Raises:
        PlanError: The module does not exist, or does more than look up or multiply.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        raise PlanError(
            f"the layout names {name}, and {type(model).__name__} has no such module{nearest(name, modules)}",
            possible="names in named_modules()",
            change="correct the name, or set it to None",
        )
    layer = modules[name]
    problem = _beside_product(layer, kind)
    if problem is not None:
        raise PlanError(
            f"the layout splits {name} by the vocabulary, and it {problem}",
            possible="an nn.Embedding that only looks up, an nn.Linear without a bias",
            change="set it to None in the layout, and add tensor=plain; or change the layer",
        )
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight


def require_divisible(name: str, units: int, size: int) -> None:
    """Check that a layer's parts divide evenly over the ranks.

    Raises:
        PlanError: They do not.
    """
    if units % size:
        fitting = ", ".join(str(each) for each in divisors(units) if each <= 64)
        raise PlanError(
            f"tp={size} does not divide the {units} parts of {name}",
            possible=f"tp of {fitting}",
            change="choose one of these",
        )


def _beside_product(layer: nn.Module, kind: type[nn.Module]) -> str | None:
    """Return what a vocabulary layer does that a split one would not do; None if nothing."""
    if not isinstance(layer, kind):
        return f"is a {type(layer).__name__}"
    if type(layer).forward is not kind.forward:
        return f"has the forward of {type(layer).__name__}"
    for name in ("bias", "padding_idx", "max_norm", "scale_grad_by_freq"):
        value = getattr(layer, name, None)
        if value is not None and value is not False:
            return "has a bias" if name == "bias" else f"has {name}={value}"
    return None


_A, _B = "lora_A.default", "lora_B.default"


def split_layers(model: nn.Module, layout: TensorLayout) -> Iterator[tuple[str, nn.Module, Split]]:
    """Yield name, module and split like `matching_modules`, but name the layers within adapters.

    Raises:
        PlanError: A pattern matches no module, or an adapter has dropout.
    """
    for name, module, split in matching_modules(model, layout):
        children = dict(module.named_modules(remove_duplicate=False))
        adapted = {
            child: children[child]
            for child in (*split.columns, *split.rows)
            if child in children and base_layer(children[child]) is not children[child]
        }
        yield name, module, _within(split, adapted)
        for child, layer in adapted.items():
            full = full_name(name, child)
            _require_no_dropout(full, layer)
            if child in split.columns:
                yield full, layer, Split({_B: split.columns[child]}, {})
            else:
                yield full, layer, Split({}, {_A: split.rows[child]})


def _within(split: Split, adapted: Mapping[str, nn.Module]) -> Split:
    """Return the split with the names of the layers that have the weights."""

    def named(child: str) -> str:
        return f"{child}.base_layer" if child in adapted else child

    return Split(
        {named(child): units for child, units in split.columns.items()},
        {named(child): units for child, units in split.rows.items()},
        tuple(named(child) for child in split.by_part),
    )


def _require_no_dropout(name: str, layer: Any) -> None:
    for dropout in layer.lora_dropout.values():
        if isinstance(dropout, nn.Dropout) and dropout.p > 0:
            raise PlanError(
                f"the adapter of {name} has a dropout of {dropout.p}, and ranks would draw different masks",
                possible="adapters without dropout, or tp=1",
                change="set lora.dropout=0, or leave out tp",
            )


_WRONG_SHAPES = (  # words of errors of torch, einops and Python
    "invalid for input of size",
    "must match",
    "cannot be multiplied",
    "multiply up to the size",
    "sum exactly to",
    "must divide the number of heads",
    "Expected size for first two dimensions",
    "Shape mismatch",
    "values to unpack",
)
_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}
_PARTS = {torch.ops.aten.split.Tensor, torch.ops.aten.unsafe_split.Tensor}


def watch_heads(name: str, module: nn.Module, split: Split, size: int) -> None:
    """Make a split module refuse a view of its projections as all heads of the model; call it before `split`.

    Modules of transformers write `view(B, T, -1, head_dim)`, and are left as they are.

    Args:
        name: The module's name in the model.
        module: The module.
        split: Its split.
        size: Number of ranks.
    """
    layers: dict[str, nn.Module] = {child: module.get_submodule(child) for child in split.columns}
    widths: dict[str, Any] = {child: base_layer(layer).out_features for child, layer in layers.items()}
    heads = {child: units for child, units in split.columns.items() if 1 < units < widths[child]}
    if heads and size > 1 and not type(module).__module__.startswith("transformers."):
        module.forward = _watched(module.forward, name, module, heads, size)


def _watched(
    forward: Callable[..., Any], name: str, module: nn.Module, heads: dict[str, int], size: int
) -> Callable[..., Any]:
    is_checked = False

    @wraps(forward)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal is_checked
        if is_checked or torch.compiler.is_compiling():
            return forward(*arguments, **named)
        watch = _Watch(name, size)
        hooks = [
            module.get_submodule(child).register_forward_hook(watch.hook(child, units))
            for child, units in heads.items()
        ]
        try:
            with watch:
                result = forward(*arguments, **named)
        except (RuntimeError, ValueError) as error:
            if not any(words in str(error) for words in _WRONG_SHAPES):
                raise
            child, units = next(iter(heads.items()))
            raise _refused(name, child, units, size, str(error)) from error
        finally:
            for hook in hooks:
                hook.remove()
        is_checked = True
        return result

    return call


class _Watch(TorchDispatchMode):
    """Check the views of the projections of one module."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self._name = name
        self._size = size
        self._seen: dict[int, tuple[str, int, Tensor]] = {}  # by address; the tensor keeps it in use

    def hook(self, child: str, units: int) -> Callable[..., None]:
        """Return a forward hook that notes the output of a layer with so many heads."""

        def note(layer: nn.Module, arguments: Any, output: Tensor) -> None:
            self._seen[output.untyped_storage().data_ptr()] = child, units, output

        return note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _VIEWS | _PARTS and args[0].untyped_storage().data_ptr() in self._seen:
            child, units, output = self._seen[args[0].untyped_storage().data_ptr()]
            own = max(1, units // self._size)
            if args[0].shape != output.shape:
                return result
            if func in _PARTS and result[0].shape[:-1] == output.shape[:-1] and len(result) == units > own:
                what = f"cut into {units} heads of {result[0].shape[-1]} features"
                raise _refused(self._name, child, units, self._size, what)
            if func in _VIEWS and not _keeps_heads(result.shape, output, units, own):
                raise _refused(self._name, child, units, self._size, f"viewed as {list(result.shape)}")
        return result


def _keeps_heads(shape: torch.Size, output: Tensor, units: int, own: int) -> bool:
    """Return whether a view keeps a rank's own heads, and its samples and positions, apart."""
    if len(shape) < 2:
        return True
    for first in range(len(shape) - 1, -1, -1):
        if math.prod(shape[first:]) == output.shape[-1]:
            return first == len(shape) - 1 or shape[first] != units or units == own
    return False


def _refused(name: str, child: str, units: int, size: int, what: str) -> ModelError:
    full = f"{name}.{child}" if name else child
    return ModelError(
        f"with tp={size} a rank has {max(1, units // size)} of the {units} heads of {full}, for all "
        f"positions, and the forward of {name or 'the model'} needs other shapes: {what}",
        possible="shapes that follow from the projection's output, not from the module's input or settings",
        change=f"write y = self.{child}(x), then y.view(*y.shape[:-1], -1, head_dim), with head_dim as a "
        "fixed number; and join the heads by flatten(-2)",
    )

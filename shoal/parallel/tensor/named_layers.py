"""Find and check the layers of a model that a `TensorLayout` names.

Tensor parallelism replaces the `forward` of a layer that it splits. So it refuses a layer that does more than
multiply or look up. It also refuses a layer whose outputs would be cut across parts: of a fused query, key
and value, the first rank would get all queries, and the last one all values.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import Tensor, nn

from shoal.errors import PlanError, nearest
from shoal.parallel.tensor.tensor_layout import Split, TensorLayout
from shoal.plan import divisors


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

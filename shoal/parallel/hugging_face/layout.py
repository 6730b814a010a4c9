"""The layout of Hugging Face's causal models, from the plan for tensor parallelism in their configuration.

`config.base_model_tp_plan` says, by patterns of layer names, how transformers itself would split layers:
"colwise" by outputs, "rowwise" by inputs. Norms of each head stay whole, and each rank has a part of their
gradient. Anything that a layout cannot express is refused: other ways to split, and other parameters that
work on a rank's own heads or features. Dropout that would make the ranks' copies of the residual stream
differ is refused too. Experts are not split: every rank has all of them, for its part of the tokens.

The embedding and the head are split by the vocabulary if they only look up and multiply; then the `logits` of
the model's output are `SplitLogits`. Otherwise they stay whole on every rank, and only `tensor=plain` works:
logits of a part of the sequence would be of no use. The same holds for models with layers other than
attention that mix a sequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shoal.errors import ModelError, PlanError
from shoal.models import base_layer
from shoal.parallel.tensor.tensor_layout import Split, TensorLayout

_ATTENTION = ("q_proj", "k_proj", "v_proj")
_NORMS_OF_HEADS = "replicated_with_grad_allreduce"
_EXPERTS = ("moe_tp_experts", "packed_colwise")
_CHANGE_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_DRAWS = ("dropout", "pdrop", "jitter")
_HARMLESS_DROPOUT = ("attention", "attn", "classifier", "summary")  # in attention, and for other tasks


def has_tensor_plan(model: nn.Module) -> bool:
    """Return whether a model has a configuration like those of transformers, which need not be installed."""
    return hasattr(getattr(model, "config", None), "base_model_tp_plan")


def leave_weights(model: nn.Module) -> None:
    """Keep a model from writing to its weights in a forward, where they may be copies.

    RWKV of transformers halves some of them for evaluation, and hidden states with them, because products in
    fp16 would overflow. If it has done so, it takes that back.
    """
    for module in model.modules():
        rescale = getattr(module, "_rescale_layers", None)
        if callable(rescale):
            was_training, module.training = module.training, True
            rescale()
            module.training = was_training
            setattr(module, "_rescale_layers", _nothing)  # noqa: B010, which types of modules do not know


def _nothing() -> None:
    pass


def refuse_some_logits(model: nn.Module) -> None:
    """Make a model refuse `logits_to_keep`: it would count from the end of this rank's part of a sequence."""
    model.register_forward_pre_hook(_require_all_logits, with_kwargs=True)


def _require_all_logits(model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    kept = named.get("logits_to_keep")
    if isinstance(kept, Tensor) or kept:
        raise ModelError(
            f"logits_to_keep was given to {type(model).__name__}, and a rank has a part of each sequence",
            possible="all logits, of which shoal.models.logits_of(output) gives a tensor to slice; or "
            "tensor=plain and cp=1",
            change="leave out logits_to_keep",
        )


def along_the_sequence(model: nn.Module) -> list[str]:
    """Return the names of layers that read several positions of a sequence by themselves."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,))
    ]


def not_attention(model: Any) -> list[str]:
    """Return the kinds of layers, by the configuration, that mix a sequence by other means than attention."""
    kinds = {*(getattr(model.config, "layer_types", None) or ())}
    return sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)


def layout_of_hugging_face(model: nn.Module) -> TensorLayout:
    """Return the layout given by a causal model's own plan for tensor parallelism; do not change the model.

    Args:
        model: A model of transformers, such as `LlamaForCausalLM`, for which `has_tensor_plan`.

    Returns:
        A layout that names each attention and each feed-forward layer that is split.

    Raises:
        PlanError: The model has no plan, or one that a layout cannot express.
    """
    config: Any = model.config
    splits, partial = {}, []
    for name, styles in _planned(model, config.base_model_tp_plan or {}).items():
        module = model.get_submodule(name)
        columns = [child for child, style in styles.items() if style == "colwise"]
        rows = [child for child, style in styles.items() if style == "rowwise"]
        _require_known(model, name, styles)
        norms = [child for child, style in styles.items() if style == _NORMS_OF_HEADS]
        partial += _norms_of_heads(model, name, module, norms)
        _require_all_split(model, name, module, {*columns, *rows, *norms})
        if getattr(module, "head_dim", None) is not None or "q_proj" in columns:
            splits[name] = _attention(model, name, module, columns, rows)
        else:
            splits[name] = _feed_forward(model, name, module, columns, rows)
    if not splits:
        raise _refused(model, "its configuration has no plan for tensor parallelism")
    _require_no_dropout(model, config)
    embedding, head = _vocabulary(model, config)
    is_split = embedding is not None and head is not None
    is_split &= not not_attention(model) and not along_the_sequence(model)
    is_split &= not _whole_attention(model, splits)
    return TensorLayout(splits, embedding, head, sequence=is_split, partial=tuple(partial))


def needs_whole_sequence(model: Any, layout: TensorLayout) -> str:
    """Return which part of a model needs whole sequences under its layout, in words; empty if none does."""
    modules = {id(module): name for name, module in model.named_modules()}
    if layout.embedding is None:
        embedding = model.get_input_embeddings()
        name, padding = modules[id(embedding)], getattr(embedding, "padding_idx", None)
        if padding is not None:
            return f"{name} has padding_idx={padding} (pad_token_id of the configuration)"
        return f"{name} does more than to look up, or its weight is that of a head that is not split"
    if layout.head is None:
        head = model.get_output_embeddings()
        return f"logits are more than a product of {modules[id(head)]}" if head else "the model has no head"
    whole = [*along_the_sequence(model), *not_attention(model), *_whole_attention(model, layout.splits)]
    return f"{whole[0]} needs it whole" if whole else ""


def fit_heads(module: nn.Module, split: Split, size: int) -> None:
    """Make attention of transformers repeat a rank's keys and values as often as its queries need.

    If there are fewer heads of keys and values than ranks, this is less often than on one device.
    """
    if hasattr(module, "num_key_value_groups") and splits_attention(split):
        heads, kv_heads = split.columns["q_proj"] // size, max(1, split.columns["k_proj"] // size)
        module.num_key_value_groups = heads // kv_heads  # type: ignore[assignment]


def splits_attention(split: Split) -> bool:
    """Return whether this is the split of an attention layer."""
    return split.columns.keys() >= set(_ATTENTION)


def _vocabulary(model: Any, config: Any) -> tuple[str | None, str | None]:
    """Return the names of embedding and head, each if it can be split; both or none if they are tied."""
    modules = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    looks_up = type(embedding) is nn.Embedding and embedding.padding_idx is None and not embedding.max_norm
    multiplies = type(head) is nn.Linear and head.bias is None
    multiplies &= all(getattr(config, name, None) is None for name in _CHANGE_LOGITS)
    if head is not None and head.weight is embedding.weight:
        looks_up = multiplies = looks_up and multiplies
    return modules[id(embedding)] if looks_up else None, modules[id(head)] if multiplies else None


def _whole_attention(model: nn.Module, splits: Mapping[str, Split]) -> list[str]:
    """Return attention layers that are not split: these need the whole sequence on every rank."""
    return [
        name
        for name, module in model.named_modules()
        if ("attn" in name.rpartition(".")[2] or "attention" in name.rpartition(".")[2])
        and name not in splits
        and any(isinstance(child, nn.Linear) for child in module.children())
    ]


def _planned(model: Any, plan: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return, by name of a module, the plan's word for each of its children. In the plan `*` is a number.

    Entries for the embedding and the head are left out: `_vocabulary` looks at these. Some releases of
    transformers name the embedding if weights are tied, others never do.
    """
    prefix = getattr(model, "base_model_prefix", "")
    base = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    styles = {base + pattern: style for pattern, style in plan.items()}
    vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    members = [
        name for name, module in model.named_modules() if not any(module is each for each in vocabulary)
    ]
    members += [name for name, _ in model.named_parameters()]
    planned: dict[str, dict[str, str]] = {}
    for member in members:
        style = styles.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", member))
        if style is not None:
            parent, _, child = member.rpartition(".")
            planned.setdefault(parent, {})[child] = style
    return {
        name: styles
        for name, styles in planned.items()
        if not any(style in _EXPERTS for style in styles.values())
    }


def _attention(model: nn.Module, name: str, module: Any, columns: list[str], rows: list[str]) -> Split:
    config: Any = model.config
    heads, head_dim = config.num_attention_heads, getattr(module, "head_dim", None) or 0
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    units = dict(zip(_ATTENTION, (heads, kv_heads, kv_heads), strict=True))
    if sorted(columns) != sorted(_ATTENTION) or len(rows) != 1:
        raise _refused(model, f"{name} has other layers than query, key, value and output")
    widths = {child: module.get_submodule(child).out_features for child in columns}
    widths[rows[0]] = module.get_submodule(rows[0]).in_features
    for child, width in widths.items():
        count = units.get(child, heads)
        if width != count * head_dim:
            raise _refused(model, f"{name}.{child} has {width} features, not {count} heads of {head_dim}")
    return Split(units, {rows[0]: heads})


def _norms_of_heads(model: nn.Module, name: str, module: Any, norms: list[str]) -> list[str]:
    """Return the names of the parameters of norms that treat each head alike."""
    names = []
    for norm in norms:
        for parameter, value in getattr(module, norm).named_parameters():
            if tuple(value.shape) != (getattr(module, "head_dim", None),):
                raise _refused(model, f"{name}.{norm} is not a norm over each head")
            names.append(f"{name}.{norm}.{parameter}")
    return names


def _feed_forward(
    model: nn.Module, name: str, module: nn.Module, columns: list[str], rows: list[str]
) -> Split:
    layers: list[Any] = [module.get_submodule(child) for child in columns]
    outputs: list[Any] = [module.get_submodule(child) for child in rows]
    widths = {layer.out_features for layer in layers} | {layer.in_features for layer in outputs}
    if not columns or not rows or len(widths) != 1 or "attn" in name or "attention" in name:
        raise _refused(model, f"the plan of {name} fits neither attention nor a feed-forward layer")
    (width,) = widths
    return Split(dict.fromkeys(columns, width), dict.fromkeys(rows, width))


def _require_known(model: nn.Module, name: str, styles: Mapping[str, str]) -> None:
    module = model.get_submodule(name)
    for child, style in styles.items():
        if style not in ("colwise", "rowwise", _NORMS_OF_HEADS):
            raise _refused(
                model, f"its plan splits {name}.{child} as {style!r}, which a TensorLayout cannot express"
            )
        layer = base_layer(getattr(module, child))
        if style != _NORMS_OF_HEADS and type(layer) is not nn.Linear:
            raise _refused(model, f"its plan splits {name}.{child}, which is a {type(layer).__name__}")


def _require_all_split(model: nn.Module, name: str, module: nn.Module, split: set[str]) -> None:
    """Refuse other parameters in the module: they see a rank's own heads, and get a part of a gradient."""
    for parameter, _ in module.named_parameters():
        if parameter.split(".")[0] not in split:
            raise _refused(model, f"{name}.{parameter} works on split values, and would get wrong gradients")


def _require_no_dropout(model: nn.Module, config: Any) -> None:
    """Refuse dropout outside attention: ranks draw different masks. In attention their heads differ too."""
    rates = {
        f"config.{name}": value
        for name, value in vars(config).items()
        if any(word in name for word in _DRAWS) and not name.startswith(_HARMLESS_DROPOUT)
    }
    rates |= {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    for name, rate in rates.items():
        if isinstance(rate, int | float) and rate > 0:
            raise PlanError(
                f"{name} of {type(model).__name__} is {rate}, and ranks would draw different masks",
                possible="dropout in attention only",
                change=f"set {name} to 0, or use tp=1",
            )


def _refused(model: nn.Module, reason: str) -> PlanError:
    return PlanError(
        f"{type(model).__name__} cannot be split for tensor parallelism: {reason}",
        possible="Hugging Face models of Llama's kind, or any model with a TensorLayout",
        change="give parallelize(..., layout=TensorLayout(...)), or use tp=1",
    )

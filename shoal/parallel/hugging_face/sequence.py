"""Hugging Face's causal models on a part of every sequence, as tensor and context parallelism give them.

These models count positions along the embedding's output, and make attention's mask of that length.

If tensor parallelism splits the residual stream, attention still sees the whole sequence. So the model gets
the embedding's output among zeros, of the whole length, while it makes masks and positions by that length.
The first block takes the rank's part out again. Attention takes the shape of its heads from its input, so it
gets a stand-in with the whole sequence's shape, and its split layers take the real part. None of this
communicates. In a pipeline each stage does so: the placeholder of the embedding gives a part of the sequence
too, and the placeholder of the first block takes it out.

Context parallelism gives a model the positions of its part, instead of those that it would count, and gives
its attention modules one other function, by transformers' registry of attention functions. No mask is made
then, so that only plain causal attention is right; all else is refused.

The gradient of embeddings that a caller makes, of models whose residual stream is split.

Each rank uses its part of `inputs_embeds`, so its backward gives the gradient of this part, and zeros. The
caller needs all of it, as for prompts that are trained, or for an attack on inputs. Embeddings that are made
within the model need no sum: gradients of its parameters are added up over the ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ModelError, PlanError
from shoal.models.attention import Documents
from shoal.models.once_differentiable import once_differentiable
from shoal.models.task import find_blocks
from shoal.parallel.axes import Axes
from shoal.parallel.communication import Axis
from shoal.parallel.hugging_face.documents import REGISTERED, Counts, decoder_of, padding_before
from shoal.parallel.hugging_face.layout import along_the_sequence, splits_attention
from shoal.parallel.tensor.tensor_layout import Split, TensorLayout, matching_modules


def sum_gradients_of_embeddings(model: nn.Module, axis: Axis) -> None:
    """Give `inputs_embeds`, where a caller gives them to the model, their gradient over all ranks."""
    model.register_forward_pre_hook(partial(_summed, axis=axis), with_kwargs=True)


def _summed(
    module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], *, axis: Axis
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    embeds = named.get("inputs_embeds")
    if embeds is None or not embeds.requires_grad:
        return args, named
    return args, {**named, "inputs_embeds": _SumGradients.apply(embeds, axis)}


class _SumGradients(torch.autograd.Function):
    """A tensor that ranks have alike and use parts of; backward adds up their gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.axis.all_reduce(total, "inputs_embeds").wait()
        return total, None


_ATTENDED = ("full_attention", "sliding_attention")
_COUNTED = ("dynamic", "longrope")  # kinds of rotary embedding that depend on the length of the input
_NO_CHANGE = {  # arguments of attention that leave its result unchanged
    "cache_position",
    "logits_to_keep",
    "num_items_in_batch",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}


def split_stream(model: Any, layout: TensorLayout, axes: Axes) -> None:
    """Make the blocks work on this rank's part of the sequence, in place.

    Args:
        model: A model of transformers to which tensor parallelism was applied, with `sequence` or `async`.
        layout: The layout by which it is split.
        axes: The Plan's axes.
    """
    sum_gradients_of_embeddings(model, axes.tp)
    model.base_model.register_forward_pre_hook(partial(_embedded, axis=axes.tp), with_kwargs=True)
    find_blocks(model.base_model)[0].register_forward_pre_hook(
        partial(_own_part, axis=axes.tp), with_kwargs=True
    )
    for _, module, split in matching_modules(model, layout):
        if splits_attention(split):
            _StandIn(axes.tp.size).put_before(module, split)


def attend_over_ranks(
    model: Any,
    size: int,
    attend: Callable[..., Tensor],
    positions: Callable[[int, torch.device], Tensor],
    whole: Callable[[Tensor], Tensor],
) -> None:
    """Make a model's attention reach over the ranks that hold parts of a sequence, in place.

    Args:
        model: A model of transformers, for which `require_attention` passes.
        size: Number of the ranks.
        attend: Causal attention of query `[batch, heads, seq / size, head_dim]` to keys and values
            `[batch, kv_heads, seq / size, head_dim]`, within `documents`.
        positions: Gives the positions `[seq / size]` that this rank holds, given `seq / size` and a device.
        whole: Gives the tokens `[batch, seq]` of all ranks, given this rank's.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(REGISTERED, _registered)
    model.set_attn_implementation(REGISTERED)
    held = _Held()
    for module in model.modules():  # transformers decides which module attends; it may be any
        module.attend, module.held = attend, held
    model.register_forward_pre_hook(lambda *_: held.forget())
    counts = Counts(padding_before(model), whole)
    decoder_of(model).register_forward_pre_hook(
        partial(_hold_positions, size=size, positions=positions, counts=counts, held=held), with_kwargs=True
    )


def refuse_own_loss(model: nn.Module) -> None:
    """Make a model refuse to compute its own loss, wrong for split logits and for split sequences."""
    model.register_forward_pre_hook(_require_no_labels, with_kwargs=True)
    model.register_forward_hook(_require_no_loss)


def use_no_cache(model: Any) -> None:
    """Make a model keep no keys and values: training never reads them, and recompute would add them twice."""
    model.config.use_cache = False


def query_heads(model: Any) -> int:
    """Return the number of query heads of each attention layer, the fewest if layers differ."""
    return min(_settings(model.config, "num_attention_heads"))


def require_attention(model: Any) -> None:
    """Check that a model's attention can reach over ranks, and that nothing else looks along a sequence.

    Raises:
        ModelError: Its attention cannot, or something else looks along a sequence.
    """
    config = _of_text(model.config)
    counted = [kind for kind in _rotary_kinds(config) if kind in _COUNTED]
    rate = max(getattr(config, name, None) or 0.0 for name in ("attention_dropout", "attn_pdrop"))
    problems = {
        "its attention does not use transformers' AttentionInterface": not model._supports_attention_backend,
        **beside_attention(model),
        f"its rotary embedding is {''.join(counted[:1])}, which depends on the sequence length": counted,
        "it caps the attention scores": getattr(config, "attn_logit_softcapping", None),
        f"its attention has a dropout of {rate}, and the dropout masks would depend on the Plan": rate,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise _refused(model, problem)


def beside_attention(model: Any) -> dict[str, bool]:
    """Return what may look along a sequence beside causal attention: problems, each true if it is there."""
    config = model.config
    takes_positions = "position_ids" in inspect.signature(decoder_of(model).forward).parameters
    kinds = set(getattr(_of_text(config), "layer_types", None) or ()) - {*_ATTENDED}
    along = along_the_sequence(model)
    return {
        "its base model takes no position_ids": not takes_positions,
        "it is not a causal decoder": config.is_encoder_decoder or not getattr(config, "is_causal", True),
        f"it has layers of {', '.join(sorted(kinds))}": bool(kinds),
        f"{''.join(along[:1])} reads several positions of the sequence": bool(along),
    }


def require_window(config: Any, sequence: int) -> None:
    """Check that attention sees all of a sequence that is spread over ranks.

    Args:
        config: The model's configuration.
        sequence: Tokens in the whole sequence.

    Raises:
        PlanError: Attention sees only a shorter window.
    """
    kinds = getattr(_of_text(config), "layer_types", None)
    window = min(_settings(config, "sliding_window"), default=None)
    if window and (not kinds or "sliding_attention" in kinds) and window < sequence:
        raise PlanError(
            f"attention has a window of {window} tokens, and a sequence has {sequence}: context parallelism "
            "has no windows",
            possible=f"sequences of up to {window} tokens, or cp=1",
            change=f"use sequence={window} or less, or leave out cp",
        )


def _of_text(config: Any) -> Any:
    """Return the configuration of the language model in one that takes images or sound too."""
    return getattr(config, "get_text_config", lambda: config)()


def _settings(config: Any, name: str) -> list[int]:
    """Return the values of a setting, several if layers differ in it; none where it is not set."""
    config = _of_text(config)
    layers = getattr(config, "per_layer_config", None)
    each = [config] if not layers else [layers[index] for index in range(config.num_hidden_layers)]
    return [value for layer in each if (value := getattr(layer, name, None))]


@final
class _Held:
    """What attention must know of the present forward.

    Attributes:
        has_positions: Whether the model has got the positions of its part.
        is_packed: Whether the samples are packed; then attention must be told their documents.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin another forward."""
        self.has_positions = self.is_packed = False


def _rotary_kinds(config: Any) -> list[str]:
    """Return the kinds of rotary embedding that a configuration names, for all layers or by kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [str(value["rope_type"]) for value in each if "rope_type" in value]


@final
class _StandIn:
    """The input of an attention module instead of this rank's part of the sequence.

    Args:
        size: Number of ranks that the sequence is split over.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._part: Tensor | None = None
        self._whole: Tensor | None = None

    def put_before(self, module: nn.Module, split: Split) -> None:
        """Give the module the stand-in, and give its split layers the part that it stands for."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)
        for child in split.columns:
            layer: Any = module.get_submodule(child)
            layer.forward = partial(self._forward, layer.forward)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        part: Tensor = args[0] if args else named["hidden_states"]
        batch, length, width = part.shape
        # NaN: if anything but the split layers reads it, the result shows it.
        whole = part.new_full((), math.nan).expand(batch, length * self._size, width)
        self._part, self._whole = part, whole
        return ((whole, *args[1:]), named) if args else (args, {**named, "hidden_states": whole})

    def _leave(self, *_: Any) -> None:
        self._part = self._whole = None  # not kept longer than needed

    def _forward(self, forward: Callable[[Tensor | None], Tensor], hidden: Tensor) -> Tensor:
        return forward(self._part if hidden is self._whole else hidden)


def _embedded(
    module: Any, args: tuple[Any, ...], named: dict[str, Any], *, axis: Axis
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a base model its part of the sequence among zeros, `[batch, seq, hidden]`, instead of tokens."""
    tokens = args[0] if args else named.get("input_ids")
    if tokens is None:  # it got embeddings of the whole sequence
        return args, named
    part: Tensor = module.get_input_embeddings()(tokens)
    length = part.shape[1]
    whole = F.pad(part, (0, 0, axis.index * length, (axis.size - 1 - axis.index) * length))
    if args:
        return (None, *args[1:]), {**named, "inputs_embeds": whole}
    return args, {**named, "input_ids": None, "inputs_embeds": whole}


def _own_part(
    module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], *, axis: Axis
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take this rank's part out of a block's input, which `_embedded` padded with zeros."""
    if args:
        return (_part(args[0], axis), *args[1:]), named
    return args, {**named, "hidden_states": _part(named["hidden_states"], axis)}


def _part(whole: Tensor, axis: Axis) -> Tensor:
    return whole.chunk(axis.size, 1)[axis.index].clone()  # a view would keep the zeros


def _hold_positions(
    module: Any,
    args: tuple[Any, ...],
    named: dict[str, Any],
    *,
    size: int,
    positions: Callable[[int, torch.device], Tensor],
    counts: Counts,
    held: _Held,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a base model the positions of its part, and its attention the documents of packed samples."""
    for name in ("attention_mask", "past_key_values"):
        if named.get(name) is not None:
            raise ModelError(
                f"{name} was given to {type(module).__name__}, whose sequences context parallelism cuts",
                possible="only tokens; padding after the end of a sample does not change the tokens before "
                "it",
                change=f"leave out {name}, and give targets of -100 where no loss is wanted",
            )
    tokens = args[0] if args else named.get("input_ids")
    part = tokens if tokens is not None else named["inputs_embeds"]
    require_window(module.config, part.shape[1] * size)
    own, whole = positions(part.shape[1], part.device), named.get("position_ids")
    held.has_positions, held.is_packed = True, whole is not None
    if whole is None:
        return args, {**named, "position_ids": counts.of(part, own, None)}
    if whole.shape[1] != part.shape[1] * size:
        raise ModelError(
            f"position_ids of {whole.shape[1]} positions were given to {type(module).__name__}, and its "
            f"samples have {part.shape[1] * size} tokens",
            possible="the positions of the whole samples, of which each rank takes its own",
            change="give position_ids [batch, seq], not a part of them",
        )
    return args, {**named, "position_ids": counts.of(part, own, whole), "documents": Documents(whole)}


def _require_no_labels(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    if named.get("labels") is not None:
        raise ModelError(
            f"labels were given to {type(module).__name__}, whose own loss does not work across ranks",
            possible="shoal.models.next_token_loss(output, targets) with targets that are already shifted",
            change="leave out labels, and use that loss",
        )


def _require_no_loss(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if getattr(output, "loss", None) is not None:
        raise ModelError(
            f"{type(module).__name__} computed its own loss, which sees a rank's part of the samples",
            possible="shoal.models.next_token_loss(output, targets), or another mean over positions",
            change="leave out what the loss is computed of, and give the Trainer a loss; or leave out cp",
        )


def _registered(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    documents: Documents | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it; all options but the scale must be causal attention's.

    Returns:
        `[batch, seq, heads, head_dim]`, and no weights.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    told = [
        name
        for name, given in others.items()
        if not (given is None or given is False or name in _NO_CHANGE or name.startswith("output_"))
    ]
    problems = {
        "is not causal": not causal,
        "has a mask": attention_mask is not None,
        f"has a dropout of {dropout}": dropout,
        f"gets {', '.join(told)}": told,
        "has values and keys of different widths": value.shape[-1] != key.shape[-1],
        "gets no positions: its forward passes by what counts them": not module.held.has_positions,
        "is not told the documents of packed samples": documents is None and module.held.is_packed,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise _refused(module, f"its attention {problem}")
    usual = 1 / math.sqrt(query.shape[-1])
    if scaling is not None and not math.isclose(scaling, usual):
        query = query * (scaling / usual)
    mixed: Tensor = module.attend(query, key, value, documents=documents)
    return mixed.transpose(1, 2).contiguous(), None


def _refused(model: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot run under context parallelism: {reason}",
        possible="Hugging Face models with only causal attention, such as Llama, Qwen and Mistral",
        change="leave out cp",
    )

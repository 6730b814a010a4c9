"""One program for each row of docs/guides/patterns.md: gives values to compare, or ends with an error.

To add a row, write it on the page, and its program here under the same words. A program gets a Plan's text,
runs on every rank of it, and returns tensors or numbers that are the same on one device.
"""

from __future__ import annotations

import copy
import io
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.models import build, logits_of, next_token_loss
from shoal.parallel import Parallel, Split, StageLayout, TensorLayout

PROGRAMS: dict[str, Callable[[str], Any]] = {}

VOCABULARY, WIDTH, HEADS, LENGTH = 61, 32, 4, 12
TOKENS = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
TARGETS = TOKENS.roll(-1, 1)


def pattern(words: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Register the program of a row."""

    def register(program: Callable[[str], Any]) -> Callable[[str], Any]:
        PROGRAMS[words] = program
        return program

    return register


def run(words: str, plan: str) -> tuple[str, Any]:
    """Return "works" and the values, or the name of the error and its text."""
    try:
        return "works", PROGRAMS[words](plan)
    except Exception as error:
        return type(error).__name__, str(error)


# -- models ------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention that shapes its heads as `view` says."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.view = view
        self.query, self.key, self.value, self.output = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def split(self, hidden: Tensor, projected: Tensor) -> Tensor:
        batch, seq, _ = hidden.shape
        if self.view == "chunks":
            return torch.stack(projected.chunk(HEADS, -1), 1)
        if self.view == "unflatten":
            return projected.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
        shapes = {
            "numbers": (batch, seq, HEADS, WIDTH // HEADS),
            "heads": (batch, seq, HEADS, -1),
            "width": (*projected.shape[:-1], -1, WIDTH // HEADS),
        }
        return projected.view(*shapes[self.view]).transpose(1, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (self.split(hidden, each(hidden)) for each in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Latent(nn.Module):
    """Attention whose keys and values come from a narrow latent (MLA)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDTH, 8, bias=False)
        self.key, self.value = (nn.Linear(8, WIDTH, bias=False) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        latent = self.down(hidden)
        query, key, value = (
            each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query(hidden), self.key(latent), self.value(latent))
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A layer beside a residual stream."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden)


class Decoder(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(make()) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        heads = dict.fromkeys(("query", "key", "value"), HEADS)
        self.stage_layout = StageLayout(embed=("embed",), blocks="blocks", end=("head",))
        self.tensor_layout = TensorLayout({"blocks.?.inner": Split(heads, {"output": HEADS})})

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Mixed(Decoder):
    """A model with inputs of many kinds, which returns a dict."""

    def __init__(self) -> None:
        super().__init__(lambda: Attention("width"))

    def forward(
        self,
        tokens: Tensor,
        shift: Tensor | None = None,
        mask: Tensor | None = None,
        factor: float = 1.0,
        scale: Tensor | None = None,
        repeat: int = 1,
    ) -> dict[str, Any]:
        hidden = self.embed(tokens) * factor
        if shift is not None:
            hidden = hidden + shift[..., None]
        if mask is not None:
            hidden = hidden * mask[..., None]
        if repeat > 1:
            hidden = hidden.repeat(1, repeat, 1)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden if scale is None else hidden * scale)
        return {"logits": logits, "parts": [logits.mean(), logits.argmax(-1)], "name": "mixed"}


def llama(**changes: Any) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=8,
        **changes,
    )
    return _sharp(transformers.LlamaForCausalLM, config)


def _sharp(make: Callable[[Any], Any], config: Any) -> Any:
    """A model whose logits differ clearly with its inputs."""
    torch.manual_seed(0)
    model = make(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 4
    return model


def _after_step(parallel: Parallel, plan: str, loss: Callable[[Any, Tensor], Tensor]) -> list[float]:
    """The loss and the gradient's norm of a step on all tokens."""
    tokens, targets = parallel.local((TOKENS, TARGETS))
    value = loss(parallel(tokens), targets)
    value.backward()
    mean = value.detach().clone()
    parallel.axes.data.all_reduce(mean, "loss").wait()
    return [mean.item() / parallel.axes.data.size, parallel.gradient_norm()]


def _after_steps(
    parallel: Parallel, pairs: list[tuple[Any, Tensor]], loss: Callable[[Any, Tensor], Tensor]
) -> list[float]:
    """The loss and the gradient's norm of a step of these micro-batches."""
    dp = parallel.axes.dp
    mine = pairs[dp.index * len(pairs) // dp.size :][: len(pairs) // dp.size]
    total = parallel.forward_backward(iter(mine), len(mine), loss)
    parallel.axes.pp.all_reduce(total, "loss").wait()
    parallel.axes.data.all_reduce(total, "loss").wait()
    return [total.item() / parallel.axes.data.size, parallel.gradient_norm()]


# -- inputs and outputs ------------------------------------------------------------------------------


@pattern("call the model with inputs by name, within `torch.no_grad()`")
def named_inputs(plan: str) -> Any:
    parallel = shoal.parallelize(llama(), plan)
    mask = (torch.arange(LENGTH) >= 3).expand(4, LENGTH).long()
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(4, LENGTH)
    with torch.no_grad():
        outputs = [
            parallel(TOKENS, position_ids=positions),
            parallel(input_ids=TOKENS, attention_mask=mask),
            parallel(TOKENS, attention_mask=None, position_ids=positions[:1]),
            parallel(input_ids=None, inputs_embeds=torch.linspace(0, 1, WIDTH).expand(4, LENGTH, WIDTH)),
        ]
    return [logits_of(output)[:, 3:] for output in outputs]


@pattern("inputs that are None, numbers, tensors without dims, or further arguments by place")
def many_inputs(plan: str) -> Any:
    parallel = shoal.parallelize(Mixed(), plan)
    mask, shift = torch.arange(LENGTH) % 2, torch.linspace(-1, 1, LENGTH)
    with torch.no_grad():
        outputs = [
            parallel(TOKENS, None, mask),
            parallel(TOKENS, shift.expand(4, -1), mask=None, factor=3.0),
            parallel(TOKENS, scale=torch.tensor(2.0), repeat=2),
            parallel(TOKENS, scale=torch.tensor(3.0), repeat=3, factor=2),
        ]
    return [output["logits"] for output in outputs]


@pattern("read `output.loss` after a call with `labels=`")
def loss_of_labels(plan: str) -> Any:
    parallel = shoal.parallelize(llama(), plan)
    with torch.no_grad():
        output = parallel(TOKENS, labels=TOKENS)
    return [output.loss, output.logits]


@pattern("a model that returns a dict")
def dict_output(plan: str) -> Any:
    parallel = shoal.parallelize(Mixed(), plan)
    with torch.no_grad():
        output = parallel(TOKENS)
    assert output["name"] == "mixed"
    return [output["logits"], *output["parts"]]


@pattern("an encoder with `token_type_ids` and `attention_mask`")
def encoder(plan: str) -> Any:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    model = _sharp(transformers.BertForMaskedLM, config).eval()
    stages = StageLayout(embed=("bert.embeddings",), blocks="bert.encoder.layer", end=("cls",))
    parallel = shoal.parallelize(model, plan, stages=stages)
    types = (torch.arange(LENGTH) > 5).long().expand(4, LENGTH)
    mask = (torch.arange(LENGTH) < 9).long().expand(4, LENGTH)
    with torch.no_grad():
        outputs = [
            parallel(TOKENS, token_type_ids=types),
            parallel(input_ids=TOKENS, attention_mask=mask, token_type_ids=types),
            parallel(TOKENS, mask, labels=TOKENS),
        ]
    return [outputs[-1].loss, *(output.logits[:, :9] for output in outputs)]


@pattern("ask for `output_hidden_states=True`")
def hidden_states(plan: str) -> Any:
    parallel = shoal.parallelize(llama(), plan)
    with torch.no_grad():
        return parallel(TOKENS, output_hidden_states=True).logits


# -- pipelines ---------------------------------------------------------------------------------------


def _with_hidden(output: Any, targets: Tensor, number: int) -> Tensor:
    value: Tensor = next_token_loss(output.logits, targets) + output.hidden_states[number].square().mean()
    return value


@pattern("a loss over `output.hidden_states[-1]`")
def last_hidden_state(plan: str, number: int = -1) -> Any:
    parallel = shoal.parallelize(llama(), plan)
    pairs = [
        ({"input_ids": each, "output_hidden_states": True}, each.roll(-1, 1)) for each in TOKENS.split(2)
    ]
    return _after_steps(parallel, pairs, lambda output, targets: _with_hidden(output, targets, number))


@pattern("a loss over other elements of `output.hidden_states`")
def other_hidden_states(plan: str) -> Any:
    return last_hidden_state(plan, 1)


class Returning(Decoder):
    """A model that calls its blocks by names, and returns more or other things than logits."""

    def __init__(self, wanted: str) -> None:
        super().__init__(lambda: Attention("width"))
        self.wanted = wanted
        self.blocks = nn.ModuleList(Masked() for _ in range(4))

    def forward(self, tokens: Tensor, mask: Tensor) -> Any:
        hidden = [self.embed(tokens)]
        for block in self.blocks:
            hidden.append(block(mask=mask, hidden=hidden[-1]))
        logits = self.head(hidden[-1])
        if self.wanted == "hidden":
            return {"logits": logits, "hidden": hidden}
        if self.wanted == "objects":
            return defaultdict(list, logits=logits, sizes=np.array(logits.shape), names={"logits"})
        return Answer(logits) if self.wanted == "class" else logits


class Masked(nn.Module):
    """A layer whose hidden state comes by its name, after another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden)) * mask


class Answer:
    """An output of the user's own class."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


MASK = torch.linspace(0, 1, 4 * LENGTH).view(4, LENGTH, 1)


def _returned(plan: str, wanted: str) -> Any:
    torch.manual_seed(0)
    parallel = shoal.parallelize(Returning(wanted), plan)
    with torch.no_grad():
        return parallel(TOKENS, MASK)


@pattern("blocks that are called by names, the hidden state after a mask")
def called_by_names(plan: str) -> Any:
    torch.manual_seed(0)
    parallel = shoal.parallelize(Returning("logits"), plan)
    pairs = [
        ((tokens, mask), tokens.roll(-1, 1))
        for tokens, mask in zip(TOKENS.split(2), MASK.split(2), strict=True)
    ]
    return [*_after_steps(parallel, pairs, next_token_loss), _returned(plan, "logits")]


@pattern("a model that returns the hidden states of its blocks beside the logits")
def returned_hidden_states(plan: str) -> Any:
    return _returned(plan, "hidden")


@pattern("a model that returns a `defaultdict`, NumPy arrays, sets, or an object of its own class")
def returned_objects(plan: str) -> Any:
    objects, own = _returned(plan, "objects"), _returned(plan, "class")
    assert objects["names"] == {"logits"}
    return [objects["logits"], objects["sizes"].tolist(), own.logits]


@pattern("ask for some logits with `logits_to_keep=2`")
def some_logits(plan: str) -> Any:
    parallel = shoal.parallelize(llama(), plan)
    with torch.no_grad():
        return logits_of(parallel(TOKENS, logits_to_keep=2))


@pattern("ask for some logits of a sequence that is split with `logits_to_keep=2`")
def some_logits_of_parts(plan: str) -> Any:
    return some_logits(plan)


@pattern("ask for tuples with `return_dict=False`")
def tuples(plan: str) -> Any:
    parallel = shoal.parallelize(llama(), plan)
    with torch.no_grad():
        return logits_of(parallel(TOKENS, return_dict=False)[0])


@pattern("evaluate within `torch.inference_mode()`, then train")
def inference_mode(plan: str) -> Any:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    parallel = shoal.parallelize(llama(rope_parameters=rope), plan)
    with torch.inference_mode():
        logits = logits_of(parallel(TOKENS[:, :8])).clone()
    pairs = [(each, each.roll(-1, 1)) for each in TOKENS.split(2)]
    return [logits.tolist(), *_after_steps(parallel, pairs, next_token_loss)]


@pattern("a first micro-batch whose labels all are -100")
def nothing_counts(plan: str) -> Any:
    parallel = shoal.parallelize(llama(), plan)
    ignored = torch.full_like(TOKENS, -100)
    with torch.no_grad():
        first = parallel(input_ids=TOKENS, labels=ignored)
        second = parallel(input_ids=TOKENS, labels=TOKENS)
    return [float(first.loss.isnan()), second.loss.item()]


@pattern("call `loss.backward()` on the output")
def backward_in_a_pipeline(plan: str) -> Any:
    parallel = shoal.parallelize(Decoder(lambda: Attention("width")), plan)
    next_token_loss(parallel(TOKENS), TARGETS).backward()
    return parallel.gradient_norm()


@pattern("inputs of `forward_backward` that are mappings or tuples")
def kinds_of_inputs(plan: str) -> Any:
    parallel = shoal.parallelize(Mixed(), plan)
    shift = torch.linspace(-1, 1, LENGTH).expand(4, -1)
    mappings = [
        ({"tokens": tokens, "shift": shifts, "factor": 2.0}, targets)
        for tokens, shifts, targets in zip(TOKENS.split(1), shift.split(1), TARGETS.split(1), strict=True)
    ]
    tuples = [((each["tokens"], each["shift"]), targets) for each, targets in mappings]
    loss = lambda output, targets: next_token_loss(output["logits"], targets)  # noqa: E731
    results = []
    for pairs in (mappings, tuples):
        results += _after_steps(parallel, pairs, loss)
        parallel.zero_grad()
    return results


@pattern("micro-batches of different lengths")
def lengths(plan: str) -> Any:
    parallel = shoal.parallelize(Decoder(lambda: Attention("width")), plan)
    pairs = [
        (tokens[:, :length], targets[:, :length])
        for tokens, targets, length in zip(TOKENS.split(1), TARGETS.split(1), (12, 5, 9, 5), strict=True)
    ]
    results = []
    for step in (pairs, pairs[::-1]):
        results += _after_steps(parallel, step, next_token_loss)
        parallel.zero_grad()
    return results


class Cut(Decoder):
    """A model that leaves out what follows the last token that is not 0."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens[:, : int(tokens.any(0).nonzero().max()) + 1])


@pattern("a hidden state whose shape depends on values in a tensor")
def shape_of_values(plan: str) -> Any:
    parallel = shoal.parallelize(Cut(lambda: Attention("width")), plan)
    short = TOKENS.clone()
    short[:, 6:] = 0
    with torch.no_grad():
        parallel(TOKENS)
        return parallel(short)


class Outside(Decoder):
    """A model whose residual sums stand outside of its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


@pattern("`hidden = hidden + block(hidden)`: a residual sum outside of the block")
def residual_outside(plan: str) -> Any:
    parallel = shoal.parallelize(Outside(lambda: Attention("width")), plan)
    with torch.no_grad():
        return parallel(TOKENS)


@pattern("dynamic rotary embeddings, whose frequencies follow the longest sample so far")
def dynamic_rotary(plan: str) -> Any:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    parallel = shoal.parallelize(llama(rope_parameters=rope), plan)
    pairs = [
        (tokens[:, :length], targets[:, :length])
        for tokens, targets, length in zip(TOKENS.split(1), TARGETS.split(1), (12, 10, 4, 9), strict=True)
    ]
    results = []
    for step in (pairs[:2], pairs[1:3], pairs[2:]):
        results += _after_steps(parallel, step, next_token_loss)
        parallel.zero_grad()
    return results


# -- batches -----------------------------------------------------------------------------------------


@dataclass
class Batch:
    tokens: Tensor
    others: tuple[Tensor, dict[str, Any]]


@pattern("`model.local(batch)` of dicts, tuples and dataclasses")
def local_batches(plan: str) -> Any:
    parallel = shoal.parallelize(nn.Linear(2, 2), plan)
    names = ["a", "b", "c", "d"]
    batch = Batch(TOKENS, (TARGETS, {"names": names, "weight": torch.tensor(2.0), "shift": TOKENS[:1]}))
    mine = parallel.local(batch)
    others = mine.others[1]
    first = parallel.axes.dp.index * len(mine.tokens)
    assert others["names"] == names[first : first + len(mine.tokens)]
    assert others["weight"] == 2
    assert torch.equal(others["shift"], TOKENS[:1])
    whole = []
    for tensor in (mine.tokens, mine.others[0]):
        parts = torch.zeros_like(TOKENS)
        parts[first : first + len(tensor)] = tensor
        parallel.axes.dp.all_reduce(parts, "rows").wait()
        whole.append(parts)
    return whole


@pattern("tensors of different numbers of rows in `model.local(batch)`")
def unequal_rows(plan: str) -> Any:
    return shoal.parallelize(nn.Linear(2, 2), plan).local({"tokens": TOKENS, "targets": TARGETS[:3]})


@pattern(
    "an object with tensors, which is no dataclass, in `model.local(batch)` or `model.local_sequence(batch)`"
)
def hidden_tensors(plan: str) -> Any:
    parallel = shoal.parallelize(llama() if "cp" in plan else net(), plan)
    batch = {"tokens": TOKENS, "more": SimpleNamespace(targets=TARGETS)}
    return parallel.local(parallel.local_sequence(batch))


# -- tensor parallelism ------------------------------------------------------------------------------


@pattern("attention with `view(B, T, heads, head_dim)`")
def heads_by_numbers(plan: str) -> Any:
    parallel = shoal.parallelize(Decoder(lambda: Attention("numbers")), plan)
    return _after_step(parallel, plan, next_token_loss)


@pattern("attention with `view(B, T, heads, -1)`")
def heads_by_their_number(plan: str) -> Any:
    parallel = shoal.parallelize(Decoder(lambda: Attention("heads")), plan)
    return _after_step(parallel, plan, next_token_loss)


@pattern("attention with `unflatten(-1, (heads, head_dim))`")
def heads_unflattened(plan: str) -> Any:
    parallel = shoal.parallelize(Decoder(lambda: Attention("unflatten")), plan)
    return _after_step(parallel, plan, next_token_loss)


@pattern("attention with `chunk(heads, -1)`")
def heads_in_chunks(plan: str) -> Any:
    parallel = shoal.parallelize(Decoder(lambda: Attention("chunks")), plan)
    return _after_step(parallel, plan, next_token_loss)


@pattern("attention with `view(*y.shape[:-1], -1, head_dim)`")
def heads_by_width(plan: str) -> Any:
    parallel = shoal.parallelize(Decoder(lambda: Attention("width")), plan)
    return _after_step(parallel, plan, next_token_loss)


@pattern("latent attention (MLA), with its layout")
def latent_attention(plan: str) -> Any:
    return _after_step(shoal.parallelize(Decoder(Latent), plan), plan, next_token_loss)


@pattern("`generate()` of a model of transformers, within `gathered()`")
def generated(plan: str) -> Any:
    parallel = shoal.parallelize(llama(), plan)
    first = TOKENS[:1, :4]
    with parallel.gathered(), torch.no_grad():
        made = parallel.module.generate(first, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return made.tolist()


@pattern("call `model` itself, such as its `generate()`")
def called_by_itself(plan: str) -> Any:
    return generated(plan)


@pattern("latent attention (MLA) of transformers")
def latent_attention_of_transformers(plan: str) -> Any:
    import transformers

    config = transformers.DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=2,
    )
    model = _sharp(transformers.DeepseekV2ForCausalLM, config)
    return _after_step(shoal.parallelize(model, plan), plan, next_token_loss)


@pattern("shared experts of transformers")
def shared_experts(plan: str) -> Any:
    import transformers

    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=1,
    )
    model = _sharp(transformers.Ernie4_5_MoeForCausalLM, config)
    return _after_step(shoal.parallelize(model, plan), plan, next_token_loss)


@pattern("a loss of one's own: label smoothing, `log_softmax`, slices of the logits")
def own_loss(plan: str) -> Any:
    def loss(logits: Any, targets: Tensor) -> Tensor:
        smooth = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
        entropy = F.log_softmax(logits[:, 1:], -1).exp().square().sum(-1).mean()
        return smooth + entropy + 0.01 * (logits * logits).mean()

    parallel = shoal.parallelize(Decoder(lambda: Attention("width")), plan)
    return _after_step(parallel, plan, loss)


@pattern("the gradient of `inputs_embeds`, as of a prompt that is trained")
def gradient_of_embeddings(plan: str) -> Any:
    parallel = shoal.parallelize(llama(), plan)
    prompt = torch.linspace(-1, 1, LENGTH * WIDTH).view(1, LENGTH, WIDTH).requires_grad_(True)
    embeds = prompt * torch.arange(1, 5)[:, None, None]
    output = parallel(inputs_embeds=parallel.local(embeds))
    (next_token_loss(output, parallel.local(TARGETS)) / parallel.axes.dp.size).backward()
    assert prompt.grad is not None
    parallel.axes.dp.all_reduce(prompt.grad, "prompt").wait()
    return [prompt.grad, parallel.gradient_norm() * parallel.axes.dp.size]


# -- the module itself -------------------------------------------------------------------------------


@pattern("`children()`, `apply(function)`, `train()` and `eval()`")
def children(plan: str) -> Any:
    model = Decoder(lambda: Attention("width"))
    expected = list(model.named_children())
    parallel = shoal.parallelize(model, plan)
    assert list(parallel.named_children()) == expected
    assert list(parallel.children()) == [child for _, child in expected]
    for mode, change in ((False, parallel.eval), (True, parallel.train)):
        assert change() is parallel
        seen: list[nn.Module] = []
        assert parallel.apply(seen.append) is parallel
        assert seen[-1] is model
        assert set(seen) == set(model.modules())
        assert {each.training for each in (parallel, *seen)} == {mode}
    return len(expected)


@pattern("`named_modules()` and `get_submodule()` beside `named_parameters()`")
def names(plan: str) -> Any:
    model = Decoder(lambda: Attention("width"))
    expected = [name for name, _ in model.named_modules()]
    parallel = shoal.parallelize(model, plan)
    assert [name for name, _ in parallel.named_modules()] == expected
    modules = dict(parallel.named_modules())
    for name, parameter in parallel.named_parameters():
        holder, _, key = name.rpartition(".")
        assert key in dict(modules[holder].named_parameters())
        assert parallel.get_submodule(holder) is modules[holder]
        assert parallel.get_parameter(name) is parameter
    return len(modules)


@pattern("`model.load_state_dict(model.state_dict())`, also of another model under the same Plan")
def states_of_ranks(plan: str) -> Any:
    parallel, other = (shoal.parallelize(llama(), plan) for _ in range(2))
    with torch.no_grad():
        for each in parallel.parameters():
            each.mul_(2)
    other.load_state_dict(parallel.state_dict())
    kept = copy.deepcopy(other.state_dict())
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    other.load_state_dict(kept)
    with torch.no_grad():
        return [logits_of(each(TOKENS)) for each in (parallel, other)]


@pattern("read an attribute of the model, such as `model.config`")
def attributes(plan: str) -> Any:
    return shoal.parallelize(llama(), plan).config.hidden_size


@pattern("`copy.deepcopy(model)`")
def copies(plan: str) -> Any:
    return copy.deepcopy(shoal.parallelize(nn.Linear(2, 2), plan))


@pattern("`model.half()` and `model.to(torch.bfloat16)`")
def casts(plan: str) -> Any:
    parallel = shoal.parallelize(nn.Linear(2, 2), plan)
    try:
        parallel.half()
    except shoal.errors.LayoutError:
        return parallel.to(torch.bfloat16)


def penalised(plan: str, place: str) -> Any:
    """Weights after three steps with a penalty on `model`'s weights, listed once, or on `parameters()`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    parallel = shoal.parallelize(model, plan)
    weights = list(parallel.parameters() if place == "owned" else model.parameters())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        chance = torch.Generator().manual_seed(step)
        inputs, targets = parallel.local(
            (torch.randn(4, 6, generator=chance), torch.randn(4, 3, generator=chance))
        )
        penalty = torch.zeros(())
        for late in (False, True):
            if late:
                loss = F.mse_loss(parallel(inputs), targets)
            if late is (place == "late"):
                squares = [each.square().sum() for each in weights]
                penalty = sum(
                    each.full_tensor() if hasattr(each, "full_tensor") else each for each in squares
                )
        (loss + 0.1 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    with parallel.gathered():
        return [each.detach().clone() for each in model.parameters()]


@pattern("a penalty on weights of `model` that were listed once, before the forward")
def penalty_before(plan: str) -> Any:
    return penalised(plan, "early")


@pattern("a penalty on weights of `model` that were listed once, after the forward")
def penalty_after(plan: str) -> Any:
    return penalised(plan, "late")


@pattern("a penalty on `parameters()` of what `shoal.parallelize` returned")
def penalty_on_parts(plan: str) -> Any:
    return penalised(plan, "owned")


def penalised_parts(plan: str, *, is_owned: bool, is_pipeline: bool = False) -> Any:
    sizes = {"hidden": WIDTH, "heads": HEADS, "kv_heads": HEADS, "ffn": WIDTH, "vocab_size": VOCABULARY}
    model = build("tiny", overrides={"layers": 2, "seq": LENGTH, **sizes})
    model.initialize(0)
    parallel = shoal.parallelize(model, plan)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        weights = (parallel if is_owned else parallel.module).parameters()
        # Each rank's loss has the terms of its own parts: their gradients are those of the sum.
        squares = sum((each.square().sum() for each in weights), torch.zeros(()))
        return next_token_loss(logits, targets) + 0.1 * (squares - squares.detach())

    if is_pipeline:
        return _after_steps(parallel, [(TOKENS, TARGETS)] * 2, loss)
    return _after_step(parallel, plan, loss)


@pattern("a penalty on weights of `model` that tp does not split")
def penalty_on_summed(plan: str) -> Any:
    return penalised_parts(plan, is_owned=False)


@pattern("a penalty on `parameters()` of a model that is split")
def penalty_on_split_parts(plan: str) -> Any:
    return penalised_parts(plan, is_owned=True)


@pattern("a penalty on weights in the loss of a pipeline")
def penalty_in_pipeline(plan: str) -> Any:
    return penalised_parts(plan, is_owned=True, is_pipeline=True)


@pattern("`torch.optim.LBFGS`, whose line search compares losses")
def line_search(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    optimizer = torch.optim.LBFGS(parallel.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(parallel)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(2)]


def written(plan: str, *, is_gathered: bool) -> Any:
    """Weights after a step, in-place writes to weights of `model`, and two more steps."""
    parallel = shoal.parallelize(net(), plan)
    optimizer = momentum(parallel)
    _step(optimizer, _loss(parallel))
    with parallel.gathered() if is_gathered else nullcontext(), torch.no_grad():
        torch.manual_seed(3)
        nn.init.normal_(parallel.module[0].weight)
        parallel.module[2].weight.mul_(0.5)
    for _ in range(2):
        _step(optimizer, _loss(parallel))
    return _weights(parallel)


@pattern(
    "write weights of `model` in place within `gathered()`, the same on all ranks: `nn.init`, weights of "
    "another model"
)
def written_gathered(plan: str) -> Any:
    return written(plan, is_gathered=True)


@pattern("write weights within `gathered()` that is nested, ends with an error, or has steps within it")
def written_in_turns(plan: str) -> Any:
    def write(factor: float) -> None:
        with torch.no_grad():
            for each in parallel.module.parameters():
                each.mul_(factor)

    parallel = shoal.parallelize(net(), plan)
    optimizer = momentum(parallel)
    with parallel.gathered():
        write(2.0)
        with parallel.gathered():
            write(0.5)
        write(0.5)
    _step(optimizer, _loss(parallel))
    with suppress(ValueError), parallel.gathered():
        write(2.0)
        raise ValueError
    with parallel.gathered():
        write(0.5)
        for _ in range(2):
            _step(optimizer, _loss(parallel))
    return _weights(parallel)


@pattern(
    "write weights of `model` through `.data` within `gathered()`: `weight.data = value`, "
    "`weight.data.mul_()`, `vector_to_parameters`; write `parameters()` there"
)
def written_through_data(plan: str) -> Any:
    parallel = shoal.parallelize(Decoder(lambda: Attention("width")), plan)
    optimizer, found = momentum(parallel), []
    weights = list(parallel.module.parameters())

    def step() -> None:
        found.append(_after_step(parallel, plan, next_token_loss))
        optimizer.step()
        optimizer.zero_grad()

    step()
    with parallel.gathered():
        before = [each.data for each in weights]
        for each in weights[::2]:
            each.data = each.data * 2
        for each in weights[1::2]:
            each.data.mul_(0.5)
    step()
    with parallel.gathered():
        for each, value in zip(weights[::2], before[::2], strict=True):
            each.data = value
        vector = nn.utils.parameters_to_vector(weights)
        nn.utils.vector_to_parameters(vector * 1.5, weights)
    step()
    with parallel.gathered(), torch.no_grad():
        for parameter in parallel.parameters():
            parameter.mul_(0.5)
    step()
    return found


@pattern("assign to `.data` of weights of `model` outside of `gathered()`")
def assigned_outside(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    _step(momentum(parallel), _loss(parallel))
    for each in parallel.module.parameters():
        each.data = each.data * 2
    return _loss(parallel)


@pattern("write weights of `model` in place outside of `gathered()`")
def written_outside(plan: str) -> Any:
    return written(plan, is_gathered=False)


# -- loops of training -------------------------------------------------------------------------------

SAMPLES = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
SORTED = SAMPLES.sort().values


def net(seed: int = 0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, width))


def momentum(parallel: Parallel) -> torch.optim.Optimizer:
    return torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)


def _loss(parallel: Parallel, inputs: Tensor = SAMPLES) -> Tensor:
    inputs, targets = parallel.local((inputs, SORTED))
    return F.mse_loss(parallel(inputs), targets)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _weights(*models: Parallel) -> list[Tensor]:
    """All weights of models, as the optimizers have them, equal on every rank."""
    found = []
    for each in models:
        for parameter in each.parameters():
            whole: Any = parameter.detach()
            found.append(whole.full_tensor() if hasattr(whole, "full_tensor") else whole.clone())
    return found


@pattern("two forwards before one backward, or before two; other losses and `torch.no_grad()` between them")
def two_forwards(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    optimizer = momentum(parallel)
    for _ in range(2):
        inputs, targets = parallel.local((SAMPLES, SORTED))
        first, second = parallel(inputs), parallel(inputs.flip(1))
        with torch.no_grad():
            fixed = parallel(inputs * 2)
        with parallel.accumulate():
            F.mse_loss(first, targets).backward(retain_graph=True)
        _step(optimizer, (first - second).square().mean() + F.mse_loss(second, fixed))
    return _weights(parallel)


@pattern("a gradient penalty: `torch.autograd.grad(..., create_graph=True)` with respect to inputs")
def penalty(plan: str) -> Any:
    parallel = shoal.parallelize(net(width=1), plan)
    optimizer = momentum(parallel)
    for _ in range(2):
        inputs = parallel.local(SAMPLES).clone().requires_grad_()
        output = parallel(inputs)
        (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        _step(optimizer, output.mean() + (gradient.norm(dim=1) - 1).square().mean())
    return _weights(parallel)


@pattern("a gradient penalty over a model that is split, with respect to a hidden state")
def split_penalty(plan: str) -> Any:
    parallel = shoal.parallelize(llama(), plan)
    kept: list[Tensor] = []
    parallel.module.model.layers[0].register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    output = parallel(parallel.local(TOKENS))
    (gradient,) = torch.autograd.grad(output.logits.sum(), kept[-1], create_graph=True)
    gradient.square().sum().backward()


@pattern("`torch.autograd.grad` with respect to parameters")
def gradients_of_parameters(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    return torch.autograd.grad(_loss(parallel), list(parallel.parameters()))


@pattern("a generator and a discriminator, which is frozen for the generator's step")
def adversaries(plan: str) -> Any:
    maker, judge = shoal.parallelize(net(), plan), shoal.parallelize(net(1, width=1), plan)
    makes, judges = momentum(maker), momentum(judge)
    for _ in range(3):
        inputs = maker.local(SAMPLES)
        made = maker(inputs)
        judge.requires_grad_(True)
        _step(judges, F.softplus(judge(made.detach())).mean() + F.softplus(-judge(inputs)).mean())
        judge.requires_grad_(False)
        _step(makes, F.softplus(-judge(made)).mean())
    return _weights(maker, judge)


@pattern("a frozen reference model beside the trained one, as for DPO")
def reference(plan: str) -> Any:
    policy = shoal.parallelize(net(), plan)
    frozen = shoal.parallelize(net(1).requires_grad_(False), plan)
    optimizer = momentum(policy)
    for _ in range(2):
        inputs = policy.local(SAMPLES)
        _step(optimizer, -F.logsigmoid((policy(inputs) - frozen(inputs)).sum(1)).mean())
    return _weights(policy)


@pattern("gradual unfreezing: `requires_grad_(False)` on parameters after `parallelize`, later `True`")
def unfreezing(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    optimizer = momentum(parallel)
    lower = [each for name, each in parallel.named_parameters() if not name.startswith("4")]
    for trains in (False, True, False, True):
        for each in lower:
            each.requires_grad_(trains)
        _step(optimizer, _loss(parallel))
    return _weights(parallel)


@pattern(
    "gradual unfreezing by `requires_grad_()` on modules: `model.module.requires_grad_(False)`, later `True`"
)
def unfreezing_modules(plan: str) -> Any:
    parallel = shoal.parallelize(Decoder(lambda: Attention("width")), plan)
    optimizer = momentum(parallel)
    found = []
    for trains in (False, True, False, True):
        parallel.module.embed.requires_grad_(trains)
        parallel.module.blocks[:2].requires_grad_(trains)
        found.append(_after_step(parallel, plan, next_token_loss))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pattern("train parameters that were frozen before `parallelize`")
def released(plan: str) -> Any:
    model = net()
    model[0].requires_grad_(False)
    parallel = shoal.parallelize(model, plan)
    for each in parallel.parameters():
        each.requires_grad_(True)
    _step(momentum(parallel), _loss(parallel))
    return _weights(parallel)


@pattern("swap in an average of the weights by `parameter.data = average[name]`, and back")
def swapped(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    optimizer = momentum(parallel)
    named = dict(parallel.named_parameters())
    average = {name: each.data.clone() for name, each in named.items()}
    for _ in range(2):
        _step(optimizer, _loss(parallel))
        average = {name: 0.9 * average[name] + 0.1 * each.data for name, each in named.items()}
    trained = {name: each.data for name, each in named.items()}
    for name, each in named.items():
        each.data = average[name]
    with torch.no_grad():
        averaged = parallel(SAMPLES)
    found = _weights(parallel)
    for name, each in named.items():
        each.data = trained[name]
    _step(optimizer, _loss(parallel))
    return [averaged, *found, *_weights(parallel)]


@pattern("swap in half of the weights of a model that is split by `parameter.data = value`, and back")
def swapped_parts(plan: str) -> Any:
    parallel = shoal.parallelize(Decoder(lambda: Attention("width")), plan)
    optimizer, found = momentum(parallel), []
    for factor in (0.5, None):
        found.append(_after_step(parallel, plan, next_token_loss))
        optimizer.step()
        optimizer.zero_grad()
        trained = {each: each.data for each in parallel.parameters()}
        for each in trained if factor is not None else ():
            each.data = each.data * factor
        found.append(_after_step(parallel, plan, next_token_loss))
        optimizer.zero_grad()
        for each, value in trained.items():
            each.data = value
    return found


@pattern("`torch.optim.swa_utils.AveragedModel(model)`")
def averaged_model(plan: str) -> Any:
    return torch.optim.swa_utils.AveragedModel(shoal.parallelize(net(), plan))


@pattern("`clip_grad_value_`, `clip_grad_norm_`, and gradients changed in place")
def clipped(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    optimizer = momentum(parallel)
    for clip in (
        lambda: nn.utils.clip_grad_norm_(parallel.parameters(), 0.05),
        lambda: nn.utils.clip_grad_value_(parallel.parameters(), 0.01),
        lambda: [each.grad.mul_(0.5) for each in parallel.parameters()],
    ):
        _loss(parallel).backward()
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return _weights(parallel)


@pattern("assign to `.data` of gradients: `parameter.grad.data = value`")
def assigned_gradients(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    optimizer = momentum(parallel)
    for keeps in (False, True, False):
        _loss(parallel).backward()
        for each in parallel.parameters():
            each.grad.data = each.grad.data * 0.5
        optimizer.step()
        if not keeps:
            optimizer.zero_grad()
    return _weights(parallel)


@pattern("a layer or a parameter that `model` gets after `parallelize`: adapters, `weight_norm`, a new head")
def grown(plan: str) -> Any:
    model = net()
    shoal.parallelize(model, plan)
    for grow in (
        lambda: setattr(model[0], "weight", nn.Parameter(torch.ones(16, 8))),
        lambda: setattr(model[4], "scale", nn.Parameter(torch.ones(8))),
        lambda: nn.utils.parametrizations.weight_norm(model[2]),
    ):
        with suppress(shoal.errors.LayoutError):
            grow()
            return "it was taken"
    return model.append(nn.Linear(8, 8))


@pattern("merge adapters of peft into the weights within `gathered()`, also with `safe_merge=True`, and save")
def merged_adapters(plan: str) -> Any:
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["0", "4"], init_lora_weights=False)
    parallel = shoal.parallelize(peft.get_peft_model(net(), settings), plan)
    _step(momentum(parallel), _loss(parallel))
    found = []
    for is_safe in (False, True):
        with parallel.gathered():
            parallel.module.merge_adapter(safe_merge=is_safe)
        saved = parallel.full_state_dict()  # on rank 0
        with parallel.gathered(), torch.no_grad():
            for name, value in parallel.module.state_dict().items():
                whole = saved.get(name, torch.zeros_like(value))
                parallel.axes.world.all_reduce(whole, "saved").wait()
                found += [value.clone(), whole]
            found.append(parallel(SAMPLES))
            parallel.module.unmerge_adapter()
    return found


@pattern("`model.module.zero_grad()`")
def inner_zero_grad(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    optimizer = momentum(parallel)
    for _ in range(2):
        parallel.module.zero_grad()
        _loss(parallel).backward()
        optimizer.step()
    return _weights(parallel)


@pattern("hooks on modules, which change inputs, outputs and gradients")
def module_hooks(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    first, *_, last = parallel.module
    first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    last.register_forward_hook(lambda module, inputs, output: output * 0.5)
    last.register_full_backward_hook(lambda module, before, after: (before[0] * 2,))
    optimizer = momentum(parallel)
    for _ in range(2):
        _step(optimizer, _loss(parallel))
    return _weights(parallel)


@pattern("`torch.compile` of the object that `parallelize` returned")
def compiled(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    call, optimizer = torch.compile(parallel, backend="eager"), momentum(parallel)
    for _ in range(2):
        inputs, targets = parallel.local((SAMPLES, SORTED))
        _step(optimizer, F.mse_loss(call(inputs), targets))
    return _weights(parallel)


@pattern("`torch.func.functional_call(model.module, weights, inputs)` with weights of one's own")
def functional(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    weights = dict(net(5).named_parameters())
    return torch.func.functional_call(parallel.module, weights, (SAMPLES,)).detach()


def per_sample(plan: str) -> Any:
    """Gradients of each sample's loss, on every rank."""
    parallel = shoal.parallelize(net(), plan)
    weights = {name: each.detach() for name, each in parallel.module.named_parameters()}

    def loss(weights: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(parallel.module, weights, (sample[None],)), target[None])

    found = torch.vmap(torch.func.grad(loss), (None, 0, 0))(weights, SAMPLES, SORTED)
    return list(found.values())


pattern("`torch.func.grad` for gradients per sample")(per_sample)
pattern("`torch.func.grad` over a model whose weights are cut")(per_sample)


@pattern("a frozen reference model that is split")
def split_reference(plan: str) -> Any:
    model = Decoder(lambda: Attention("width")).requires_grad_(False)
    return next_token_loss(shoal.parallelize(model, plan)(TOKENS), TARGETS)


@pattern("an error in a step on all ranks, and `model.zero_grad()` before the next step")
def error_in_a_step(plan: str) -> Any:
    def stop(*_: Any) -> None:
        raise ValueError("a bad batch")

    parallel = shoal.parallelize(net(), plan)
    optimizer = momentum(parallel)
    for register in (
        parallel.module[2].register_forward_hook,
        parallel.module[2].register_full_backward_hook,
    ):
        handle = register(stop)
        try:
            _loss(parallel).backward()
        except ValueError:
            parallel.zero_grad()
        handle.remove()
        _step(optimizer, _loss(parallel))
    return _weights(parallel)


@pattern("an error in a backward, and the next backward without `model.zero_grad()`")
def error_without_zero_grad(plan: str) -> Any:
    def stop(*_: Any) -> None:
        raise ValueError("a bad batch")

    parallel = shoal.parallelize(net(), plan)
    handle = parallel.module[2].register_full_backward_hook(stop)
    try:
        _loss(parallel).backward()
    except ValueError:
        handle.remove()
    _loss(parallel).backward()


@pattern("leave a step out on one rank only")
def skipped_on_one_rank(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    if parallel.axes.dp.index == 0:
        _loss(parallel).backward()
    return parallel.full_state_dict()


@pattern("leave `optimizer.step()` out on one rank only, and clip or save later")
def optimizer_skipped_on_one_rank(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    optimizer = momentum(parallel)
    for step in range(3):
        _loss(parallel).backward()
        parallel.clip_gradients(1.0)
        if step != 1 or parallel.axes.dp.index == 0:
            optimizer.step()
        optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        shoal.save(folder, parallel, optimizer, step=3)


@pattern("`torch.save(model.module)`, and `torch.save(model)`")
def saved_whole(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    try:
        torch.save(parallel.module, io.BytesIO())
    except shoal.errors.LayoutError:
        torch.save(parallel, io.BytesIO())


@pattern("`model.module.half()`")
def inner_cast(plan: str) -> Any:
    return shoal.parallelize(net(), plan).module.half()


@pattern("lay a model over ranks twice, or a model that DistributedDataParallel wraps")
def twice(plan: str) -> Any:
    try:
        shoal.parallelize(nn.parallel.DistributedDataParallel(net()), plan)
    except shoal.errors.LayoutError:
        parallel = shoal.parallelize(net(), plan)
        try:
            shoal.parallelize(parallel, plan)
        except shoal.errors.LayoutError:
            shoal.parallelize(parallel.module, plan)


@pattern("a loss that is not one number")
def loss_of_many_numbers(plan: str) -> Any:
    parallel = shoal.parallelize(net(), plan)
    pairs = zip(SAMPLES.split(4), SORTED.split(4), strict=True)
    parallel.forward_backward(pairs, 2, lambda output, targets: (output - targets).square())

"""A copy of a model for a few small forwards, which tell what the model does with a sequence.

What a model mixes along a sequence stands in its code, which nobody can list. So it is asked: a forward of
some tokens, and the same forward with a change. These forwards leave no trace. They run on a copy, without
the user's hooks, with random generators that are put aside: in evaluation mode without gradients, or in
training mode without dropout. The copy shares the model's values and nothing else; values that are all zero,
which would hide what lies behind them, are random in the copy. A Hugging Face model that is large or has no
values yet is represented by a smaller one of its class and configuration.

Results count as equal if they differ by less than rounding can explain: `_ROUNDINGS` times the resolution of
fp32, relative to the largest value. What the probes look for is hundreds of times larger.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.data.permutation import generators_put_aside, seed_generators
from shoal.models.dropout import Dropout
from shoal.models.task import tensors_in

_ROUNDINGS = 1 << 10
"""Sums in another order were up to 16 resolutions of fp32 apart, over 150 kinds of models."""

LARGE = 1 << 26
"""Parameters above which a smaller model represents one of Hugging Face: its forward takes a second."""

_DEVIATION = 0.02
_SEED = 20_251
_SMALLER = {  # entries of a configuration, with what is enough to see how a model treats a sequence
    "intermediate_size": 64,
    "ffn_dim": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size": 256,
}
_WINDOWS = re.compile("window|chunk_|local_attn|local_attention|index_topk$|index_block|block_size|budget")
_WINDOW = 4  # tokens
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@final
class Probe:
    """A copy of a model for small forwards.

    Args:
        model: The model; it is not changed. Its parameters may be on the meta device if it is Hugging Face's,
            or has a method `initialize_parameter`.
        device: Device of the copy.
        anew: Whether a Hugging Face model is represented by its class and configuration in any case; then it
            may be laid over ranks already.
        length: Tokens of the samples to come; a model that is made anew then has windows, chunks and
            selections of a few tokens if they are shorter than such a sample. 0 leaves them as they are.

    Attributes:
        module: The copy, in fp32 and in evaluation mode.
        is_new: Whether its values are new, and so equal on all ranks.
        has_small_windows: Whether windows shorter than `length` were made small.

    Raises:
        Exception: The model cannot be copied; any kind, as its own code raises it.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, *, anew: bool = False, length: int = 0
    ) -> None:
        with isolated(device), _quiet(), torch.no_grad():
            is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
            size = sum(parameter.numel() for parameter in model.parameters())
            self.is_new = is_hugging_face(model) and (anew or is_meta or size > LARGE)
            self.has_small_windows = self.is_new and length > 0
            if self.is_new:
                made = _like(model, length)
            elif is_meta:
                if size > LARGE:
                    raise ValueError(f"{size} parameters are on the meta device, too many for one rank")
                made = _filled(model, device)
            else:
                made = _copied(model)
            self.module = made.to(device).float().eval()
            for parameter in self.module.parameters():
                if parameter.requires_grad and not parameter.any():  # zeros would hide what they multiply
                    parameter.data = torch.randn_like(parameter).mul_(_DEVIATION)
        self.device = device

    def copy(self) -> Probe:
        """Return another copy with the same values."""
        other = copy.copy(self)
        other.module = _copied(self.module)
        return other

    def training_copy(self) -> Probe:
        """Return a copy in training mode, without dropout and with the running statistics of batches."""
        other = self.copy()
        for module in other.module.train().modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
            elif isinstance(module, Dropout | _DropoutNd):
                module.p = 0.0
        return other

    def inputs(self, length: int, seed: int = 0) -> Tensor:
        """Return an input of one sample: tokens `[1, length]`, or floats `[1, length, width]`."""
        generator = torch.Generator().manual_seed(seed)
        size = vocabulary_of(self.module)
        if size is not None:
            return self._unpadded(torch.randint(size, (1, length), generator=generator), size)
        widths = [each.in_features for each in self.module.modules() if isinstance(each, nn.Linear)]
        return torch.randn(1, length, *widths[:1], generator=generator).to(self.device)

    def changed(self, inputs: Tensor) -> Tensor:
        """Return other inputs of this shape, which differ at each position."""
        if inputs.is_floating_point():
            return inputs.flip(1) + 1
        size = vocabulary_of(self.module) or 2
        return self._unpadded((inputs + 1 + size // 3) % size, size)

    def _unpadded(self, tokens: Tensor, size: int) -> Tensor:
        padding = getattr(_text_config(self.module), "pad_token_id", None)
        tokens = tokens if padding is None else tokens.where(tokens != padding, (tokens + 1) % size)
        return tokens.to(self.device)

    def output(self, first: Any, *, seed: int = _SEED, named: Mapping[str, Any] | None = None) -> Any:
        """Return the copy's output, as it is."""
        with isolated(self.device, seed), _quiet(), torch.no_grad():
            return self.call(first, named)

    def call(self, first: Any, named: Mapping[str, Any] | None = None) -> Any:
        """Return the copy's output; further arguments that its forward requires are the first one again."""
        required = dict.fromkeys(required_arguments(self.module), first)
        return self.module(first, **{**required, **(named or {})})

    @contextmanager
    def training(self, *, seed: int = _SEED) -> Iterator[None]:
        """Compute in training mode within it, with gradients, without dropout; buffers come back after it."""
        buffers = {each: each.clone() for each in self.module.buffers()}
        rates = {each: each.p for each in self.module.modules() if isinstance(each, Dropout | _DropoutNd)}
        for layer in rates:
            layer.p = 0.0
        self.module.train()
        try:
            with isolated(self.device, seed), _quiet(), torch.enable_grad():
                yield
        finally:
            self.module.eval()
            for layer, rate in rates.items():
                layer.p = rate
            for buffer, before in buffers.items():
                buffer.data.copy_(before)

    def run(self, first: Any, *, seed: int = _SEED, named: Mapping[str, Any] | None = None) -> Tensor:
        """Return the output's first tensor of floats.

        Raises:
            ValueError: There is none, or it is not finite.
        """
        return first_floats(self.output(first, seed=seed, named=named))


def required_arguments(model: nn.Module) -> list[str]:
    """Return the names of the arguments that a model's forward requires, except the first one."""
    others = list(inspect.signature(model.forward).parameters.values())[1:]
    return [
        each.name
        for each in others
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]


def first_floats(output: Any) -> Tensor:
    """Return the first tensor of floats in an output, in fp32.

    Raises:
        ValueError: There is none, or it is not finite.
    """
    found = next((each for each in tensors_in(output) if each.is_floating_point() and each.dim()), None)
    if found is None:
        raise ValueError(f"its output, a {type(output).__name__}, holds no tensor of floats")
    if not bool(found.isfinite().all()):
        raise ValueError("its output is not finite")
    return found.float()


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, in units of what rounding can explain; above 1 the two differ."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = max(float(expected.abs().max()), 1e-6)
    return float((found - expected).abs().max()) / (scale * _ROUNDINGS * torch.finfo(torch.float32).eps)


def windows_below(model: nn.Module, length: int) -> int:
    """Return how many windows of a model of Hugging Face are shorter than a sample."""
    if not is_hugging_face(model):
        return 0
    config: Any = model.config
    return sum(value < length for _, _, value in _windows(vars(config)))


def cannot_probe(model: nn.Module, question: str, error: Exception) -> None:
    """Warn that a model could not be asked, and why."""
    reason = " ".join(str(error).split("\n\n")[0].split())[:300]
    warnings.warn(
        f"{type(model).__name__} could not be probed, and nothing else says whether {question}: a small "
        f"forward raised {type(error).__name__}: {reason}",
        stacklevel=2,
    )


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether a model is transformers' own, so that its class and configuration make another one."""
    return type(model).__module__.partition(".")[0] == "transformers" and hasattr(model, "config")


def vocabulary_of(model: nn.Module) -> int | None:
    """Return the number of different tokens that a model takes; None if it seems to take none."""
    size = getattr(_text_config(model), "vocab_size", None)
    if isinstance(size, int):
        return size
    tables = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    return tables[0] if tables else None


def _text_config(model: nn.Module) -> Any:
    """Return the configuration of the language model, also in a model that takes images too."""
    config: Any = getattr(model, "config", None)
    return getattr(config, "get_text_config", lambda: config)()


@contextmanager
def isolated(device: torch.device, seed: int = _SEED) -> Iterator[None]:
    """Compute in plain fp32, with all generators seeded, and leave both settings as they were."""
    precision = torch.get_float32_matmul_precision()
    own = device.type not in ("cpu", "meta")
    fork = torch.random.fork_rng([device], device_type=device.type) if own else nullcontext()
    with generators_put_aside(), fork, torch.autocast(device.type, enabled=False):
        torch.set_float32_matmul_precision("highest")
        seed_generators(seed)
        if own:
            torch.get_device_module(device).manual_seed(seed)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off warnings within it: the user's own forward will warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy that shares the values of parameters, without gradients and without the user's hooks."""
    known: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:  # deepcopy takes none with a graph
                known[id(value)] = value.detach().clone()
        for name in _HOOKS:
            hooks = vars(module).get(name, {})
            known[id(hooks)] = type(hooks)((key, each) for key, each in hooks.items() if not _is_users(each))
    return copy.deepcopy(model, known)


def _is_users(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # of a partial
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return owner.partition(".")[0] not in ("torch", "transformers", "shoal")


def _filled(model: Any, device: torch.device) -> nn.Module:
    """Return a copy of a model on the meta device with the values that its method gives."""
    made: nn.Module = copy.deepcopy(model).to_empty(device=device)
    for name, parameter in made.named_parameters():
        model.initialize_parameter(name, parameter, _SEED)
    return made


def _like(model: Any, length: int) -> nn.Module:
    """Return a model of the same class and configuration, with new values; a smaller one if it is large."""
    config = copy.deepcopy(model.config)
    for settings, name, value in _windows(vars(config)):
        if value < length:
            settings[name] = min(_WINDOW, value)
    config._attn_implementation = None  # fused kernels take no fp32; attention over ranks is not laid out
    make: Callable[[Any], nn.Module] = type(model)
    if _size(make, config) > LARGE:
        _shrink(config)
        if (size := _size(make, config)) > 8 * LARGE:
            raise ValueError(f"it has {size} parameters even with few layers")
    return make(config)


def _windows(settings: dict[Any, Any]) -> Iterator[tuple[dict[Any, Any], Any, int]]:
    """Yield the sizes of windows, chunks and selections of a configuration, each with its dict and name."""
    for name, value in settings.items():
        if isinstance(value, dict) or hasattr(value, "to_dict"):
            yield from _windows(value if isinstance(value, dict) else vars(value))
        elif _WINDOWS.search(str(name)) and type(value) is int:
            yield settings, name, value


def _size(make: Callable[[Any], nn.Module], config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make(copy.deepcopy(config)).parameters())


def _shrink(config: Any) -> None:
    """Leave as many layers as there are kinds of them, and less of what does not mix a sequence."""
    kinds = list(getattr(config, "layer_types", None) or ())
    layers = max((kinds.index(kind) + 1 for kind in kinds), default=2)
    before = config.num_hidden_layers
    if layers < before:
        for name, value in vars(config).items():
            if isinstance(value, list) and len(value) == before:
                setattr(config, name, value[:layers])
        config.num_hidden_layers = layers
    for name, size in _SMALLER.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(size, getattr(config, name)))
    for name in _TOKENS:
        if isinstance(token := getattr(config, name, None), int):
            setattr(config, name, token % config.vocab_size)

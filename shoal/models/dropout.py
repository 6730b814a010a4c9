"""Dropout whose mask depends neither on how batch and sequence are laid over ranks nor on the order of calls.

Whether an element is dropped follows from its coordinates alone: (seed, step, sample, position) are hashed
into a key for each token, (layer, channel) into a key for each channel of a layer, and the element is
dropped if the product of the two, modulo 2^64, is small. For a random odd multiplier the high bits of such
products are as good as independent from channel to channel (multiply-shift hashing: Dietzfelbinger et al.
1997, doi:10.1006/jagm.1997.0873), and each token has a multiplier of its own. The hash is the finaliser of
SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195).

All of it is arithmetic on 64-bit integers that wraps around, which every device does alike. What is as large
as the hidden state is touched four times: one product, one comparison, one scaling, one fill.

Keys are given with the call, not kept between calls, so that a forward that is recomputed has the same ones.

Random numbers from their position alone, the same on every kind of GPU and in any order of calls.

The generators of GPUs deal positions out to as many threads as the device has, so that devices of two kinds
draw different numbers from one seed. Here a hash of its position gives each pair of numbers 48 bits, and the
transform of Box and Muller (1958, doi:10.1214/aoms/1177706645) makes them normal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from shoal.errors import ModelError

STRIDE: Final = 0x9E3779B97F4A7C15 - 2**64
"""2^64 divided by the golden ratio, as a signed number: what SplitMix64 adds from draw to draw."""


class Dropout(nn.Module):
    """In training, zeroes elements with probability `p` and divides the others by `1 - p`.

    Args:
        p: Probability, at least 0 and below 1.
        name: Name that makes this layer's masks different from those of others; see `name_dropouts`.

    Raises:
        ModelError: `p` is not such a probability.
    """

    def __init__(self, p: float, name: str = "") -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ModelError(
                f"a layer cannot drop its input with probability {p}",
                possible="a probability of 0 or more, below 1",
                change="change `dropout`",
            )
        self.p = p
        self.name = name

    @property
    def name(self) -> str:
        """The layer's name."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self._salt = int.from_bytes(digest, "little", signed=True)
        # For graphs, because each number would be compiled into one of its own. No buffer, because
        # materialising a model would lose its value. On a CPU, because every device takes it from there as an
        # argument of the kernel, without a copy to wait for. With a value, also where tensors are fakes.
        with _disable_current_modes():
            self._graph_salt = torch.tensor(self._salt, dtype=torch.int64, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies are made of: the tensor follows from the name, wherever the copy is made."""
        return {name: value for name, value in vars(self).items() if name != "_graph_salt"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.name = state["_name"]

    def forward(self, hidden: Tensor, keys: Tensor | None = None) -> Tensor:
        """Drop elements of `hidden`.

        Args:
            hidden: Tensor `[batch, seq, channels]`, or of any shape that ends in channels.
            keys: Key of each token, `[batch, seq]`, from `token_keys`. None: keys come from torch's generator
                of the device, so masks are new in every call.

        Returns:
            A tensor with the shape and dtype of `hidden`; `hidden` itself outside training or with p = 0.

        Raises:
            ModelError: The shape of `keys` does not fit the tokens of `hidden`.
        """
        if not self.training or self.p == 0:
            return hidden
        if keys is None:
            keys = torch.randint(-(2**63), 2**63 - 1, hidden.shape[:-1], device=hidden.device)
        elif keys.shape != hidden.shape[:-1]:
            raise ModelError(
                f"dropout {self.name!r} got keys for tokens {list(keys.shape)}, and a hidden state of "
                f"{list(hidden.shape)}",
                possible=f"keys of shape {list(hidden.shape[:-1])}",
                change="make `token_keys` of the samples and positions that this forward sees",
            )
        scaled = hidden * (1 / (1 - self.p))
        return scaled.masked_fill_(self._dropped(keys, hidden.shape[-1]), 0)

    def extra_repr(self) -> str:
        """Return the text that `print(model)` shows."""
        return f"p={self.p}"

    def _dropped(self, keys: Tensor, channels: int) -> Tensor:
        """Return the mask `[batch, seq, channels]`, true where an element is dropped."""
        salt = self._graph_salt if torch.compiler.is_dynamo_compiling() else self._salt
        channel = mix(torch.arange(channels, device=keys.device) * STRIDE + salt)
        # Products are uniform over all signed numbers: a share p of them is below this.
        bound = -(2**63) + int(self.p * 2**64)
        return (keys | 1).unsqueeze(-1) * channel < bound


def name_dropouts(model: nn.Module) -> None:
    """Give each Dropout within `model` its name in `named_modules()`."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.name = name


def token_keys(seed: int, step: int, samples: Tensor, positions: Tensor) -> Tensor:
    """Return the keys of dropout's masks, for the tokens that one forward sees.

    Args:
        seed: Seed of the training run.
        step: Number of the optimizer step, or any number that selects other masks.
        samples: Number of each sample in the step's batch, or in all data, `[batch]`, int64.
        positions: Position of each token in its sample, `[seq]`, int64, in any order; or `[batch, seq]` if it
            differs between samples.

    Returns:
        `[batch, seq]`, int64, on the device of `samples` and `positions`.
    """
    origin = _signed(seed)
    for number in (STRIDE, _signed(step)):
        origin = int(mix(torch.tensor(_signed(origin + number))))
    return mix(mix(samples * STRIDE + origin).unsqueeze(-1) + positions * STRIDE)


def mix(numbers: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64, a bijection of int64 that mixes all bits."""
    numbers = (numbers ^ _shifted(numbers, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    numbers = (numbers ^ _shifted(numbers, 27)) * (0x94D049BB133111EB - 2**64)
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; int64's own shift fills with copies of the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """Return a number modulo 2^64 as a signed int64."""
    return (number + 2**63) % 2**64 - 2**63


_PAIRS = 1 << 24
"""Pairs that are made at a time: 128 MiB for each intermediate result."""

_LEVELS = 1 << 24
"""Numbers that a uniform variable can take; the largest normal number is then 5.8."""


def normal(shape: Sequence[int], key: int, device: torch.device) -> torch.Tensor:
    """Return independent normal numbers with mean 0 and deviation 1.

    Args:
        shape: Shape of the result.
        key: A 64-bit integer; other keys give other numbers.
        device: Device on which they are made.

    Returns:
        A contiguous tensor, fp32.
    """
    elements = math.prod(shape)
    result = torch.empty(elements + elements % 2, dtype=torch.float32, device=device)
    pairs = result.view(-1, 2)
    for first in range(0, len(pairs), _PAIRS):
        part = pairs[first : first + _PAIRS]
        bits = mix(torch.arange(first, first + len(part), device=device) * STRIDE + key)
        uniform = ((bits & (_LEVELS - 1)) + 1).float() / _LEVELS  # above 0, whose logarithm is infinite
        angle = ((bits >> 24) & (_LEVELS - 1)).float() * (2 * math.pi / _LEVELS)
        radius = uniform.log_().mul_(-2).sqrt_()
        torch.mul(radius, angle.cos(), out=part[:, 0])
        torch.mul(radius, angle.sin(), out=part[:, 1])
    return result[:elements].view(*shape)

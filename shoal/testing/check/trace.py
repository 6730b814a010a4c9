"""Records what a model computes in its forwards, layer by layer, small enough to gather from all ranks.

An output is recorded as a digest: one number for each token, its product with a fixed random direction. If
two outputs differ, their digests differ about as much, except by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.models import Mixture
from shoal.models.grouped_matmul import Runs
from shoal.models.transformer import Rotary

Place = tuple[str, str]
"""Name of a layer, and one of its quantities: "positions", "choices" or "output"."""


@dataclass(frozen=True, slots=True)
class Note:
    """The record at one place, on the CPU.

    Attributes:
        values: For "positions", the positions that rotary embedding uses, `[seq]`. For "choices", the experts
            of each token, ascending, `[batch, seq, experts_per_token]`; the number of experts stands for a
            choice that the capacity drops. For "output", the digest, `[batch, seq]`.
        width: Shape of one token's output.
    """

    values: Tensor
    width: tuple[int, ...] = ()


Forward = dict[Place, Note]
"""The records of one forward of the model, in the order of execution."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The records of the first step on one rank.

    Attributes:
        samples: Samples of each micro-batch.
        held: Positions, in their samples, of the tokens that it trains on, `[seq / cp]`.
        forwards: Forward of each micro-batch; in a pipeline, that of this rank's stages.
        blocks: Names of the blocks that are divided over pipeline stages; none without a pipeline.
    """

    samples: list[list[int]]
    held: Tensor
    forwards: list[Forward]
    blocks: Sequence[str] = ()


@final
class Trace:
    """Records the outputs of a model's layers from now on.

    Layers whose output is no tensor `[batch, seq, ...]` are skipped. If a layer runs several times in a
    forward, the first run counts. Layers that recompute runs again in backward are not recorded.

    Args:
        model: The model. It gets hooks; do not use it for anything else.
        microbatch: Function that returns the number of the micro-batch whose forward is running; None for
            forwards that are not recorded.
        names: Names of the layers to record; None records all.
    """

    def __init__(
        self,
        model: nn.Module,
        microbatch: Callable[[], int | None] = lambda: 0,
        names: Collection[str] | None = None,
    ) -> None:
        self._microbatch = microbatch
        self._noted: dict[int, Forward] = {}
        self._current: Forward | None = None
        self._directions: dict[int, Tensor] = {}
        model.register_forward_pre_hook(self._begin)
        for name, module in model.named_modules():
            if module is model or (names is not None and name not in names):
                continue
            if isinstance(module, Rotary):
                module.register_forward_pre_hook(self._positions_of(name))
            if isinstance(module, Mixture):
                exchange = self._choices_of(name, module._exchange)
                module._exchange = exchange  # type: ignore[method-assign]
            module.register_forward_hook(self._output_of(name))
        model.register_forward_hook(self._end)

    @property
    def forwards(self) -> list[Forward]:
        """Return the records by micro-batch; several stages' forwards of a micro-batch are joined."""
        return [forward for _, forward in sorted(self._noted.items())]

    def _begin(self, *_: Any) -> None:
        number = self._microbatch()
        self._current = None if number is None else self._noted.setdefault(number, {})

    def _end(self, *_: Any) -> None:
        self._current = None

    def _note(self, place: Place, values: Tensor, width: tuple[int, ...] = ()) -> None:
        assert self._current is not None
        self._current.setdefault(place, Note(values.detach().cpu(), width))

    def _positions_of(self, name: str) -> Callable[..., None]:
        def hook(module: Rotary, inputs: tuple[int, torch.device]) -> None:
            if self._current is not None:
                self._note((name, "positions"), module.positions(*inputs))

        return hook

    def _choices_of(self, name: str, exchange: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(hidden: Tensor, chosen: Tensor, runs: Runs, shares: Tensor) -> Tensor:
            if self._current is not None:
                self._note((name, "choices"), chosen.sort(-1).values)
            return exchange(hidden, chosen, runs, shares)

        return noted

    def _output_of(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) and output else output
            is_hidden = isinstance(output, Tensor) and output.ndim >= 3 and output.is_floating_point()
            if self._current is not None and is_hidden:
                self._note((name, "output"), self._digest(output.detach()), tuple(output.shape[2:]))

        return hook

    def _digest(self, output: Tensor) -> Tensor:
        flat = output.flatten(2)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        if flat.shape[2] not in self._directions:
            generator = torch.Generator().manual_seed(flat.shape[2])
            drawn = torch.randn(flat.shape[2], generator=generator, dtype=torch.float64)
            self._directions[flat.shape[2]] = drawn.to(wide.device)
        return wide @ self._directions[flat.shape[2]].to(wide.dtype)


def joined(forwards: list[Forward], place: Place) -> Note | None:
    """Return the records of all forwards at a place, joined along `batch`; None if none has the place."""
    notes = [forward[place] for forward in forwards if place in forward]
    if not notes or place[1] == "positions":
        return notes[0] if notes else None
    return Note(torch.cat([note.values for note in notes]), notes[0].width)

"""Gaps: placeholders in a stage's model for the parts that other stages run.

Before the stage's modules a gap returns values of its part's form, as far as the model can tell: the hidden
state alone, or a tuple with as many elements as the part returns, the first being the hidden state. The
values do not matter, since the stage's first module gets the received hidden state in any case. In a stage's
first forward they are NaN, so that a model shows if it does use them: where it adds a block's output to its
input outside of the block, or returns what its blocks gave. What a part returns beside the hidden state stays
on its own stage, and any use of it elsewhere is an error.

The number of elements that a part returns is seen where it runs, and told to later stages.

The first gap after the stage's modules ends the forward: its input is the stage's output for the next stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name

from shoal.errors import ModelError

NOT_KNOWN = -1
"""Stands for the number of elements of a part that no stage has run yet."""


class Place(NamedTuple):
    """The place of a part in the model: a child of a module, or a method.

    Attributes:
        number: Index of the part among all parts of the model, in order.
        piece: The piece that contains the part.
        holder: The module that has it.
        key: The part's name in the holder.
        name: The part's name in the model.
        part: The module or method itself.
    """

    number: int
    piece: int
    holder: nn.Module
    key: str
    name: str
    part: Any


class Beside(Protocol):
    """What a model sends from stage to stage beside the hidden state, in one message."""

    def enter(self, message: Tensor) -> Tensor:
        """Return the hidden state in what a stage received."""

    def begin(self) -> None:
        """Give the rest to the model's forward, which has reached the stage's first module."""

    def leave(self, hidden: Tensor) -> Tensor:
        """Return what a stage sends, with this hidden state."""


class EndOfStage(BaseException):
    """Ends the model's forward after a stage's last module; `except Exception` does not catch it."""


@final
class Forward:
    """The forward that runs, shared by the stages of a rank and their gaps.

    Args:
        last: Number of the last piece.
        parts: Number of parts.
        beside: What is sent beside the hidden state; None for nothing.

    Attributes:
        beside: What is sent beside the hidden state; None for nothing.
        leaving: What the stage sends after its last module; None before.
        has_entered: Whether the stage's first module has got what the stage received.
        results: Number of elements that each part returns in a tuple; 0 for the hidden state alone; or
            `NOT_KNOWN`.
    """

    def __init__(self, last: int, parts: int, beside: Beside | None = None) -> None:
        self.last = last
        self.beside = beside
        self.leaving: Tensor | None = None
        self.has_entered = False
        self.results = [NOT_KNOWN] * parts
        self._entering: Tensor | None = None
        self._stop = 0
        self._fill: float | None = None

    @contextmanager
    def through(
        self, entering: Tensor | None, pieces: range, *, fill: float | None = None
    ) -> Iterator[Forward]:
        """Run a forward through these pieces; `entering` is what the stage received.

        Gaps return the number `fill` everywhere; by default what the stage received.
        """
        if entering is not None and self.beside is not None:
            entering = self.beside.enter(entering)
        self._entering, self._stop, self._fill = entering, pieces.stop, fill
        self.has_entered = entering is None
        try:
            yield self
        finally:
            self._entering = self.leaving = None
            self._stop = 0

    def enter(self, module: nn.Module, arguments: Any, named: dict[str, Any]) -> Any:
        """Hook before the stage's first module: replace its input by the received hidden state."""
        if self.has_entered or self._entering is None:
            return None
        self.has_entered = True
        if self.beside is not None:
            self.beside.begin()
        if arguments:
            return (self._entering, *arguments[1:]), named
        return arguments, named | {_name_of_hidden(_first_parameter(module), named): self._entering}

    def see(self, number: int, name: str, module: nn.Module, arguments: Any, result: Any) -> None:
        """Hook after a part: note how many elements it returns, for later stages.

        Raises:
            ModelError: No gap could return such a result, or the part returned another number before.
        """
        if not isinstance(result, Tensor) and type(result) not in (tuple, list):
            raise ModelError(
                f"{name} returns a {type(result).__name__}, which other stages cannot receive",
                possible="pieces that return the hidden state, alone or as the first element of a tuple",
                change="return a tensor from it, or name other modules in the StageLayout",
            )
        given = 0 if isinstance(result, Tensor) else len(result)
        before = self.results[number]
        if before not in (NOT_KNOWN, given):
            raise ModelError(
                f"{name} returned {_described(before)} at first and returns {_described(given)} now, which "
                "other stages do not expect",
                possible="pieces that return the same number of values at every forward",
                change="always return the same, for example only the hidden state",
            )
        self.results[number] = given

    def pass_by(self, number: int, piece: int, leaving: Any) -> Any:
        """Return the result of a gap in place of the part with this number, in this piece.

        Args:
            number: Number of the part.
            piece: Number of its piece.
            leaving: The hidden state that it was called with.

        Raises:
            EndOfStage: The gap is after the stage; its input is kept as `leaving`.
            ModelError: Its input has no hidden state, the forward reached it out of order, or the model was
                called by itself.
        """
        if not self._stop:
            raise ModelError(
                "the model was called by itself, and this rank has only its stages of a pipeline",
                possible="the object that shoal.parallelize returned, called by all ranks: within "
                "torch.no_grad() it gives the outputs",
                change="call that object in place of its .module; to generate, use pp=1",
            )
        if piece >= self._stop:
            if not isinstance(leaving, Tensor) or not leaving.is_floating_point():
                raise disordered(f"piece {piece} of a model got no hidden state as its first argument")
            self.leaving = leaving if self.beside is None else self.beside.leave(leaving)
            raise EndOfStage
        given = self.results[number]
        if self._entering is None or self.has_entered:
            raise disordered(
                f"the forward reaches piece {piece} of a model after pieces that must come later"
            )
        hidden = self._entering.detach()
        if self._fill is not None:
            hidden = torch.full_like(hidden, self._fill)
        return hidden if given in (0, NOT_KNOWN) else (hidden, *(_absent() for _ in range(given - 1)))


@final
class Gap(nn.Module):
    """A placeholder for a part that does not run.

    It has the module's plain attributes, which models read from blocks, such as their type of attention. With
    `stands_in`, for a part that stays on this rank, it has all its attributes, such as a weight that the end
    uses.

    Changes that the model makes to the part's arguments before its forward are made here too, so that a stage
    passes on what the next one's first module would get.
    """

    def __init__(self, forward: Forward, place: Place, *, stands_in: bool) -> None:
        super().__init__()
        if isinstance(place.part, nn.Module):
            for name, value in vars(place.part).items():
                if isinstance(value, str | int | float) and not name.startswith("_"):
                    self.__dict__[name] = value
            self._forward_pre_hooks.update(place.part._forward_pre_hooks)
            self._forward_pre_hooks_with_kwargs.update(place.part._forward_pre_hooks_with_kwargs)
        self.__dict__["stands_for"] = place.part if stands_in else None  # not a child of this module
        self._number, self._piece, self._first = place.number, place.piece, _first_parameter(place.part)
        self._forward = forward

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """See `Forward.pass_by`."""
        leaving = arguments[0] if arguments else named.get(_name_of_hidden(self._first, named))
        return self._forward.pass_by(self._number, self._piece, leaving)

    def __getattr__(self, name: str) -> Any:
        if name != "stands_for" and self.stands_for is not None:
            return getattr(self.stands_for, name)
        return super().__getattr__(name)


@final
class _Absent(Tensor):
    """A placeholder for what a part returns beside the hidden state."""

    requires_grad = False  # a model may pass it on, and check whether it needs gradients

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse any use.

        Raises:
            ModelError: Always.
        """
        raise ModelError(
            f"the forward of a model uses ({resolve_name(func)}) another output of a piece than the hidden "
            "state, and stages send only the hidden state",
            possible="a forward that uses only the first output of a piece",
            change="let the pieces take and return one tensor, or use pp=1",
        )


def disordered(given: str) -> ModelError:
    """Return the error for a forward that does not go through a model as its StageLayout says."""
    return ModelError(
        given,
        possible="a StageLayout whose modules are called in its order, each with the hidden state",
        change="correct the StageLayout",
    )


def _first_parameter(part: Any) -> str | None:
    """Return the name of the first parameter of a method, or of a module's forward, which may be wrapped."""
    return _first_of(type(part).forward, 1) if isinstance(part, nn.Module) else _first_of(part, 0)


@cache
def _first_of(function: Any, skipped: int) -> str | None:
    return next(iter(list(inspect.signature(function).parameters)[skipped:]), None)


def _name_of_hidden(first: str | None, named: Mapping[str, Any]) -> str:
    """Return the name by which a part gets the hidden state: that of its first parameter."""
    return first if first is not None and first in named else next(iter(named), "")


def _absent() -> Tensor:
    return torch.empty(0).as_subclass(_Absent)


def _described(given: int) -> str:
    return "a tensor" if given == 0 else f"a tuple of {given}"

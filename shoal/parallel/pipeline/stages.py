"""Cut a model into pipeline stages without knowledge of its forward.

A stage runs the model's own forward, on the model's real input, which every rank has. So each stage makes
masks, positions and rotary tables itself, by the model's own code. In place of the parts that are not the
stage's stand *gaps*, which compute nothing. The stage's first module gets the
hidden state that the stage received, whatever its input is. The first gap after the stage's modules takes the
stage's output, and ends the forward.

Modules that no stage of this rank needs are removed from the model, so that their memory is freed. Those that
remain keep their names, since first values, checkpoints and dropout go by name. Several stages of one rank
share the model: gaps stand in place of the other stages' parts while one of them runs.

Gaps: placeholders in a stage's model for the parts that other stages run.

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
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name

from shoal.data.permutation import generators_put_aside
from shoal.errors import ModelError, PlanError
from shoal.models import tensors_in
from shoal.parallel.micro_batches import Arguments
from shoal.parallel.pipeline.outputs import without_other_stages
from shoal.parallel.pipeline.stage_layout import (
    StageLayout,
    named_part,
    parameters_by_piece,
    parts_by_piece,
    tied_names,
)
from shoal.parallel.plain_state import StageStates, StatesBefore, restored

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


def take_stages(
    model: nn.Module, layout: StageLayout, ranges: Mapping[int, range], beside: Beside | None = None
) -> list[Stage]:
    """Keep the parts of a model that some stages need, in place, and return these stages.

    On the meta device nothing is allocated. Parameters are not changed, and may be replaced afterwards. The
    `forward` of any module may be replaced before or afterwards, as `compile_blocks` does.

    Args:
        model: The whole model. Use it only through the stages afterwards.
        layout: The layout that names its pieces.
        ranges: The pieces of each of this rank's stages, by the stage's number. Piece 0 is the embedding,
            pieces 1 to L are the blocks, and piece L + 1 is the end.
        beside: What stages send beside the hidden state; None for nothing.

    Returns:
        The stages by ascending number.

    Raises:
        ModelError: The model does not match the layout, or a stage would share a parameter with others that
            is not one shared by embedding and end.
        PlanError: The ranges do not fit this model.
    """
    names = parameters_by_piece(model, layout)
    tied = tied_names(model, layout)
    places = _places(model, layout)
    _require_ranges(ranges, places, len(names))
    _require_own_parameters(names, tied, ranges)
    forward = Forward(len(names) - 1, len(places), beside)
    own = {piece for pieces in ranges.values() for piece in pieces}
    kept = []
    for place in places:
        if place.piece in own or (forward.last in own and _holds_tied(model, place, tied)):
            kept.append((place, Gap(forward, place, stands_in=True)))
        else:
            _put(place, Gap(forward, place, stands_in=False))
    in_pieces = {
        module
        for place in places
        if isinstance(place.part, nn.Module)
        for module in (place.part if place.piece in own else model.get_submodule(place.name)).modules()
    }
    states = StageStates((each for each in model.modules() if each not in in_pieces), ranges)
    stages = []
    for index, pieces in sorted(ranges.items()):
        hidden = [(place, gap) for place, gap in kept if place.piece not in pieces]
        parts = [place.part for place in places if place.piece in pieces]
        entry = next(part for part in parts if isinstance(part, nn.Module))
        if pieces.stop <= forward.last:
            for place in places:
                if place.piece in pieces:
                    place.part.register_forward_hook(partial(forward.see, place.number, place.name))
        held = frozenset[str]().union(*(names[piece] for piece in pieces))
        stages.append(Stage(index, pieces, model, held, forward, hidden, entry, states))
    return stages


@final
class Stage:
    """A part of a model, from the input or a hidden state to a hidden state or the model's output.

    `take_stages` makes them.

    Attributes:
        index: Number of the stage in the whole pipeline.
        pieces: Indices of the model's pieces in this stage.
        is_first: Whether it begins with the embedding, and receives no hidden state.
        is_last: Whether its output is the model's output.
        module: The model, which the stages of a rank share.
        names: The names of the stage's parameters in the model.
        states: The state of modules that all stages of the rank run.
    """

    def __init__(
        self,
        index: int,
        pieces: range,
        module: nn.Module,
        names: frozenset[str],
        forward: Forward,
        hidden: Sequence[tuple[Place, Gap]],
        entry: nn.Module,
        states: StageStates,
    ) -> None:
        self.index = index
        self.pieces = pieces
        self.is_first = pieces.start == 0
        self.is_last = pieces.stop == forward.last + 1
        self.module = module
        self.names = names
        self.states = states
        self._is_seen = self.is_first
        self._forward = forward
        self._hidden = hidden
        if not self.is_first:
            entry.register_forward_pre_hook(forward.enter, with_kwargs=True)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stage's parameters, by their names in the whole model."""
        return ((name, each) for name, each in self.module.named_parameters() if name in self.names)

    @property
    def results(self) -> Sequence[int]:
        """Return how many elements each part returns, as far as this rank's stages know."""
        return tuple(self._forward.results)

    def learn(self, results: Sequence[int]) -> None:
        """Tell the stages of this rank the `results` of the previous stage, which has run.

        Call it before the first forward, if the previous stage is on another rank.
        """
        known = self._forward.results
        known[:] = [own if told == NOT_KNOWN else told for own, told in zip(known, results, strict=True)]

    def __call__(self, inputs: Any, hidden: Tensor | None = None) -> Any:
        """Run the stage.

        Args:
            inputs: The model's inputs, such as tokens `[batch, seq]`; see `Arguments.of`.
            hidden: Output of the previous stage, such as `[batch, seq, hidden]`; None for the first stage.

        Returns:
            A hidden state; for the last stage the model's output.

        Raises:
            ModelError: The model's forward does not run the pieces in the layout's order, or needs more from
                another stage than the hidden state.
        """
        assert (hidden is None) == self.is_first
        is_first, self._is_seen = not self._is_seen, True
        if not is_first:
            return self._result(self._run(inputs, hidden))
        before = StatesBefore(self.module).take()
        output = self._run(inputs, hidden, fill=torch.nan)
        if _has_nan(output) and not _has_nan(hidden):
            with torch.no_grad(), restored(before), generators_put_aside():
                other = self._run(inputs, hidden, fill=0.0)
            if not all(map(torch.equal, _nan_in(output), _nan_in(other))):
                raise ModelError(
                    f"the forward of {type(self.module).__name__} uses the hidden state outside of the "
                    "pieces, such as in a sum of a block's input and its output, or in its own output",
                    possible="pieces that take the hidden state and return the next one: residuals within "
                    "blocks; outputs made by the last pieces",
                    change="put the sum into the block's forward, or use pp=1",
                )
        return self._result(output)

    def _result(self, output: Any) -> Any:
        if not self.is_last:
            return output
        return without_other_stages(output, has_routers=self._forward.beside is not None)

    def _run(self, inputs: Any, hidden: Tensor | None, fill: float | None = None) -> Any:
        with (
            self._forward.through(hidden, self.pieces, fill=fill) as forward,
            self._gaps(),
            self.states.of(self.index),
        ):
            try:
                output = Arguments.of(inputs, self.module.forward).give(self.module)
                is_whole = self.is_last
            except EndOfStage:
                output = forward.leaving
                is_whole = not self.is_last
            is_whole &= forward.has_entered
        if not is_whole:
            raise disordered(
                f"the forward of {type(self.module).__name__} did not reach all of stage {self.index}"
            )
        return output

    @contextmanager
    def _gaps(self) -> Iterator[None]:
        """Put gaps in place of parts that stay on this rank for other stages, while it lasts."""
        before = [(place, _put(place, gap)) for place, gap in self._hidden]
        try:
            yield
        finally:
            for place, part in before:
                _put(place, part)


def _nan_in(output: Any) -> list[Tensor]:
    """Return where the tensors of floats in an output are NaN."""
    return [each.isnan() for each in tensors_in(output) if each.is_floating_point() or each.is_complex()]


def _has_nan(output: Any) -> bool:
    return any(bool(each.any()) for each in _nan_in(output))


def _put(place: Place, part: Any) -> Any:
    """Put a part in a place of the model, None for the class's own method; return the previous part."""
    parts = place.holder._modules if isinstance(place.part, nn.Module) else vars(place.holder)
    before = parts.pop(place.key, None) if part is None else parts.get(place.key)
    if part is not None:
        parts[place.key] = part
    return before


def _places(model: nn.Module, layout: StageLayout) -> list[Place]:
    places: list[Place] = []
    for piece, names in enumerate(parts_by_piece(model, layout)):
        for name in names:
            holder, _, key = name.rpartition(".")
            part = named_part(model, name)
            places.append(Place(len(places), piece, model.get_submodule(holder), key, name, part))
    return places


def _holds_tied(model: nn.Module, place: Place, tied: frozenset[str]) -> bool:
    """Return whether an embedding must stay beside the end because of its parameters."""
    if place.piece != 0 or not isinstance(place.part, nn.Module):
        return False
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {names[id(parameter)] for parameter in place.part.parameters()}
    if held & tied and held - tied:
        raise ModelError(
            f"{place.name} holds parameters that the model's end shares, and other parameters, such as "
            f"{min(held - tied)}",
            possible="modules in `embed` whose parameters are all shared, or none of them",
            change="name the modules inside it instead",
        )
    return bool(held & tied)


def _require_ranges(ranges: Mapping[int, range], places: Sequence[Place], pieces: int) -> None:
    filled = {place.piece for place in places if isinstance(place.part, nn.Module)}
    taken: set[int] = set()
    for index, each in ranges.items():
        if each.step != 1 or not 0 <= each.start < each.stop <= pieces or taken & set(each):
            raise PlanError(
                f"the pieces {each} of stage {index} are not in a model of {pieces} pieces, or another stage "
                "has them",
                possible=f"ranges of pieces within 0 to {pieces - 1} that do not overlap",
                change="split the model with `shoal.spec.plan.stages`",
            )
        if not filled & set(each):
            raise PlanError(
                f"stage {index} would have no module of the model",
                possible="at least one module for each stage",
                change="change the split, so that the stage has a block",
            )
        taken |= set(each)


def _require_own_parameters(
    names: Sequence[frozenset[str]], tied: frozenset[str], ranges: Mapping[int, range]
) -> None:
    for index, pieces in ranges.items():
        own = frozenset[str]().union(*(names[piece] for piece in pieces)) - tied
        others = frozenset[str]().union(*(each for piece, each in enumerate(names) if piece not in pieces))
        if own & others:
            raise ModelError(
                f"stage {index} would share the parameter {min(own & others)} with another stage",
                possible="parameters that one stage uses, or that only the embedding and the end share",
                change="change the split, so that one stage has all blocks that share it",
            )

"""Cutting a model into pipeline stages without knowing its forward.

A stage runs the model's own forward, on the model's real input, which every rank has. So each stage makes
masks, positions and rotary tables itself, by the model's own code. In place of the parts that are not the
stage's stand *gaps*. A gap computes nothing, and gives a tensor of the hidden state's shape in place of the
result. The stage's first module gets the hidden state that the stage received, whatever comes in; the first
gap after the stage's modules keeps what comes in, which is what the stage gives to the next. What the model
computes outside of its pieces before and after that is not used.

Modules that no stage of this rank needs are taken out of the model, so that their memory is freed. Those that
remain keep their names, since first values, checkpoints and dropout go by name. Several stages of one rank
share the model: gaps stand in place of the other stages' parts while one of them runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from shoal.errors import ModelError, PlanError
from shoal.parallel.stage_layout import (
    StageLayout,
    named_part,
    parameters_by_piece,
    parts_by_piece,
    tied_names,
)

__all__ = ["Stage", "take_stages"]


def take_stages(model: nn.Module, layout: StageLayout, ranges: Mapping[int, range]) -> list[Stage]:
    """Keeps of a model what some stages need, in place, and gives these stages.

    On the meta device nothing is allocated. Parameters are not touched, and may be replaced afterwards; so
    may the `forward` of any module before or afterwards, as `recompute_blocks` does.

    Args:
        model: The whole model. It is no longer used but through the stages.
        layout: Names its pieces.
        ranges: This rank's stages: of each, by its number, the pieces. Piece 0 is the embedding, pieces 1 to
            L are the blocks, and piece L + 1 is the end.

    Returns:
        The stages by ascending number.

    Raises:
        ModelError: The model is not as the layout says, or a stage would share a parameter with others, but
            for what embedding and end share.
        PlanError: The ranges are none of this model.
    """
    names = parameters_by_piece(model, layout)
    tied = tied_names(model, layout)
    places = _places(model, layout)
    _require_ranges(ranges, places, len(names))
    _require_own_parameters(names, tied, ranges)
    forward = _Forward(len(names) - 1)
    own = {piece for pieces in ranges.values() for piece in pieces}
    kept = []
    for place in places:
        if place.piece in own or (forward.last in own and _holds_tied(model, place, tied)):
            kept.append((place, _Gap(forward, place, stands_in=True)))
        else:
            _put(place, _Gap(forward, place, stands_in=False))
    stages = []
    for index, pieces in sorted(ranges.items()):
        hidden = [(place, gap) for place, gap in kept if place.piece not in pieces]
        parts = [place.part for place in places if place.piece in pieces]
        entry = next(part for part in parts if isinstance(part, nn.Module))
        held = frozenset[str]().union(*(names[piece] for piece in pieces))
        stages.append(Stage(index, pieces, model, held, forward, hidden, entry))
    return stages


class _Place(NamedTuple):
    """Where a part of a piece is in the model: a child of a module, or a method."""

    piece: int
    holder: nn.Module
    key: str
    name: str
    part: Any


@final
class Stage:
    """A part of a model, which makes a hidden state, or the model's output, of a hidden state.

    `take_stages` makes them.

    Attributes:
        index: Number of the stage in the whole pipeline.
        pieces: Of the model's.
        is_first: Whether it begins with the embedding, and receives no hidden state.
        is_last: Whether it gives the model's output.
        module: The model, which the stages of a rank share.
        names: The names of the stage's parameters in the model.
    """

    def __init__(
        self,
        index: int,
        pieces: range,
        module: nn.Module,
        names: frozenset[str],
        forward: _Forward,
        hidden: Sequence[tuple[_Place, _Gap]],
        entry: nn.Module,
    ) -> None:
        self.index = index
        self.pieces = pieces
        self.is_first = pieces.start == 0
        self.is_last = pieces.stop == forward.last + 1
        self.module = module
        self.names = names
        self._forward = forward
        self._hidden = hidden
        if not self.is_first:
            entry.register_forward_pre_hook(forward.enter, with_kwargs=True)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The stage's parameters, by their names in the whole model."""
        return ((name, each) for name, each in self.module.named_parameters() if name in self.names)

    def __call__(self, inputs: Any, hidden: Tensor | None = None, **named: Any) -> Any:
        """Runs the stage.

        Args:
            inputs: The model's input, such as tokens `[batch, seq]`.
            hidden: What the stage before gave, such as `[batch, seq, hidden]`; None for the first stage.
            named: Further arguments of the model.

        Returns:
            A hidden state; of the last stage the model's output.

        Raises:
            ModelError: The model's forward does not come to the pieces in the layout's order.
        """
        assert (hidden is None) == self.is_first
        with self._forward.through(hidden, self.pieces), self._gaps():
            output = self.module(inputs, **named)
            leaving, entered = self._forward.leaving, self._forward.has_entered
        if not entered or (leaving is None) != self.is_last:
            model = type(self.module).__name__
            raise _disordered(f"the forward of {model} did not come to all of stage {self.index}")
        return output if self.is_last else leaving

    @contextmanager
    def _gaps(self) -> Iterator[None]:
        """Within it, gaps stand in place of parts that stay on this rank for other stages."""
        before = [(place, _put(place, gap)) for place, gap in self._hidden]
        try:
            yield
        finally:
            for place, part in before:
                _put(place, part)


@final
class _Forward:
    """The forward that is under way, shared by the stages of a rank and their gaps.

    Args:
        last: Number of the last piece.

    Attributes:
        leaving: The hidden state after the stage's last module; None before.
        has_entered: Whether the stage's first module has got what the stage received.
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self.leaving: Tensor | None = None
        self.has_entered = False
        self._entering: Tensor | None = None
        self._filler: Tensor | None = None
        self._stop = 0

    @contextmanager
    def through(self, entering: Tensor | None, pieces: range) -> Iterator[None]:
        """A forward through these pieces, which `entering` goes into."""
        self._entering, self._stop = entering, pieces.stop
        self._filler = None if entering is None else entering.detach()
        self.has_entered = entering is None
        try:
            yield
        finally:
            self._entering = self._filler = self.leaving = None

    def enter(self, module: nn.Module, arguments: Any, named: dict[str, Any]) -> Any:
        """Hook before the stage's first module: has it get what the stage received."""
        if self.has_entered or self._entering is None:
            return None
        self.has_entered = True
        if arguments:
            return (self._entering, *arguments[1:]), named
        return arguments, named | {next(iter(named)): self._entering}

    def pass_by(self, piece: int, arguments: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
        """What a gap of this piece gives; the first one after the stage keeps what it gets."""
        if self.leaving is None and piece >= self._stop:
            leaving = next(iter((*arguments, *named.values())), None)
            if not isinstance(leaving, Tensor) or not leaving.is_floating_point():
                raise _disordered(f"piece {piece} of a model got no hidden state as its first argument")
            self.leaving, self._filler = leaving, leaving.detach()
        return self._filler


@final
class _Gap(nn.Module):
    """Stands in place of a part that does not run.

    It has the module's plain attributes, which models ask blocks for, such as their type of attention. With
    `stands_in`, for a part that stays on this rank, it has all of them, such as a weight that the end uses.
    """

    def __init__(self, forward: _Forward, place: _Place, *, stands_in: bool) -> None:
        super().__init__()
        attributes = vars(place.part) if isinstance(place.part, nn.Module) else {}
        for name, value in attributes.items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                self.__dict__[name] = value
        self.__dict__["stands_for"] = place.part if stands_in else None  # no child of this module
        self._piece = place.piece
        self._forward = forward

    def forward(self, *arguments: Any, **named: Any) -> Tensor | None:
        """See `_Forward.pass_by`."""
        return self._forward.pass_by(self._piece, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name != "stands_for" and self.stands_for is not None:
            return getattr(self.stands_for, name)
        return super().__getattr__(name)


def _disordered(given: str) -> ModelError:
    return ModelError(
        given,
        possible="a StageLayout whose modules are called in its order, each with the hidden state",
        change="correct the StageLayout",
    )


def _put(place: _Place, part: Any) -> Any:
    """Puts something in a place of the model, None being a method of the class; gives what was there."""
    parts = place.holder._modules if isinstance(place.part, nn.Module) else vars(place.holder)
    before = parts.pop(place.key, None) if part is None else parts.get(place.key)
    if part is not None:
        parts[place.key] = part
    return before


def _places(model: nn.Module, layout: StageLayout) -> list[_Place]:
    places = []
    for piece, names in enumerate(parts_by_piece(model, layout)):
        for name in names:
            holder, _, key = name.rpartition(".")
            part = named_part(model, name)
            places.append(_Place(piece, model.get_submodule(holder), key, name, part))
    return places


def _holds_tied(model: nn.Module, place: _Place, tied: frozenset[str]) -> bool:
    """Whether an embedding is to stay beside the end for the sake of its parameters."""
    if place.piece != 0 or not isinstance(place.part, nn.Module):
        return False
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {names[id(parameter)] for parameter in place.part.parameters()}
    if held & tied and held - tied:
        raise ModelError(
            f"{place.name} holds parameters that the model's end shares, and others, such as "
            f"{min(held - tied)}",
            possible="modules in `embed` whose parameters are all shared, or none of them",
            change="name the modules within it in its place",
        )
    return bool(held & tied)


def _require_ranges(ranges: Mapping[int, range], places: Sequence[_Place], pieces: int) -> None:
    filled = {place.piece for place in places if isinstance(place.part, nn.Module)}
    taken: set[int] = set()
    for index, each in ranges.items():
        if each.step != 1 or not 0 <= each.start < each.stop <= pieces or taken & set(each):
            raise PlanError(
                f"the pieces {each} of stage {index} are none of a model of {pieces} pieces, or are taken",
                possible=f"ranges of pieces within 0 to {pieces - 1} that do not overlap",
                change="split the model with `shoal.plan.stages`",
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
                possible="parameters that one stage uses, or embedding and end together",
                change="change the split, so that one stage has all blocks that share it",
            )

"""Which models keep the documents of packed samples apart: small forwards of documents tell.

A document must not change with another one of its sample or batch, and must give what it gives alone,
positions included. The samples hold two long documents, four of equal length, and many short ones. What a
model mixes over longer distances than they have is not seen: samples are as long as a second of forwards
allows. Models of Hugging Face are asked with small windows, and need no long samples. Those whose masks do
not know their positions get masks that do, if they take them.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.models import Transformer
from shoal.parallel.hugging_face.documents import MASKS, use_masks
from shoal.parallel.hugging_face.layout import has_tensor_plan, not_attention
from shoal.parallel.hugging_face.sequence import beside_attention
from shoal.parallel.model_probe import Probe, cannot_probe, difference, is_hugging_face, windows_below

_POSITIONS = "position_ids"
_LENGTHS = (512, 256, 128, 64, 32, 16, 8, 4)
"""Tokens of a sample; the first that a model takes is used. Small windows need 64 at most."""

_LONGEST = sys.maxsize

_MANY = (1, 2, 1, 3, 1, 5)
"""Tokens of documents in a sample of many, in turn."""

_WORK = (1 << 39, 1 << 31)
"""Parameters times tokens in one forward, on an accelerator and on a CPU: below a second."""


@final
class DocumentsGuard:
    """Lets a model train on packed documents only if it keeps them apart.

    A model of one's own is asked at once, if its forward can take `position_ids`; one of Hugging Face when
    packed documents come, since its class and configuration tell.

    Args:
        model: The model, before it is laid over ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._answer: _Answer | None = None
        self._windows = -1  # those that were shorter than a sample when it was asked
        self._masks: str | None = None
        if not is_hugging_face(model) and _may_take_positions(model):
            self._answer = _ask(model, 0)

    def require(self, *, is_promised: bool, length: int | None = None) -> None:
        """Check the model before it gets packed documents, and give it the masks that it needs for them.

        A later call checks it again if samples are longer, and so are longer than other windows of the model.

        Args:
            length: Tokens of a sample; None for any number.
            is_promised: Whether the data says that documents are kept apart. Otherwise a model of one's own
                may want to see several, and gets a warning.

        Raises:
            ModelError: The model does not keep documents apart.
        """
        length = _LONGEST if length is None else length
        windows = windows_below(self._model, length)
        if windows <= self._windows:
            return
        if self._answer is None or is_hugging_face(self._model):
            self._answer = _ask(self._model, length)
        refusal, masks = self._answer.refusal, self._answer.masks
        if refusal is not None and not is_promised and not is_hugging_face(self._model):
            warnings.warn(refusal.given, stacklevel=2)
        else:
            self._answer.settle(self._model)
        if masks is not None and masks != self._masks:
            use_masks(self._model, masks)
        self._windows, self._masks = windows, masks or self._masks


def require_documents(model: nn.Module, length: int | None = None) -> None:
    """Check that a model keeps the documents of packed samples apart if it gets their `position_ids`.

    A model of Hugging Face gets the masks that it needs for that, in place. A model that cannot be asked
    passes with a warning that says why.

    Args:
        model: The model.
        length: Tokens of a sample; None for any number. Windows that are longer do not count.

    Raises:
        ModelError: It takes none; or one document changes with another, or differs from what it is alone.
    """
    DocumentsGuard(model).require(is_promised=True, length=length)


class _Answer(NamedTuple):
    """What a model does with packed documents.

    Attributes:
        masks: The name of the masks that it needs to keep them apart; None if it needs none.
        refusal: The error if it does not keep them apart.
        unknown: The reason why it could not be asked.
    """

    masks: str | None = None
    refusal: ModelError | None = None
    unknown: Exception | None = None

    def settle(self, model: nn.Module) -> None:
        """Raise the refusal, or warn that nothing is known."""
        if self.refusal is not None:
            raise self.refusal
        if self.unknown is not None:
            cannot_probe(model, "it keeps the documents of packed samples apart", self.unknown)


def _ask(model: nn.Module, length: int) -> _Answer:
    if type(model) is Transformer:
        return _Answer()
    if not _may_take_positions(model):
        return _Answer(refusal=_refused(model, f"its forward takes no {_POSITIONS}"))
    is_theirs = is_hugging_face(model)
    if is_theirs and (kinds := not_attention(model)):
        return _Answer(refusal=_refused(model, f"it has layers of {', '.join(kinds)}"))
    try:
        probe, problem = _asked(model, length, is_theirs=is_theirs)
    except Exception as error:
        known = beside_attention(model) if has_tensor_plan(model) else {}
        there = [each for each, is_there in known.items() if is_there]
        return _Answer(refusal=_refused(model, there[0])) if there else _Answer(unknown=error)
    if not problem:
        return _Answer()
    for name in MASKS if has_tensor_plan(model) else ():
        masked = probe.copy()
        use_masks(masked.module, name)
        try:
            if not _problem(masked):
                return _Answer(masks=name)
        except Exception:  # the model takes no such masks
            continue
    return _Answer(refusal=_refused(model, problem))


def _asked(model: nn.Module, length: int, *, is_theirs: bool) -> tuple[Probe, str]:
    """Return the copy that was asked, and what is wrong with its packed documents."""
    if is_theirs:
        with suppress(Exception):  # its other sizes may not fit small windows
            probe = Probe(model, torch.device("cpu"), anew=True, length=length)
            return probe, _problem(probe)
    probe = Probe(model, torch.device("cpu") if is_theirs else _device_of(model), anew=is_theirs)
    return probe, _problem(probe)


def _problem(probe: Probe) -> str:
    """Return what is wrong with packed documents; empty if nothing is.

    Raises:
        Exception: The model takes no such samples.
    """
    first: Exception | None = None
    for rows in _samples_for(probe):
        try:
            found = _problem_with(probe, rows, seed=0)
        except Exception as error:
            first = first or error
            continue
        # Rounding may send a token to another expert, but not for other tokens as well.
        return found and _problem_with(probe, rows, seed=1) and _problem_with(probe, rows, seed=2)
    assert first is not None
    raise first


def _samples_for(probe: Probe) -> Iterator[list[list[int]]]:
    """Yield samples to try, each by the lengths of its documents; the longest ones first."""
    size = sum(parameter.numel() for parameter in probe.module.parameters())
    most = _WORK[probe.device.type == "cpu"] // max(1, 3 * size)
    if probe.has_small_windows:
        most = min(most, 64)
    for length in _LENGTHS:
        if length > max(most, 16):
            continue
        half = length // 2 - (length >= 8)
        cycle = list(itertools.islice(itertools.cycle(_MANY), length))
        ends = list(itertools.accumulate(cycle))
        many = cycle[: bisect.bisect_left(ends, length)]
        rows = [[half, length - half], [length // 4] * 4, [*many, length - sum(many)]]
        yield rows
        yield rows[:1]  # a model may take one sample only


def _problem_with(probe: Probe, rows: Sequence[Sequence[int]], *, seed: int) -> str:
    length, count = sum(rows[0]), len(rows)
    drawn = probe.inputs(count * length, seed)
    tokens, other = (each.reshape(count, length, *each.shape[2:]) for each in (drawn, probe.changed(drawn)))
    packed = _Packed(rows, tokens.device)
    output = probe.run(tokens, named={_POSITIONS: packed.positions})
    if output.dim() < 2 or output.shape[:2] != tokens.shape[:2]:
        raise ValueError(f"its output {list(output.shape)} has no dim of {length} positions")
    if packed.changes(probe, tokens, other, output):
        return "its output for one document changes with another"
    if difference(probe.run(tokens, named={_POSITIONS: packed.positions}), output) > 1:
        return "its output for some documents changes from one call to the next"
    if difference(probe.run(tokens, named={_POSITIONS: packed.positions}, seed=1), output) > 1:
        return ""  # it draws random numbers, other ones for other shapes
    if packed.differs_alone(probe, tokens, output):
        return "its output for a document differs from that for the document alone"
    if not probe.is_new:
        training = probe.training_copy()
        output = training.run(tokens, named={_POSITIONS: packed.positions})
        again = training.run(tokens, named={_POSITIONS: packed.positions}, seed=1)
        if difference(again, output) <= 1 and packed.changes(training, tokens, other, output):
            return "its output for one document changes with another in training"
    return ""


@final
class _Packed:
    """Samples of several documents each.

    Args:
        rows: For each sample the lengths of its documents.
        device: The device of the positions.

    Attributes:
        positions: Position of each token in its document, `[batch, seq]`.
    """

    def __init__(self, rows: Sequence[Sequence[int]], device: torch.device) -> None:
        lengths = [length for row in rows for length in row]
        counts = torch.tensor(lengths)
        self._documents = torch.arange(len(lengths)).repeat_interleave(counts).view(len(rows), -1).to(device)
        self.positions = (
            torch.cat([torch.arange(length) for length in lengths]).view(len(rows), -1).to(device)
        )

    def changes(self, probe: Probe, tokens: Tensor, other: Tensor, output: Tensor) -> bool:
        """Return whether a document's output changes with other documents.

        Each forward changes half of the documents, those that have a bit set in their number or those that
        have it not. So for any two documents there is a forward that changes the first and not the second.
        """
        for bit in range(int(self._documents.max()).bit_length()):
            for polarity in (0, 1):
                changed = (self._documents >> bit) % 2 == polarity
                shaped = changed.view(*changed.shape, *[1] * (tokens.dim() - 2))
                found = probe.run(torch.where(shaped, other, tokens), named={_POSITIONS: self.positions})
                if difference(found[~changed], output[~changed]) > 1:
                    return True
        return False

    def differs_alone(self, probe: Probe, tokens: Tensor, output: Tensor) -> bool:
        """Return whether a document's output differs from that for the document alone."""
        flat, results = tokens.flatten(0, 1), output.flatten(0, 1)
        lengths = torch.bincount(self._documents.flatten())
        starts = lengths.cumsum(0) - lengths
        for length in sorted(set(lengths.tolist())):
            places = starts[lengths == length, None] + torch.arange(length, device=starts.device)
            alone = _alone(probe, flat[places], torch.arange(length, device=starts.device)[None])
            if alone is not None and difference(results[places], alone) > 1:
                return True
        return False


def _alone(probe: Probe, tokens: Tensor, positions: Tensor) -> Tensor | None:
    """Return the output for documents of one length, each alone; None if the model takes none so short."""
    named: list[dict[str, Any]] = [{}, {_POSITIONS: positions.expand(tokens.shape[:2])}]
    for each in named:
        with suppress(Exception):  # it needs positions, or takes one length only
            return probe.run(tokens, named=each)
    with suppress(Exception):  # it takes one sample only
        return torch.cat([probe.run(sample[None]) for sample in tokens])
    return None


def _may_take_positions(model: nn.Module) -> bool:
    parameters: Any = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return takes_any or _POSITIONS in parameters


def _device_of(model: nn.Module) -> torch.device:
    device = next(model.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def _refused(model: nn.Module, problem: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot keep the documents of packed samples apart: {problem}",
        possible="presets, Hugging Face models whose layers mix a sequence by attention alone, and models of "
        f"your own whose forward takes {_POSITIONS} and lets no token see other documents",
        change="leave out data.boundaries",
    )

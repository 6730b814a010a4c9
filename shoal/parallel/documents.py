"""Which models keep the documents of packed samples apart: a small forward of two documents tells.

A document must not change with another one, and must give what it gives alone, positions included. Models of
Hugging Face whose masks do not know their positions get masks that do, if they take them.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.models import Transformer
from shoal.parallel.hugging_face.documents import MASKS, use_masks
from shoal.parallel.hugging_face.layout import has_tensor_plan, not_attention
from shoal.parallel.hugging_face.sequence import beside_attention
from shoal.parallel.model_probe import Probe, cannot_probe, difference, is_hugging_face

__all__ = ["DocumentsGuard", "require_documents"]

_POSITIONS = "position_ids"
_LENGTHS = ((7, 9), (30, 34), (3, 5), (2, 2))
"""Tokens of two documents; the first pair that the model takes is used."""


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
        self._is_done = False
        if not is_hugging_face(model) and _may_take_positions(model):
            self._answer = _ask(model)

    def require(self, *, is_promised: bool) -> None:
        """Check the model before it gets packed documents, and give it the masks that it needs for them.

        Args:
            is_promised: Whether the data says that documents are kept apart. Otherwise a model of one's own
                may want to see several, and gets a warning.

        Raises:
            ModelError: The model does not keep documents apart.
        """
        if self._is_done:
            return
        if self._answer is None:
            self._answer = _ask(self._model)
        refusal, masks = self._answer.refusal, self._answer.masks
        if refusal is not None and not is_promised and not is_hugging_face(self._model):
            warnings.warn(refusal.given, stacklevel=2)
        else:
            self._answer.settle(self._model)
        if masks is not None:
            use_masks(self._model, masks)
        self._is_done = True


def require_documents(model: nn.Module) -> None:
    """Check that a model keeps the documents of packed samples apart if it gets their `position_ids`.

    A model of Hugging Face gets the masks that it needs for that, in place. A model that cannot be asked
    passes with a warning that says why.

    Raises:
        ModelError: It takes none; or one document changes with another, or differs from what it is alone.
    """
    DocumentsGuard(model).require(is_promised=True)


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


def _ask(model: nn.Module) -> _Answer:
    if type(model) is Transformer:
        return _Answer()
    if not _may_take_positions(model):
        return _Answer(refusal=_refused(model, f"its forward takes no {_POSITIONS}"))
    is_theirs = is_hugging_face(model)
    if is_theirs and (kinds := not_attention(model)):
        return _Answer(refusal=_refused(model, f"it has layers of {', '.join(kinds)}"))
    try:
        probe = Probe(model, torch.device("cpu") if is_theirs else _device_of(model), anew=is_theirs)
        problem = _problem(probe)
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


def _problem(probe: Probe) -> str:
    """Return what is wrong with two documents in one sample; empty if nothing is.

    Raises:
        Exception: The model takes no such samples.
    """
    first: Exception | None = None
    for lengths in _LENGTHS:
        try:
            found = _problem_with(probe, *lengths, seed=0)
        except Exception as error:
            first = first or error
            continue
        # Rounding may send a token to another expert, but not for other tokens as well.
        return found and _problem_with(probe, *lengths, seed=1)
    assert first is not None
    raise first


def _problem_with(probe: Probe, before: int, after: int, *, seed: int) -> str:
    tokens = probe.inputs(before + after, seed)
    other = probe.changed(tokens)
    positions = torch.cat([torch.arange(before), torch.arange(after)])[None].to(tokens.device)
    parts = (slice(0, before), slice(before, before + after))
    packed = probe.run(tokens, named={_POSITIONS: positions})
    if packed.dim() < 2 or packed.shape[1] != before + after:
        raise ValueError(f"its output {list(packed.shape)} has no dim of {before + after} positions")
    for changed, kept in (parts, parts[::-1]):
        mixed = tokens.clone()
        mixed[:, changed] = other[:, changed]
        found = probe.run(mixed, named={_POSITIONS: positions})
        if difference(found[:, kept], packed[:, kept]) > 1:
            return "its output for one document changes with another"
    if difference(probe.run(tokens, named={_POSITIONS: positions}, seed=1), packed) > 1:
        return ""  # it draws random numbers, other ones for other shapes
    for kept in parts:
        alone = _alone(probe, tokens[:, kept], positions[:, kept])
        if alone is not None and difference(packed[:, kept], alone) > 1:
            return "its output for a document differs from that for the document alone"
    return ""


def _alone(probe: Probe, tokens: Tensor, positions: Tensor) -> Tensor | None:
    named: list[dict[str, Any]] = [{}, {_POSITIONS: positions}]
    for each in named:
        try:
            return probe.run(tokens, named=each)
        except Exception:  # it needs positions, or takes one length only
            continue
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

"""Marks for tools of others: a context that is opened with each span, such as an NVTX range."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import final


@final
class Marks:
    """The marks that a recorder makes beside its spans; none at first.

    Attributes:
        new: Returns the context that marks a span, from the span's kind and name; None to mark nothing.
    """

    __slots__ = ("new",)

    def __init__(self) -> None:
        self.new: Callable[[str], AbstractContextManager[object]] | None = None


@final
class Marked:
    """A span and its mark as one context."""

    __slots__ = ("_mark", "_span")

    def __init__(self, span: AbstractContextManager[None], mark: AbstractContextManager[object]) -> None:
        self._span = span
        self._mark = mark

    def __enter__(self) -> None:
        self._mark.__enter__()
        self._span.__enter__()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._span.__exit__(error_type, error, traceback)
        self._mark.__exit__(error_type, error, traceback)

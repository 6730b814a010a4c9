"""The events of a Chrome trace, one at a time, from files of any size.

A trace is a JSON list of events, or an object with the list as "traceEvents". The file is read in pieces, and
memory holds one event and one piece. Values beside the list are given if they come before it, and small ones
if they come after it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from shoal.errors import RunError

_PIECE = 1 << 20  # characters
_LONGEST_EVENT = 16 << 20  # characters
_LIST = '"traceEvents"'


def events_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events; the first item is an object with the other values of the trace, without its list.

    Raises:
        RunError: The file cannot be read, is torn, or is no trace; the message names the place.
    """
    try:
        with _open(path) as file:
            yield from _Reader(path, file).events()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise _refused(path, f"cannot be read: {error}") from error
    except RecursionError as error:
        raise _refused(path, "holds values that are nested too deeply") from error


def _open(path: Path) -> TextIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="replace")
    return path.open(encoding="utf-8-sig", errors="replace")


def _refused(path: Path, what: str) -> RunError:
    return RunError(
        f"{path} {what}",
        possible="a whole Chrome trace, as PyTorch's profiler exports it: .json or .json.gz",
        change="export or copy the trace again",
    )


class _Reader:
    """A place in a trace, and the text from there as far as it is read."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path = path
        self._file = file
        self._text = ""
        self._at = 0
        self._before = 0  # characters of the file before the text
        self._decoder = json.JSONDecoder()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the values beside the list, then its events."""
        first = self._next_character()
        beside: dict[str, Any] = {}
        if first == "{":
            self._at += 1
            while (character := self._next_character()) == '"':
                key = self._value()
                self._expect(":")
                if key == "traceEvents":
                    break
                beside[str(key)] = self._value()
                if self._next_character() == ",":
                    self._at += 1
            else:
                raise self._torn(f"has no list of events before {character!r}")
            first = self._next_character()
        if first != "[":
            raise self._torn("is no list of events")
        self._at += 1
        yield beside
        while (character := self._next_character()) != "]":
            if character == ",":
                self._at += 1
                continue
            event = self._value()
            if not isinstance(event, dict):
                raise self._torn("has an event that is no object")
            yield event

    def _value(self) -> Any:
        """Return the next value; read on until it is whole."""
        self._next_character()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > _LONGEST_EVENT:
                    raise self._torn("has a value that is too long or cannot be read") from error
                if not self._read_on(max(_PIECE, len(self._text) - self._at)):
                    raise self._torn("ends within, or holds, a value that cannot be read") from error
                continue
            if end == len(self._text) and self._read_on(_PIECE):  # a number may go on
                continue
            self._at = end
            return value

    def _expect(self, character: str) -> None:
        if self._next_character() != character:
            raise self._torn(f"has no {character!r} where one is needed")
        self._at += 1

    def _next_character(self) -> str:
        """Return the next character that is no white space, without passing it.

        Raises:
            RunError: The file ends here.
        """
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on(_PIECE):
                raise self._torn("ends before its list of events does")

    def _read_on(self, characters: int) -> bool:
        """Read more text, and forget what was passed; return whether there was more."""
        more = self._file.read(characters)
        if not more:
            return False
        self._before += self._at
        self._text = self._text[self._at :] + more
        self._at = 0
        return True

    def _torn(self, what: str) -> RunError:
        return _refused(self._path, f"{what} (at character {self._before + self._at:,})")

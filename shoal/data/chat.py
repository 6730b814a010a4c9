"""Conversations as samples: messages under a chat template, of which only the answers are learned.

A stream of conversations holds the ids of each conversation, then one id that ends it. An id that belongs to
an answer stands as the id plus the size of the vocabulary, and the end as twice that size.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.bounds import text_bounds
from shoal.data.tokenizer import Tokenizer
from shoal.errors import ConfigError, DataError, MissingExtraError

_IGNORED = -100  # as in torch: a position without a target


@final
class ChatSamples:
    """Conversations of one length: short ones are padded, and long ones cut; only answers are targets.

    Args:
        tokens: A stream of conversations, `[length]`.
        tokenizer: The tokenizer that made the stream.
        sequence: Tokens that the model sees at once.

    Raises:
        ConfigError: `sequence` is not positive.
        DataError: There is no conversation.
    """

    deterministic = True

    def __init__(self, tokens: NDArray[np.integer], tokenizer: Tokenizer, sequence: int) -> None:
        if sequence < 1:
            raise ConfigError(
                f"the sequence length is {sequence}",
                possible="a positive number of tokens",
                change="set the sequence length to 1 or more",
            )
        self._tokens = np.asarray(tokens)
        self._size = tokenizer.vocab_size
        self._padding = tokenizer.padding if tokenizer.padding is not None else tokenizer.end_of_text
        self._starts, self._ends = text_bounds(self._tokens, 2 * self._size)
        self.sequence = sequence

    def require_answers(self) -> None:
        """Refuse conversations from which nothing can be learned.

        Raises:
            DataError: None has an answer within its first tokens.
        """
        if not any(self._text(index)[1:].max(initial=0) >= self._size for index in range(len(self))):
            raise DataError(
                f"no conversation has an answer within its first {self.sequence + 1} tokens",
                possible="a sequence that is long enough for a question and its answer",
                change="set a larger sequence length",
            )

    def __len__(self) -> int:
        return len(self._ends)

    def batch(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of the samples at `indices`, int64 `[batch, seq]` each.

        Targets that belong to no answer are -100. Padding stands behind the text, where no token of it
        attends.

        Raises:
            IndexError: An index is not in `range(len(self))`.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"sample indices must lie in range({len(self)})")
        ids = np.full((len(indices), self.sequence + 1), self._padding, dtype=np.int64)
        is_answer = np.zeros(ids.shape, dtype=bool)
        for row, index in enumerate(indices):
            text = self._text(int(index)).astype(np.int64)
            ids[row, : len(text)] = text % self._size
            is_answer[row, : len(text)] = text >= self._size
        targets = np.where(is_answer, ids, _IGNORED)[:, 1:]
        return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets.copy())

    def _text(self, index: int) -> NDArray[np.integer]:
        start, end = self._starts[index], self._ends[index]
        return self._tokens[start : min(end, start + self.sequence + 1)]


_ANSWERS = "assistant"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FILES = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"


def template_identity(name: str) -> str:
    """Return a text that differs between chat templates of a tokenizer's folder."""
    digest = hashlib.sha256()
    for file in (Path(name).expanduser() / each for each in _FILES):
        digest.update(file.read_bytes() if file.is_file() else b"none")
    return digest.hexdigest()


@final
class ChatTemplate:
    """The chat template of a tokenizer. Threads may share it.

    Args:
        name: The tokenizer's folder, with tokenizer.json and tokenizer_config.json.

    Raises:
        DataError: There is no such folder, or it has no chat template.
        MissingExtraError: transformers is not installed.
    """

    def __init__(self, name: str) -> None:
        folder = Path(name).expanduser()
        tokenizer = _load(folder) if (folder / "tokenizer.json").is_file() else None
        if tokenizer is None or not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {name!r} has no chat template, and data.messages names conversations",
                possible="a folder with tokenizer.json, tokenizer_config.json and chat_template.jinja, as "
                "save_pretrained writes them",
                change="set data.tokenizer to the folder of a model that was trained on conversations",
            )
        self._tokenizer = tokenizer
        self._mutex = threading.Lock()  # a tokenizer of transformers refuses two threads at once
        self._has_marks = bool(_MARKS.search(str(tokenizer.chat_template)))

    def encode(self, messages: Any, place: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the ids of a conversation, and which of them belong to answers, `[length]` each.

        Answers are what the template marks with `{% generation %}`. In a template without marks, they are the
        messages of the role "assistant", from the end of the generation prompt to the end of the message.

        Args:
            messages: The messages, with `role` and `content`.
            place: Place of the row, for errors.

        Raises:
            DataError: These are no messages, none is an answer, or the template does not take them.
        """
        _require_messages(messages, place)
        try:
            with self._mutex:
                ids, answers = (
                    self._with_marks(messages) if self._has_marks else self._between(messages, place)
                )
        except DataError:
            raise
        except Exception as error:  # a template may raise anything
            raise DataError(
                f"{place} does not fit the chat template: {type(error).__name__}: {error}",
                possible="the roles in the order that the template wants",
                change="correct the messages, or remove the row",
            ) from error
        return np.asarray(ids, dtype=np.int64), np.asarray(answers, dtype=bool)

    def _with_marks(self, messages: Any) -> tuple[Sequence[int], Sequence[int]]:
        encoded = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return encoded["input_ids"], encoded["assistant_masks"]

    def _between(self, messages: Sequence[Any], place: str) -> tuple[Sequence[int], Sequence[bool]]:
        whole = self._render(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == _ANSWERS:
                asked = self._render(messages[:number], add_generation_prompt=True)
                answered = self._render(messages[: number + 1])
                if not (answered.startswith(asked) and whole.startswith(answered)):
                    raise DataError(
                        f"the chat template changes earlier messages of {place} when later ones follow, so "
                        "answers cannot be found in its text",
                        possible="a template that appends, or one with {% generation %} around answers",
                        change="add these marks to the chat template",
                    )
                spans.append(range(len(asked), len(answered)))
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        starts = (start for start, _ in encoded["offset_mapping"])
        return encoded["input_ids"], [any(start in span for span in spans) for start in starts]

    def _render(self, messages: Sequence[Any], **options: Any) -> str:
        if not messages and options:
            return ""
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text


def _load(folder: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("a chat template", package="transformers", extra="hf") from error
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise DataError(
            f"transformers cannot load the tokenizer {str(folder)!r}: {type(error).__name__}: {error}",
            possible="a folder with tokenizer.json and tokenizer_config.json",
            change="copy the folder of the model again",
        ) from error


def _require_messages(messages: Any, place: str) -> None:
    is_list = isinstance(messages, list) and all(
        isinstance(each, dict) and "role" in each for each in messages
    )
    if not is_list or not messages:
        raise DataError(
            f"{place} holds no messages",
            possible='a list such as [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", ...}]',
            change="correct the row, or name the field of the messages in data.messages",
        )
    if all(each["role"] != _ANSWERS for each in messages):
        raise DataError(
            f"{place} has no answer: no message of the role {_ANSWERS!r}, but {', '.join(_roles(messages))}",
            possible=f"at least one message of the role {_ANSWERS!r}",
            change="remove the row, or correct its roles",
        )


def _roles(messages: Sequence[Any]) -> Iterator[str]:
    return (str(role) for role in dict.fromkeys(each["role"] for each in messages))

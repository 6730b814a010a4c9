"""Conversations as samples: messages under a chat template, of which only the answers are learned.

A stream of conversations holds the ids of each conversation, then one id that ends it. An id that belongs to
an answer stands as the id plus the size of the vocabulary, and the end as twice that size.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.bounds import text_bounds
from shoal.data.tokenizer import Tokenizer
from shoal.errors import ConfigError, DataError

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

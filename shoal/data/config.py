"""The configuration of the data: the text to train on, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shoal.units import parse_bytes

_Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DataConfig(BaseModel):
    """The text to train on, and its tokenizer."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    source: str | tuple[str, ...] | dict[str, _Weight] = "stdlib"
    """A file, a folder, or several; "stdlib" is the source of Python's own standard library, and
    "datasets:PATH#SPLIT" a dataset of the package `datasets`, and a URL such as s3://bucket/texts a remote
    file or folder. A table from sources to weights mixes them: each gives its share of the samples.
    """

    tokenizer: str = "bytes"
    """"bytes", the path of a Hugging Face tokenizer.json, or "ids:N" for ids below N made elsewhere."""

    field: str = "text"
    """The field of each .jsonl line, or the column of each .csv, .tsv and .parquet file, that holds the text.
    """

    label: str = ""
    """The field or column that holds the label. With it the task is sequence classification: each row is one
    sample, and the model predicts its class.
    """

    pair: str = ""
    """The field or column that holds a second text, with `label`: each row is a pair of texts, such as a
    question and a sentence, in the form that the tokenizer has for two.
    """

    messages: str = ""
    """The field or column that holds a conversation, a list of messages with `role` and `content`. With it
    each row is one sample under the tokenizer's chat template, and only answers are learned.
    """

    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """The type of the ids in .bin files, which do not say it themselves; little-endian."""

    suffixes: tuple[str, ...] = (".txt", ".md", ".py", ".jsonl", ".csv", ".tsv", ".parquet")
    """Which files of a folder are read; a file that is named itself is read whatever its suffix."""

    boundaries: bool = False
    """Whether documents in a sample are kept apart: attention does not cross their boundaries, positions
    begin anew in each, and the token that ends a document has no target.
    """

    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    """The share of the documents (of the ids, in .npy and .bin files) that is kept for validation. With
    `streaming` the last tokens or rows of a few chunks are.
    """

    validation: str = ""
    """A file, folder, dataset or URL that is for validation only; then all of `source` is trained on."""

    workers: int = Field(default=0, ge=0)
    """Processes that encode text with a tokenizer file or a chat template; 0: the process that trains does.
    The tokens are the same.
    """

    streaming: bool = False
    """Whether text is encoded while the model trains, and only some of its tokens are kept on disk: for text
    that is larger than the disk, or to begin at once.
    """

    window: str = "64MiB"
    """The text in which samples are shuffled with `streaming`; tokens of up to three windows of each source
    are kept.
    """

    cache: Path | None = None
    """Where tokens are kept: by default $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal, else ~/.cache/shoal."""

    @field_validator("window")
    @classmethod
    def _is_a_size(cls, window: str) -> str:
        if parse_bytes(window) < 1:
            raise ValueError("must be at least one byte")
        return window

    @field_validator("source", "suffixes")
    @classmethod
    def _is_not_empty(
        cls, value: str | tuple[str, ...] | dict[str, float]
    ) -> str | tuple[str, ...] | dict[str, float]:
        if not value or "" in tuple(value):
            raise ValueError("must not be empty")
        return value

    @field_validator("suffixes")
    @classmethod
    def _start_with_a_dot(cls, suffixes: tuple[str, ...]) -> tuple[str, ...]:
        for suffix in suffixes:
            if not suffix.startswith("."):
                raise ValueError(f"{suffix!r} must start with a dot, as in '.{suffix}'")
        return suffixes

    @model_validator(mode="after")
    def _has_one_task(self) -> DataConfig:
        if self.label and self.messages:
            raise ValueError("label and messages name two tasks: give one of them")
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources as a tuple, even if there is one."""
        return (self.source,) if isinstance(self.source, str) else tuple(self.source)

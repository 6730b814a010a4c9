"""The layers of a model that tensor parallelism splits, and how, as the user or Shoal describes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from shoal.errors import PlanError


@dataclass(frozen=True, slots=True)
class Split:
    """The split of the linear layers within one module.

    A layer has its name within the module, which may be dotted: `inner.query`. A rank gets equal blocks of a
    layer's outputs or inputs, one after another. The outputs of a fused layer, such as of query, key and
    value, must therefore lie part by part: all of the first head, then all of the second.

    Attributes:
        columns: Layers that are split by outputs and all read the module's input, each with the number of
            parts that must stay whole: heads, or features.
        rows: Layers that are split by inputs and write the module's output, each with its number of parts.
        by_part: The fused layers among `columns`. A layer is refused if it is not named here and has more
            outputs for each part than the rows take.
    """

    columns: Mapping[str, int]
    rows: Mapping[str, int]
    by_part: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The layers of a model that are split, and how.

    Patterns are those of `fnmatch.fnmatchcase`, and match whole names: `*` stands for any text, dots too, `?`
    for one character, `[01]` for one of these characters. `blocks.*.attention` is the attention of every
    block; the pattern "" is the model itself.

    Attributes:
        splits: The split of each module, by pattern of the names in `named_modules()`.
        embedding: Name, not a pattern, of the `nn.Embedding` of tokens, which is split by the vocabulary;
            None if none can be split. Then only `tensor=plain` works, since the sequence is split at the
            embedding.
        head: Name of the `nn.Linear` that gives logits, split by the vocabulary; None if the embedding's
            weight does, in the model's method `unembed(hidden)`. The model's output is `SplitLogits`.
        sequence: Whether the model works if the embedding gives a part of the sequence; if not, only
            `tensor=plain` works.
        partial: Patterns of the names in `named_parameters()`, for parameters that every rank has whole and
            that work on its own heads or features, such as a norm of each head. Each rank has a part of their
            gradient's sum.
    """

    splits: Mapping[str, Split] = field(default_factory=dict)
    embedding: str | None = "embed"
    head: str | None = "head"
    sequence: bool = True
    partial: tuple[str, ...] = ()

    def partial_of(self, names: Iterable[str]) -> frozenset[str]:
        """Return the parameters of a model that `partial` names, out of the names of all.

        Raises:
            PlanError: A pattern matches no parameter.
        """
        known = list(names)
        found = {pattern: {name for name in known if fnmatchcase(name, pattern)} for pattern in self.partial}
        for pattern, matches in found.items():
            if not matches:
                raise PlanError(
                    f"the layout's `partial` names {pattern}, and the model has no such parameter",
                    possible="patterns for names in named_parameters()",
                    change="correct the pattern, or leave it out",
                )
        return frozenset().union(*found.values())

"""Which layers of a model tensor parallelism splits, and how: what a user says of a model of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from shoal.errors import PlanError

__all__ = ["Split", "TensorLayout"]


@dataclass(frozen=True, slots=True)
class Split:
    """How the linear layers within one module are split.

    A layer is named as within the module, and the name may be dotted: `inner.query`. A rank gets equal blocks
    of a layer's outputs or inputs, one after another. The outputs of a fused layer, such as of query, key and
    value, must therefore lie part by part: all of the first head, then all of the second.

    Attributes:
        columns: Layers that are split by outputs, and all read the module's input, each with the number of
            parts that must stay whole: heads, or features.
        rows: Layers that are split by inputs, and write the module's output, with that number too.
        by_part: The fused layers among `columns`. A layer that gives more than the rows take for each part,
            and is not named here, is refused.
    """

    columns: Mapping[str, int]
    rows: Mapping[str, int]
    by_part: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Which layers of a model are split how.

    Patterns are those of `fnmatch.fnmatchcase`, and match whole names: `*` stands for any text, dots too, `?`
    for one character, `[01]` for one of these characters. `blocks.*.attention` is the attention of every
    block; the pattern "" is the model itself.

    Attributes:
        splits: By pattern of the names in `named_modules()`.
        embedding: Name, not a pattern, of the `nn.Embedding` of tokens, which is split by the vocabulary;
            None if there is none to split. Then only `tensor=plain` works: the embedding is where the
            sequence is split.
        head: Name of the `nn.Linear` that gives logits, split by the vocabulary; None if the embedding's
            weight does, in the model's method `unembed(hidden)`. The model's output is `SplitLogits`.
        sequence: Whether the model works when the embedding gives a part of the sequence; else only
            `tensor=plain` does.
        partial: Patterns of the names in `named_parameters()`, of parameters that every rank has whole and
            that work on its own heads or features, such as a norm of each head: what each rank has of their
            gradient is a part of a sum.
    """

    splits: Mapping[str, Split] = field(default_factory=dict)
    embedding: str | None = "embed"
    head: str | None = "head"
    sequence: bool = True
    partial: tuple[str, ...] = ()

    def partial_of(self, names: Iterable[str]) -> frozenset[str]:
        """The parameters of a model that `partial` names, out of the names of all.

        Raises:
            PlanError: A pattern names none.
        """
        known = list(names)
        found = {pattern: {name for name in known if fnmatchcase(name, pattern)} for pattern in self.partial}
        for pattern, matches in found.items():
            if not matches:
                raise PlanError(
                    f"the layout's `partial` names {pattern}, and the model has no such parameter",
                    possible="patterns of the names in named_parameters()",
                    change="correct the pattern, or leave it out",
                )
        return frozenset().union(*found.values())

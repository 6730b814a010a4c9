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

    Attributes:
        columns: Layers that are split by outputs, and all read the module's input, each with the number of
            parts that must stay whole: heads, or features.
        rows: Layers that are split by inputs, and write the module's output, with that number too.
    """

    columns: Mapping[str, int]
    rows: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Which layers of a model are split how.

    Attributes:
        splits: By pattern of module names, in which `*` stands for anything.
        embedding: Name of the `nn.Embedding` of tokens, which is split by the vocabulary; None if there is
            none to split. Then only `tensor=plain` works: the embedding is where the sequence is split.
        head: Name of the `nn.Linear` that gives logits, split by the vocabulary; None if the embedding's
            weight does, in the model's method `unembed(hidden)`. The model's output is `SplitLogits`.
        sequence: Whether the model works when the embedding gives a part of the sequence; else only
            `tensor=plain` does.
        partial: Patterns of names of parameters that every rank has whole and that work on its own heads or
            features, such as a norm of each head: what each rank has of their gradient is a part of a sum.
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

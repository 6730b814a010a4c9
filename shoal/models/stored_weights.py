"""The tensors in files that make a parameter, where transformers stacks what files have apart.

Since release 5 a model of transformers has the experts of a layer in two parameters, and one tensor for each
matrix of each expert in its files:

==============================================  ===========================================================
parameter                                       tensors of expert e
==============================================  ===========================================================
`mlp.experts.gate_up_proj [experts, 2 f, h]`    `mlp.experts.e.gate_proj.weight [f, h]`, then `up_proj`
`mlp.experts.down_proj [experts, h, f]`         `mlp.experts.e.down_proj.weight [h, f]`
==============================================  ===========================================================

Mixtral's files call `mlp` `block_sparse_moe`, and the three matrices `w1`, `w3` and `w2`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from torch import Tensor

_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LIKE_MIXTRAL = ("minimax", "mixtral")
_APART = ("deepseek_v2", "deepseek_v3", "olmoe", "qwen2_moe", "qwen3_moe")
"""Models of transformers whose files have experts apart, under the names of the model."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: a whole parameter, or rows of one expert in a stack.

    Attributes:
        name: Its name in the file.
        shape: Its shape.
        expert: Index of the expert; None for a whole parameter.
        row: Its first row within the expert.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    row: int = 0

    def of(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that it is, as a view."""
        return parameter if self.expert is None else parameter[self.expert].narrow(0, self.row, self.shape[0])

    def start(self, shape: tuple[int, ...]) -> int:
        """Return its first element in the flattened parameter, which has this shape."""
        if self.expert is None:
            return 0
        _, rows, width = shape
        return (self.expert * rows + self.row) * width


def find_stored(name: str, shape: tuple[int, ...], names: Container[str]) -> list[StoredTensor] | None:
    """Return the tensors that make a parameter, out of those with these names; None if some are not there."""
    for stored in _spellings(name, shape):
        if all(each.name in names for each in stored):
            return stored
    return None


def stored_for(model_type: str, name: str, shape: tuple[int, ...]) -> list[StoredTensor]:
    """Return the tensors as which a parameter is written, for a model of transformers of this type."""
    plain, *others = _spellings(name, shape)
    if not others or model_type not in (*_LIKE_MIXTRAL, *_APART):
        return plain
    return others[-1] if model_type in _LIKE_MIXTRAL else others[0]


def _spellings(name: str, shape: tuple[int, ...]) -> Iterator[list[StoredTensor]]:
    """Yield the parameter itself; of experts and routers also what it is made of, Mixtral's form last."""
    whole = [StoredTensor(name, shape)]
    yield whole
    layer, found, kind = name.rpartition(".mlp.experts.")
    if found and kind in _STACKS and len(shape) == 3:
        yield _apart(f"{layer}.mlp.experts", shape, _STACKS[kind])
        yield _apart(f"{layer}.block_sparse_moe.experts", shape, [_MIXTRAL[each] for each in _STACKS[kind]])
    elif name.endswith(".mlp.gate.weight"):
        yield whole
        yield [StoredTensor(name.replace(".mlp.", ".block_sparse_moe."), shape)]


def _apart(experts: str, shape: tuple[int, ...], matrices: tuple[str, ...] | list[str]) -> list[StoredTensor]:
    count, rows, width = shape
    part = rows // len(matrices)
    return [
        StoredTensor(f"{experts}.{expert}.{matrix}.weight", (part, width), expert, number * part)
        for expert in range(count)
        for number, matrix in enumerate(matrices)
    ]

"""What a rank sends for one block, by the formulas of docs/concepts/parallelism.md; a test counts it."""

from __future__ import annotations

from shoal.models import TransformerConfig

__all__ = ["SENT", "bytes_sent"]

_GATHERED = "b B S H (n-1)/n"

SENT = {
    "tensor=plain": (f"4 {_GATHERED}", f"4 {_GATHERED}"),
    "tensor=sequence": (f"4 {_GATHERED}", f"6 {_GATHERED}"),
    "tensor=async": (f"4 {_GATHERED}", f"6 {_GATHERED}"),
    "context=ring": ("2 b B S K D (n-1)/n", "2 (b+4) B S K D (n-1)/n"),
    "context=ulysses": ("2 b B S (H+K D)/n (n-1)/n", "2 b B S (H+K D)/n (n-1)/n"),
    "ep": ("2 k b B S H/n (n-1)/n", "2 k b B S H/n (n-1)/n"),
}
"""By strategy, the bytes in forward and in backward.

n ranks have B sequences of S tokens together, with b bytes in an element. A block is H wide, with K key and
value heads of width D; a token goes to k experts, evenly spread.
"""


def bytes_sent(formula: str, shape: TransformerConfig, *, ranks: int, tokens: int, width: int) -> float:
    """The value of a formula of `SENT`.

    Args:
        formula: Factors with a space between them.
        shape: Of the model.
        ranks: n.
        tokens: B S.
        width: b.
    """
    names = {
        "n": ranks,
        "B": 1,
        "S": tokens,
        "b": width,
        "H": shape.hidden,
        "K": shape.kv_heads,
        "D": shape.head_dim,
        "k": shape.experts_per_token,
    }
    value: float = eval(formula.replace(" ", "*"), {"__builtins__": {}}, names)
    return value

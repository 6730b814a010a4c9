"""What a communication is for, told by the name of its span.

Of "all_gather:bucket 3" the part before the colon is the operation, and that behind it says what is sent.
Axes may join the same ranks, so that only the name tells them apart.
"""

from __future__ import annotations

__all__ = ["PURPOSES", "purpose_of"]

PURPOSES = ("tensor", "context", "expert", "data", "pipeline", "control")
"""The axes, and what all ranks agree on: the norm of the gradient, the loss, whether to stop."""

_MESSAGES = ("activation", "gradient", "form")
_SENT = {
    "keys and values": "context",
    "key and value gradients": "context",
    "heads": "context",
    "positions": "context",
    "tokens": "expert",
    "choices of samples": "expert",
    "embedding": "pipeline",
    "gradient norm": "control",
    "report": "control",
    "": "control",  # a wait for the slowest rank, with nothing to send
}


def purpose_of(name: str) -> str:
    """One of PURPOSES, by a span's name.

    >>> [purpose_of(name) for name in ("all_reduce:bucket 0", "shift:column", "activation:3F0")]
    ['data', 'tensor', 'pipeline']
    """
    operation, _, sent = name.partition(":")
    if operation in _MESSAGES or sent.endswith(".weight"):  # which the first and last stage share
        return "pipeline"
    if sent.startswith("bucket"):
        return "data"
    return _SENT.get(sent, "expert" if "expert" in sent else "tensor")

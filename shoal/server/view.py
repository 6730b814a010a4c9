"""The values that workers have, where servers send them less than their own.

After each update a server encodes the difference between its values and the view, and adds to the view what a
worker decodes of it. So what a payload leaves out is in the next difference, and the view depends on the
updates alone: all workers that have the same version have equal bits, and so has the copy on another server.

    version of a worker's view    what a pull gets
    at most a few updates old     the payloads since then, which it adds to its own view
    older, or none                the view itself
"""

from __future__ import annotations

from typing import NamedTuple, final

import torch

from shoal.collectives import Codec


class Payload(NamedTuple):
    """What brings a view from one version to the next.

    Attributes:
        before: The version before.
        version: The version after.
        content: Bytes that a Codec decodes; `version` is its seed.
    """

    before: int
    version: int
    content: torch.Tensor


@final
class View:
    """The values `[elements]` that workers have.

    Args:
        codec: Encodes differences.
        values: The first values of the server, which workers get whole.

    Attributes:
        values: The view of the last version; it is replaced, not changed, and so needs no copy to be sent.
    """

    def __init__(self, codec: Codec, values: torch.Tensor) -> None:
        self.values = values.clone()
        self._codec = codec
        self._payloads: list[Payload] = []

    def follow(self, values: torch.Tensor, before: int, version: int) -> None:
        """Go on to the values of a server after an update."""
        difference = values - self.values
        content = torch.empty(self._codec.payload(len(values)), dtype=torch.uint8)
        written = self._codec.encode(difference, content, seed=version)
        content = content[:written].clone() if written < len(content) else content
        self.values = self.values.clone()
        self._codec.decode_add(content, self.values, seed=version)
        self._payloads.append(Payload(before, version, content))
        while self._payloads and sum(each.content.nbytes for each in self._payloads) >= values.nbytes:
            del self._payloads[0]  # the view itself is not longer than all of them

    def since(self, version: int) -> list[Payload] | None:
        """Return the payloads that bring the view of a version to the last one; None if some are gone."""
        if self._payloads and self._payloads[-1].version == version:
            return []
        places = [place for place, each in enumerate(self._payloads) if each.before == version]
        return self._payloads[places[0] :] if places else None

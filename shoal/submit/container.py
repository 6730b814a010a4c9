"""A Containerfile for a training, which buildah, podman and docker build."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """An image with Shoal and PyTorch.

    Attributes:
        words: Arguments of the program `shoal` that a container runs by default.
        base: The image that it begins from, with Python 3.11 or newer and its venv, and apt.
        extras: Extras of Shoal that are installed.
    """

    words: Sequence[str]
    base: str
    extras: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.base.strip() or any(character.isspace() for character in self.base):
            raise ConfigError(
                f"--base {self.base!r} is no name of an image",
                possible="a name such as python:3.12-slim",
                change="correct the name",
            )

    @property
    def text(self) -> str:
        """The Containerfile; the folder that it is built in is Shoal's source."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        return _CONTAINERFILE.format(base=self.base, extras=extras, command=json.dumps(list(self.words)))


_CONTAINERFILE = """\
# Build it in the folder of Shoal's source: buildah build --file Containerfile --tag shoal .
FROM {base} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3-dev
COPY . /source
RUN python3 -m venv /opt/shoal \\
 && /opt/shoal/bin/pip install --no-cache-dir --constraint /source/constraints.txt '/source{extras}'

FROM {base}
COPY --from=build /opt/shoal /opt/shoal
ENV PATH=/opt/shoal/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 shoal
USER 1000
WORKDIR /home/shoal
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "shoal"]
CMD {command}
"""

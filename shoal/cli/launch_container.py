"""`shoal launch container`: prints a Containerfile for a training."""

from __future__ import annotations

import argparse

from shoal.cli.launched_train import TrainWords, add_words
from shoal.submit import Container

__all__ = ["add_target"]


def add_target(targets: argparse._SubParsersAction) -> None:
    """Add the target to `shoal launch`."""
    parser = targets.add_parser(
        "container",
        help="in a container, whose Containerfile this prints",
        description="Prints a Containerfile, which buildah, podman and docker build in the folder of Shoal's "
        "source. A container of it trains with the words after --, or does what it is given instead.",
    )
    parser.add_argument(
        "--base", metavar="IMAGE", default="python:3.12-slim", help="with Python, its venv, and apt"
    )
    parser.add_argument(
        "--extra", metavar="NAME", action="append", default=[], help="an extra of Shoal, such as hf"
    )
    add_words(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    words = TrainWords.of(args.words).words
    print(Container(words=words, base=args.base, extras=args.extra).text, end="")
    return 0

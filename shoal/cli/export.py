"""Writes the weights of a run's newest sound checkpoint, its configuration and its tokenizer into a new
folder, which from_pretrained and inference engines read. A run with LoRA gives its adapters alone, as peft
reads them, or with --merge the whole model.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shoal.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("path", metavar="RUN", type=Path, help="a run, or one of its checkpoints")
    parser.add_argument("directory", metavar="DIR", type=Path, help="the folder to make")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: that of the model's configuration, or float32)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add the adapters of a run with LoRA to the weights (default: write the adapters alone)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the folder.

    Raises:
        UserError: The path is not a run, the folder exists, or the model has no such form.
        CheckpointError: The run has no sound checkpoint.
    """
    sys.path.insert(0, os.getcwd())  # for a model of the user's own, which is then refused by name
    from shoal.train.export import export

    made = export(
        args.path,
        args.directory,
        args.dtype,
        merge=args.merge,
        say=lambda text: print(text, file=sys.stderr),
    )
    files = f"{made.files} file{'s' if made.files > 1 else ''}"
    print(
        f"wrote {args.directory}: {made.tensors} tensors in {made.dtype}, {format_bytes(made.nbytes)} in "
        f"{files}, from {made.checkpoint}"
        + ("" if made.has_tokenizer else "; the run has no tokenizer of its own")
    )
    return 0

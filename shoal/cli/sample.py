"""Continues a prompt with the model of a run, from its newest sound checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shoal.errors import RunError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("path", metavar="RUN", type=Path, help="a run, or one of its checkpoints")
    parser.add_argument("--prompt", default="\n", help="what to continue (default: a new line)")
    parser.add_argument("--tokens", type=int, default=300, help="how many tokens to add (default: 300)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the most likely token (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, help="draw only from this many of the most likely tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation.

    Raises:
        UserError: The path is not a run, or a number is out of range.
        CheckpointError: The run has no sound checkpoint.
    """
    import torch

    sys.path.insert(0, os.getcwd())  # for a model of the user's own, `file:function`
    from shoal.data import open_tokenizer
    from shoal.models import generate
    from shoal.train import load_model

    model, config = load_model(args.path, lambda text: print(text, file=sys.stderr))
    if config.data.label:
        raise RunError(
            f"{args.path} trained a classifier, which makes no text",
            possible="a run of a language model",
            change="write the classifier into a folder with shoal export, and load it from there",
        )
    tokenizer = open_tokenizer(config.data.tokenizer)
    prompt = torch.tensor(tokenizer.encode(args.prompt).tolist(), dtype=torch.int64)
    tokens = prompt.tolist()
    shown = ""
    for token in generate(
        model,
        prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        context=config.sequence,
    ):
        tokens.append(token)
        text = tokenizer.decode(tokens)
        # The last bytes may be only a part of a character.
        if not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokenizer.decode(tokens)[len(shown) :])
    return 0

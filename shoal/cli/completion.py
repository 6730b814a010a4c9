"""Prints a script for the Tab key: it completes commands, options, files, and names of models and clusters.
The script is fixed text: it does not start Shoal. Print it again after an update.

bash: shoal completion bash > ~/.local/share/bash-completion/completions/shoal
      (without the package bash-completion: add the line `source FILE` to ~/.bashrc)
zsh:  shoal completion zsh > DIR/_shoal
      (DIR is a folder of $fpath, and ~/.zshrc calls compinit)
fish: shoal completion fish > ~/.config/fish/completions/shoal.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script for `args.program`, the parser of the whole command."""
    import shtab

    from shoal.spec.cluster import PRESETS
    from shoal.spec.workload import shape_names

    _suggest(args.program, {"MODEL": shape_names(), "CLUSTER": PRESETS}, shtab.FILE)
    print(shtab.complete(args.program, args.shell))
    return 0


def _suggest(
    parser: argparse.ArgumentParser, names: Mapping[str, tuple[str, ...]], file: Mapping[str, object]
) -> None:
    """Mark, for shtab, whether an argument is a file or one of the names of its metavar."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _suggest(inner, names, file)
        elif isinstance(action.metavar, str) and action.metavar in names:
            action.choices = names[action.metavar]
        elif action.type is Path:
            action.complete = file  # type: ignore[attr-defined]

"""The commands: a line of help for each, and its arguments only where they are asked for.

A command is the module of its name, with `_` for `-`. Its docstring is the text of `--help`, `add_arguments`
adds its arguments to a parser, and `run` does the work. Subcommands set a `run` of their own.
"""

from __future__ import annotations

import argparse
from importlib import import_module

COMMANDS = {
    "train": "train a model, on this machine or as part of a cluster",
    "launch": "start a training on other machines: by ssh, Slurm, Kubernetes or Ray",
    "sample": "print what a trained model writes",
    "report": "explain a run: where its time went, how fast it was, what it reached",
    "watch": "show a run while it trains",
    "web": "show runs, schedules, collectives and Plans in a browser",
    "compare": "find what differs between two runs, or how speed grows with ranks",
    "advise": "say what would make a run faster, with the predicted gain",
    "what-if": "replay a run without a slow rank, stage, link or wait: the seconds that each costs",
    "check": "prove that a layout computes the same training as one device",
    "schedule": "show pipeline schedules: their tables, bubbles and activations",
    "plan": "choose the best Plan for a model on a cluster, and say why",
    "scale": "draw the scaling curve: step time and efficiency against devices",
    "simulate": "predict a step of a Plan: its time, where it goes, its memory",
    "checkpoint": "list, verify, compare, copy and convert checkpoints",
    "bench": "measure collectives: any backend, any size, checked",
    "aggregate": "add up what hosts send, where the switch is",
    "cluster": "list, show, check, export and import descriptions of machines",
    "probe": "measure this machine, and write a description for --cluster",
    "calibrate": "correct a description of machines with measured runs",
    "validate": "predict the rows of a table of measurements, and show the errors",
    "export": "write a trained model in Hugging Face's layout",
    "memory": "say what fills a rank's memory, in a run or under a Plan",
    "doctor": "examine this machine, or the hosts of a run, for what slows or stops training",
    "hang": "say which rank did not come to a collective, and why",
    "drain": "let a rank or a host leave a run that goes on",
    "completion": "print a script that completes this command in bash, zsh or fish",
}
"""Line of help by name."""


def add_command(commands: argparse._SubParsersAction, name: str, *, is_asked: bool = True) -> None:
    """Add a command to a parser, with its arguments if it is asked for: to import its module takes time."""
    parser = commands.add_parser(
        name, help=COMMANDS[name], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if is_asked:
        module = import_module(f"shoal.cli.{name.replace('-', '_')}")
        parser.description = module.__doc__
        parser.set_defaults(run=getattr(module, "run", None))
        module.add_arguments(parser)

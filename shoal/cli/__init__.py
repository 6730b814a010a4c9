"""The command line: `main.py` runs the command that is asked for, `commands.py` lists them, each has a file.

Modules of commands import torch only when they run.
"""

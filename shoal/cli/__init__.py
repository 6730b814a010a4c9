"""The command line: `main.py` finds the command, and each command has a file.

A command's module has `add_parser` and `run`, and imports torch only when it runs.
"""

"""Serves pages to a browser: a run while it is written (loss, speed, parts of the step, ranks, predicted
beside measured), its timeline, the life of a step bucket by bucket, checkpoints and failures; and, without
a run, pipeline schedules, collectives step by step, the choice of Plans, and the communication wall.

It listens on this machine only, and answers only who has the token of the address that it prints. From
another machine: ssh -L PORT:127.0.0.1:PORT HOST. With --export it writes the pages as files, and ends.

Exit codes: 0 written, or stopped by a termination signal; 1 a file of the run is malformed; 2 wrong input;
130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from shoal.errors import UserError
from shoal.listener import loopback


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "path",
        metavar="RUNS",
        type=Path,
        nargs="?",
        help="a run, or a folder of runs (default: runs, or this folder if there is none)",
    )
    parser.add_argument(
        "--export", metavar="DIR", type=Path, help="write the pages as files into a directory, and end"
    )
    parser.add_argument(
        "--page",
        metavar="NAME",
        action="append",
        default=[],
        help="with --export, only this page; may be given several times",
    )
    parser.add_argument("--port", metavar="N", type=int, default=0, help="port (default: a free one)")
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        help="address to listen on (default 127.0.0.1, or ::1 where only IPv6 is: this machine only)",
    )
    parser.add_argument(
        "--name",
        metavar="HOST",
        action="append",
        default=[],
        help="a further name by which browsers reach it, such as that of a proxy; may be given several times",
    )


def run(args: argparse.Namespace) -> int:
    """Serve the pages, or write them.

    Raises:
        RunError: The path is neither a run nor a folder, or there is no such page.
        ConfigError: It cannot listen there.
        MissingExtraError: The packages of the extra `web` are not installed.
        UserError: A file cannot be written.
        ShoalError: A file of the run is malformed.
    """
    from shoal.web import export, is_loopback, serve

    path = args.path or (Path("runs") if Path("runs").is_dir() else Path())
    if args.export is not None:
        try:
            written = export(path, args.export, args.page)
        except OSError as error:
            raise UserError(
                f"the pages cannot be written to {args.export}: {error.strerror}",
                possible="a directory that can be written to",
                change="give another DIR to --export",
            ) from error
        print(f"{len(written)} pages written: open {written[0]}", file=sys.stderr)
        return 0
    host = args.host or loopback()
    if not is_loopback(host):
        print(
            f"shoal: {host} can be reached from other machines; what they send and get, the token "
            "included, is not encrypted",
            file=sys.stderr,
        )
    if args.is_program:
        signal.signal(signal.SIGTERM, _stop)
    serve(
        path,
        host=host,
        port=args.port,
        names=tuple(args.name),
        say=lambda address: print(address, flush=True),
    )
    return 0


def _stop(number: int, frame: object) -> None:
    raise SystemExit(0)

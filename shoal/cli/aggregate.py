"""Adds up what the hosts of process groups send, and sends the sums back. Run it where the network's switch
is: on a machine that every host reaches as fast as its own link allows. Then set
SHOAL_AGGREGATOR=HOST:PORT for the ranks. An all-reduce by the algorithm in-network sends each byte over a
host's link once up and once down; a ring among k hosts takes 2(k-1)/k each way.

It takes everyone who reaches the address, unless SHOAL_AGGREGATOR_SECRET_FILE names a file with a secret, for
it and for the ranks; make one with: (umask 077; head -c 32 /dev/urandom > FILE). Ctrl-C stops it.

Exit codes: 0 stopped by a termination signal; 2 it cannot listen there; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        required=True,
        help="an address of this machine; with port 0 the system chooses one. It is printed",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it.

    Raises:
        ConfigError: It cannot listen there, or the native core was not built.
    """
    # Imported here because it brings torch, which `--help` should not wait for.
    from shoal.collectives import Aggregator

    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    if args.is_program:
        signal.signal(signal.SIGTERM, stop)
    with Aggregator(args.listen) as aggregator:
        print(aggregator.address, flush=True)
        print(f"shoal: set SHOAL_AGGREGATOR={aggregator.address} for the ranks", file=sys.stderr, flush=True)
        aggregator.serve()
    return 0

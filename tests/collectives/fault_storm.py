"""Kills or stops a random rank at a random moment of a random activity, again and again.

    python tests/collectives/fault_storm.py --rounds 200 [--seed N]

Every survivor has to name the rank that was lost; how soon it does is printed. A stopped rank that goes on
finds that the others gave it up. A round that fails prints what repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import time
from collections import defaultdict

from fault_ranks import ACTIVITIES, Ended, Ranks, be_lost

SIZE = 3


def one_round(seed: int) -> tuple[str, list[float]]:
    """One rank lost: what it was, and the seconds until each survivor knew.

    Raises:
        AssertionError: A survivor blames somebody else.
        TimeoutError: A rank hangs.
    """
    choose = random.Random(seed)
    activity = choose.choice(ACTIVITIES)
    is_one_host = choose.random() < 0.5
    victim = choose.randrange(SIZE)
    number = choose.choice((signal.SIGKILL, signal.SIGSTOP))
    survivors = [rank for rank in range(SIZE) if rank != victim]
    with Ranks(be_lost, SIZE, is_one_host, activity, victim) as ranks:
        ranks.hear()
        time.sleep(choose.uniform(0, 0.3))
        moment = ranks.send(victim, number)
        told = ranks.hear(*survivors)
        for ended in told:
            assert isinstance(ended, Ended)
            assert ended.rank == victim, ended
            assert ended.fault == ("peer lost" if number == signal.SIGKILL else "peer stopped"), ended
        if number == signal.SIGSTOP and activity.__name__.startswith("repeat"):
            ranks.send(victim, signal.SIGCONT)
            (ended,) = ranks.hear(victim)
            assert ended.rank in (victim, *survivors), ended
    where = "one host" if is_one_host else "several hosts"
    return f"{number.name}, {where}", [ended.moment - moment for ended in told]


def storm(rounds: int, seed: int) -> dict[str, list[float]]:
    """The seconds until each survivor knew, by what was done to the rank and where."""
    before = set(os.listdir("/dev/shm"))
    delays: dict[str, list[float]] = defaultdict(list)
    for number in range(seed, seed + rounds):
        try:
            kind, seconds = one_round(number)
        except (AssertionError, TimeoutError, EOFError) as error:
            raise AssertionError(f"round failed; repeat it with --rounds 1 --seed {number}") from error
        delays[kind] += seconds
    until = time.monotonic() + 120  # what another test has there meanwhile goes away again
    while left := set(os.listdir("/dev/shm")) - before:
        assert time.monotonic() < until, left
        time.sleep(0.1)
    return dict(delays)


def main() -> None:
    """Prints a table of how soon survivors knew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("| lost by | survivors | median ms | 95 % | longest |\n|---|---|---|---|---|")
    for kind, seconds in sorted(storm(arguments.rounds, arguments.seed).items()):
        milliseconds = sorted(1e3 * each for each in seconds)
        late = milliseconds[int(0.95 * (len(milliseconds) - 1))]
        print(
            f"| {kind} | {len(seconds)} | {statistics.median(milliseconds):.1f} | {late:.1f} | "
            f"{milliseconds[-1]:.1f} |"
        )


if __name__ == "__main__":
    main()

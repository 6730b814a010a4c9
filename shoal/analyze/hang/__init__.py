"""Finds the cause of a hang: who did not come to a collective, and what that rank does instead.

Nouns: Ledger (the last calls of a rank, which survive it), RankState (calls, process and place of a rank),
HangVerdict (the cause, with the ranks). `hold_inquest` examines the ranks of a host and writes their stacks;
`read_dumps` reads what torch's flight recorder left; `judge` is a pure function over states of either kind.
Nothing here imports torch. The backend "shoal" writes ledgers and holds inquests; `shoal hang` reads dumps.
"""

from shoal.analyze.hang.call_log import DTYPES, LEDGERS, NAMES, Ledger, ledger_folder
from shoal.analyze.hang.flight_recorder import is_dump_folder, read_dumps
from shoal.analyze.hang.post_mortem import STACKS_SIGNAL, Peer, hold_inquest, read_states
from shoal.analyze.hang.verdict import Call, Cause, GroupCalls, HangVerdict, Place, RankState, judge

__all__ = [
    "DTYPES",
    "LEDGERS",
    "NAMES",
    "STACKS_SIGNAL",
    "Call",
    "Cause",
    "GroupCalls",
    "HangVerdict",
    "Ledger",
    "Peer",
    "Place",
    "RankState",
    "hold_inquest",
    "is_dump_folder",
    "judge",
    "ledger_folder",
    "read_dumps",
    "read_states",
]

"""Pipeline schedules as tables: one table is run, drawn, timed and proved free of deadlock.

Nouns: Action (a rank's forward or backward of a stage and micro-batch), Schedule (the table of all ranks),
    Kind (the rows, limits, bubble and activations of a named schedule), Times and Played (with start and stop
    of each action), Send and Receive. `make` returns a named schedule, `search` finds one for given times and
    memory. Run by `shoal.parallel`, timed by the simulator. Imports no torch.
"""

from shoal.spec.plan.schedules.common_order import (
    NO_MESSAGE,
    UNKNOWN,
    CommonOrder,
    Message,
    Slot,
    common_order_of,
    made_order,
    play_in_order,
)
from shoal.spec.plan.schedules.kinds import FOUND, KINDS, NAMES, kind_of, make, require_numbers
from shoal.spec.plan.schedules.play import Played, Times, play
from shoal.spec.plan.schedules.schedule import Action, Held, Kind, Schedule, Work, looped, v_shaped
from shoal.spec.plan.schedules.search import search
from shoal.spec.plan.schedules.validate import (
    Payload,
    Receive,
    Send,
    Step,
    require_no_deadlock,
    require_sound,
    transfers,
)

__all__ = [
    "FOUND",
    "KINDS",
    "NAMES",
    "NO_MESSAGE",
    "UNKNOWN",
    "Action",
    "CommonOrder",
    "Held",
    "Kind",
    "Message",
    "Payload",
    "Played",
    "Receive",
    "Schedule",
    "Send",
    "Slot",
    "Step",
    "Times",
    "Work",
    "common_order_of",
    "kind_of",
    "looped",
    "made_order",
    "make",
    "play",
    "play_in_order",
    "require_no_deadlock",
    "require_numbers",
    "require_sound",
    "search",
    "transfers",
    "v_shaped",
]

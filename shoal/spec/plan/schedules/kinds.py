"""All kinds of schedules by name. To add one, add an entry here, with its `Kind` beside its rows.

Schedules that run all micro-batches through a stage before the next: GPipe, and looped breadth-first.

GPipe: Huang et al., arXiv:1811.06965. Looped breadth-first: Lamy-Poirier, arXiv:2211.05953, where a gradient
    of a stage's weights is complete early, so that its reduction hides behind the other stages.

DualPipe-V: DeepSeek's DualPipe cut in half.

DeepSeek-AI, arXiv:2412.19437, and their published schedule (github.com/deepseek-ai/DualPipe). DualPipe feeds
micro-batches in from both ends and so keeps every weight twice. Folded in the middle, each rank has two
stages in a V and each weight once. In the steady state a forward stands directly before the backward of
another micro-batch, so that the communication of one (experts) can hide behind the compute of the other.

Schedules that alternate one forward and one backward: 1F1B and its interleaved form.

Narayanan et al., arXiv:2104.04473. 1F1B has GPipe's bubble, and needs less memory. Interleaving divides the
bubble by the stages of a rank; it multiplies the transfers by that number, and holds somewhat more
activations.

Schedules that fill the bubble with gradients of weights: ZB-H1 and ZB-V.

Qi et al., arXiv:2401.10241 (ZB-H1) and arXiv:2405.15362 (ZB-V: with two stages a rank in a V, the first rank
also has the last stage, so that all ranks hold equally much). I is the gradient of a stage's input, for which
the previous stage waits; W is the gradient of its weights, for which nothing waits until the step ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.errors import PlanError, nearest
from shoal.spec.plan.schedules.schedule import Action, Held, Kind, Row, Schedule, Work


def _gpipe_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return all forwards, then all backwards: in reverse in the paper, in order in torch and here."""
    return tuple(
        Action(work, rank, microbatch)
        for work in (Work.FORWARD, Work.BACKWARD)
        for microbatch in range(microbatches)
    )


def _breadth_first_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return all forwards, stage after stage, then all backwards in reverse."""
    forwards = [
        (stage, microbatch)
        for stage in range(rank, ranks * virtual, ranks)
        for microbatch in range(microbatches)
    ]
    return (
        *(Action(Work.FORWARD, *each) for each in forwards),
        *(Action(Work.BACKWARD, *each) for each in reversed(forwards)),
    )


def _held_breadth_first(
    rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None
) -> tuple[Held, ...]:
    return (Held((float(microbatches),) * virtual, (0.0,) * virtual),)


GPIPE = Kind(name="gpipe", row=_gpipe_row, held=_held_breadth_first)
BREADTH_FIRST = Kind(
    name="looped-bfs",
    row=_breadth_first_row,
    held=_held_breadth_first,
    most_virtual=None,
)


def _row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return the eight parts of the published schedule; W is apart from I where that shortens the bubble."""
    down, up = rank, 2 * ranks - 1 - rank
    both = (down, up)
    behind = ranks - 1 - rank
    row = Row()
    for _ in range(2 * behind):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(behind):
        row.input(up)
        row.weight(both)
        row.forward(up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        row.forward(down)
        row.backward(up)
        row.forward(up)
        row.backward(down)
    for _ in range(behind):
        row.backward(up)
        row.forward(up)
        row.backward(down)
    # From the middle of the last backwards on, W waits until the end.
    for index in range(2 * (rank + 1)):
        stage = down if index % 2 else up
        if index <= rank:
            row.backward(stage)
        else:
            row.input(stage)
    for _ in range(behind):
        row.weight(both)
        row.input(down)
    row.weights(both)
    return row.actions(microbatches)


def _held_dualpipe_v(
    rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None
) -> tuple[Held, ...]:
    return (Held((float(2 * ranks - rank), rank + 1.0), (0.0, 0.0)),)


DUALPIPE_V = Kind(
    name="dualpipe-v",
    row=_row,
    held=_held_dualpipe_v,
    least_virtual=2,
    most_virtual=2,
    v_of=2,
    microbatches_per_rank=2,
    has_halves=True,
)


def _plain_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return forwards until the first gradient can arrive, then one forward and one backward in turn."""
    first = min(ranks - 1 - rank, microbatches)
    return _alternate(
        first,
        [Action(Work.FORWARD, rank, microbatch) for microbatch in range(microbatches)],
        [Action(Work.BACKWARD, rank, microbatch) for microbatch in range(microbatches)],
    )


def _interleaved_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return a row like 1F1B's; micro-batches go through a rank's stages in rounds of as many as ranks."""
    first = min((virtual - 1) * ranks + 2 * (ranks - 1 - rank), microbatches * virtual)
    forwards, backwards = [], []
    for start in range(0, microbatches, ranks):
        for turn in range(virtual):
            for microbatch in range(start, start + ranks):
                forwards.append(Action(Work.FORWARD, turn * ranks + rank, microbatch))
                backwards.append(Action(Work.BACKWARD, (virtual - 1 - turn) * ranks + rank, microbatch))
    return _alternate(first, forwards, backwards)


def _alternate(first: int, forwards: list[Action], backwards: list[Action]) -> tuple[Action, ...]:
    """Return the first forwards, then forward and backward in turn, then the remaining backwards."""
    row = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[len(forwards) - first :])


def _held_one_forward_one_backward(
    rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None
) -> tuple[Held, ...]:
    """Return how many forwards before the first backward, and the one that it follows, are of each stage."""
    first = ranks - 1 - rank if virtual == 1 else (virtual - 1) * ranks + 2 * (ranks - 1 - rank)
    rounds, rest = divmod(min(first + 1, microbatches * virtual), ranks * virtual)
    whole = tuple(float(rounds * ranks + min(max(rest - turn * ranks, 0), ranks)) for turn in range(virtual))
    return (Held(whole, (0.0,) * virtual),)


ONE_FORWARD_ONE_BACKWARD = Kind(name="1f1b", row=_plain_row, held=_held_one_forward_one_backward)
INTERLEAVED = Kind(
    name="interleaved",
    row=_interleaved_row,
    held=_held_one_forward_one_backward,
    least_virtual=2,
    most_virtual=None,
    in_rounds=True,
)


def _h1_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return 1F1B with W `rank` micro-batches behind I: every rank holds as much as 1F1B's first rank."""
    first = min(ranks - 1 - rank, microbatches)
    row = Row()
    for _ in range(first):
        row.forward(rank)
    for index in range(microbatches):
        if index < microbatches - first:
            row.forward(rank)
        row.input(rank)
        if index >= rank:
            row.weight([rank])
    row.weights([rank])
    return row.actions(microbatches)


def _v_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return F, I and W of the stage on the way down and of the one on the way up, in turn.

    The pattern needs 2 ranks - 1 micro-batches or more; for fewer, the actions of missing ones are left out.
    """
    down, up = rank, 2 * ranks - 1 - rank
    least = max(microbatches, 2 * ranks - 1)
    row = Row()
    for _ in range(2 * (ranks - rank) - 1):
        row.forward(down)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(ranks - rank):
        row.forward(up)
        row.input(up)
        row.weight([up])
    while row.forwards(up) < least:
        if row.forwards(down) < least:
            row.forward(down)
        row.input(down)
        row.weight([down])
        row.forward(up)
        row.input(up)
        row.weight([up])
    for _ in range(rank):
        row.input(down)
        row.input(up)
    for _ in range(ranks - rank):
        row.input(down)
        row.weight([down])
    row.weights([up])
    row.weights([down])
    return row.actions(microbatches)


def _h1_held(rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None) -> tuple[Held, ...]:
    ahead = min(ranks - 1 - rank, microbatches)
    whole = min(ranks - rank, microbatches)
    return (Held((float(whole),), (float(min(rank, max(0, microbatches - 1 - ahead))),)),)


def _v_held(rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None) -> tuple[Held, ...]:
    """Return what is held before the first backward, and in the steady state before a backward."""
    down, up = 2 * ranks - 1 - rank, rank + 1
    first = Held((float(min(down, microbatches)), float(min(up, microbatches))), (0.0, 0.0))
    if microbatches <= down:
        return (first,)
    return first, Held((down + 1.0, up - 1.0), (0.0, 0.0))


ZB_H1 = Kind(name="zb-h1", row=_h1_row, held=_h1_held, has_halves=True)
ZB_V = Kind(
    name="zb-v",
    row=_v_row,
    held=_v_held,
    least_virtual=2,
    most_virtual=2,
    v_of=2,
    has_halves=True,
)


FOUND = "search"
"""The name of schedules that were found by search."""


def _held_found(
    rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None
) -> tuple[Held, ...]:
    most = min(ranks * virtual if limit is None else limit, microbatches * virtual)
    return (Held((most / virtual,) * virtual, (0.0,) * virtual),)


SEARCHED = Kind(name=FOUND, row=None, held=_held_found, most_virtual=None, v_of=2, has_halves=True)


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        *(GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED, BREADTH_FIRST),
        *(ZB_H1, ZB_V, DUALPIPE_V, SEARCHED),
    )
}

NAMES: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if kind.row is not None)
"""The schedules that have a table of their own, determined by ranks, stages and micro-batches."""


def kind_of(name: str) -> Kind:
    """Return the kind with this name.

    Raises:
        PlanError: There is no schedule with this name.
    """
    if name not in KINDS:
        raise PlanError(
            f"there is no schedule {name!r}{nearest(name, KINDS)}",
            possible=f"one of {', '.join(KINDS)}",
            change="choose one of these",
        )
    return KINDS[name]


def make(name: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    """Return the table of a named schedule.

    Args:
        name: One of `NAMES`.
        ranks: Pipeline-parallel degree.
        virtual: Stages on a rank.
        microbatches: Micro-batches in a step.

    Raises:
        PlanError: There is no schedule with this name, or it cannot be made for these numbers.
    """
    require_numbers(name, ranks, virtual, microbatches)
    kind = kind_of(name)
    if kind.row is None:
        raise PlanError(
            f"the schedule {name} has no fixed table: it is computed from given times",
            possible=f"one of {', '.join(NAMES)}",
            change=f"choose one of these, or call {FOUND}(...)",
        )
    return Schedule(
        name=name,
        ranks=ranks,
        virtual=virtual,
        microbatches=microbatches,
        placement=kind.placement(ranks, virtual),
        table=tuple(kind.row(rank, ranks, virtual, microbatches) for rank in range(ranks)),
    )


def require_numbers(name: str, ranks: int, virtual: int, microbatches: int) -> None:
    """Check that a schedule can be made for these numbers, without making it.

    Raises:
        PlanError: There is no schedule with this name, or it cannot be made for these numbers.
    """
    kind = kind_of(name)
    for what, number in (("ranks", ranks), ("virtual stages", virtual), ("micro-batches", microbatches)):
        if number < 1:
            raise PlanError(
                f"a schedule of {number} {what} was asked for",
                possible="1 or more",
                change=f"give more {what}",
            )
    _require_virtual(kind, virtual)
    kind.require_microbatches(ranks, microbatches)


def _require_virtual(kind: Kind, virtual: int) -> None:
    if kind.takes_virtual(virtual):
        return
    least, most = kind.least_virtual, kind.most_virtual
    stages = "stages" if virtual > 1 else "stage"
    given = f"the schedule {kind.name} was asked for with {virtual} virtual {stages} on a rank"
    if most is None:
        raise PlanError(
            given,
            possible=f"{least} or more; with one this schedule is 1f1b",
            change=f"give {least} virtual stages, or choose 1f1b",
        )
    fitting = [other for other, each in KINDS.items() if each.takes_virtual(virtual)]
    raise PlanError(
        given,
        possible=f"exactly {least}",
        change=f"give {least}, or choose a schedule for {virtual}: {', '.join(fitting)}",
    )

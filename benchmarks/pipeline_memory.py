"""Activations that the ranks of a pipeline hold, counted, beside what the schedule's table says.

How it is counted: as in `memory.py`, by the storages that still exist. After each forward of a step the live
bytes are read, less those before the step, which are weights, gradients' buffers, Adam's state and the batch.
The most of these readings is what the rank holds. Between two readings a backward frees more than it makes,
but for what it needs for a moment; the peak over all operators, which has that too, stands beside.

The table's figure is the most that is held after a forward, going through a rank's actions and messages:

    F              adds the activations of one micro-batch of the stage, what came in among them
    B              frees them
    I              frees them, but for what W needs, and adds the gradients that W needs
    W              frees the rest
    a receive      adds the hidden state, n H elements, until the action that it is for
    F, B, I        add what is sent, n H, until the fourth send after it: so many are left under way

With n tokens in a micro-batch, H hidden, F the width of the feed-forward layer and V the vocabulary, a block
and the end keep what `shoal/predict/cost/memory/activations.py` says. For W a block keeps 8 n H + 3 n F
elements, the inputs of its products (normalised twice, attention's output, the feed-forward layer's product)
and the gradients of their outputs (query, key, value, gate, up, and the stream's twice); the end keeps n H +
n V.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from memory import LiveStorages
from memory_formulas import workload_on_cpu
from torch import Tensor

import shoal
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel.pipeline.pieces import cut_pieces
from shoal.predict.cost import Layout
from shoal.predict.cost.memory import block_memory, stream_bytes
from shoal.record import NullRecorder, OpenSpan, Recorder
from shoal.spec.plan import Plan
from shoal.spec.plan.schedules import Action, Receive, Schedule, Send, Work, transfers
from shoal.spec.timeline import Kind
from shoal.testing import RankPool

__all__ = ["MEMORY_SHAPE", "Held", "Sizes", "held_by_table", "measure_held", "memory_rows", "sizes_of"]

_UNDER_WAY = 4  # sends, in `shoal.parallel.pipeline.runtime`
_SETTLE = 0.05  # seconds
_TOLERANCE = 0.1

MEMORY_SHAPE = TransformerConfig(
    vocab_size=1024, layers=8, hidden=128, heads=4, kv_heads=4, ffn=512, seq=256, tie_embeddings=False
)
"""The model whose memory is measured, with eight blocks of equal size."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a rank beside those before the step.

    Attributes:
        after_forward: The most after a forward.
        peak: The most after an operator.
    """

    after_forward: int
    peak: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one micro-batch.

    Attributes:
        activations: By stage, what its forward keeps.
        weight: By stage, what W needs after I.
        message: What goes from stage to stage.
    """

    activations: tuple[float, ...]
    weight: tuple[float, ...]
    message: float


def sizes_of(shape: TransformerConfig, plan: Plan, microbatch: int) -> Sizes:
    """The sizes of a transformer's stages; see the top of the file.

    Args:
        shape: The model's.
        plan: Cuts it into stages; fp32 without recompute or other parallelism.
        microbatch: Sequences.
    """
    with torch.device("meta"):
        pieces = cut_pieces(Transformer(shape), plan)
    workload, layout = workload_on_cpu(shape), Layout.of(plan.replace(microbatch=microbatch))
    block = block_memory(workload.layers[0], workload, layout, is_layer=True)
    end = block_memory(workload.end, workload, layout, is_layer=False)
    blocks = [len(pieces.blocks_of(stage)) for stage in range(plan.stages)]
    ends = [shape.layers + 1 in each for each in pieces.ranges]
    held = list(zip(blocks, ends, strict=True))
    return Sizes(
        tuple(count * block.kept + is_last * end.kept for count, is_last in held),
        tuple(count * block.halves + is_last * end.halves for count, is_last in held),
        stream_bytes(workload, layout),
    )


def held_by_table(schedule: Schedule, rank: int, sizes: Sizes, *, ahead: int = 1) -> float:
    """The most bytes that a rank holds after a forward, as the table says; see the top of the file."""
    held = most = 0.0
    under_way: deque[float] = deque()
    for step in transfers(schedule, ahead=ahead)[rank]:
        if isinstance(step, Send):
            under_way.append(sizes.message)
            if len(under_way) > _UNDER_WAY:
                held -= under_way.popleft()
            continue
        if isinstance(step, Receive):
            held += sizes.message
            continue
        held += _change(step, schedule.stages, sizes)
        if step.work is Work.FORWARD:
            most = max(most, held)
    return most


def _change(action: Action, stages: int, sizes: Sizes) -> float:
    """By how much what is held changes; what an action takes was counted when it was made or received."""
    activations, weight = sizes.activations[action.stage], sizes.weight[action.stage]
    before, behind = action.stage > 0, action.stage + 1 < stages
    match action.work:
        case Work.FORWARD:  # what came in is one of the activations now
            return activations - before * sizes.message + behind * sizes.message
        case Work.BACKWARD:
            return -activations - behind * sizes.message + before * sizes.message
        case Work.INPUT:
            return weight - activations - behind * sizes.message + before * sizes.message
        case _:
            return -weight


def measure_held(text: str, shape: TransformerConfig, tokens: Tensor, micro_batches: int) -> Held:
    """What this rank holds in the second of two steps under a Plan, on one batch `[batch, seq + 1]`."""
    with LiveStorages() as live:
        model = Transformer(shape)
        model.initialize(0)
        recorder = _AfterForwards(live)
        parallel = shoal.parallelize(model, text, recorder=recorder)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
        inputs, targets = (part.clone() for part in (tokens[:, :-1], tokens[:, 1:]))
        for _ in range(2):
            before = _settled(live)
            live.peak, recorder.most = before, 0
            pairs = zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
            parallel.forward_backward(pairs, micro_batches, next_token_loss)
            peak = live.peak
            optimizer.step()
            optimizer.zero_grad()
    return Held(recorder.most - before, peak - before)


def _settled(live: LiveStorages) -> int:
    """The live bytes, once cycles are freed and the backend's threads had time to let go of tensors."""
    gc.collect()
    time.sleep(_SETTLE)
    return live.bytes()


class _AfterForwards(Recorder):
    """Records nothing, and reads the live bytes after each forward.

    Attributes:
        most: Of the readings.
    """

    def __init__(self, live: LiveStorages) -> None:
        self.most = 0
        self._live = live
        self._nothing = NullRecorder()

    def span(self, kind: Kind, name: str = "", **fields: Any) -> AbstractContextManager[None]:
        return self._read_after() if kind == Kind.FORWARD else nullcontext()

    def open(self, kind: Kind, name: str = "", **fields: Any) -> OpenSpan:
        return self._nothing.open(kind, name, **fields)

    def step(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        return

    @contextmanager
    def _read_after(self) -> Iterator[None]:
        yield
        self.most = max(self.most, self._live.bytes())


def memory_rows(pool: RankPool, plans: Sequence[str], micro_batches: int) -> Iterator[tuple[list[str], bool]]:
    """A row for each Plan and rank, and whether it holds what the table says, to a tenth."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        MEMORY_SHAPE.vocab_size, (micro_batches, MEMORY_SHAPE.seq + 1), generator=generator
    )
    for text in plans:
        plan = Plan.parse(text)
        schedule, sizes = plan.schedule_for(micro_batches), sizes_of(MEMORY_SHAPE, plan, 1)
        ranks = pool.run(measure_held, plan.ranks, text, MEMORY_SHAPE, tokens, micro_batches)
        for rank, held in enumerate(ranks):
            table = held_by_table(schedule, rank, sizes)
            ratio = held.after_forward / table
            row = [
                plan.schedule,
                str(rank),
                f"{schedule.peak_activations(rank):g}",
                _mib(held.after_forward),
                _mib(table),
                f"{ratio:.3f}",
                _mib(held.peak),
            ]
            yield row, abs(ratio - 1) <= _TOLERANCE


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.2f}"

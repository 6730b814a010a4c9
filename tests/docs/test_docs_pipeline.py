"""What docs/concepts/pipeline.md says of schedules and of bytes is what the tables and the runtime do."""

import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import parallelize
from shoal.record import Recorder
from shoal.record.recorder import OpenSpan
from shoal.spec.plan.schedules import NAMES, Times, kind_of, make, play
from shoal.spec.timeline import Kind

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "concepts" / "pipeline.md").read_text()
FORMULAS = re.findall(
    r"^\| `(\S+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| \[arXiv:", PAGE, re.MULTILINE
)
SIZES = [(p, v, m) for p in (2, 3, 4, 8) for v in (1, 2, 3) for m in (2 * p, 4 * p)]


def value(formula, **names):
    text = re.sub(r"(?<=\))\s*(?=[(F])|(?<=\d)(?=p)", "*", formula)
    return eval(text, {"__builtins__": {}}, names)


def test_the_table_lists_the_schedules_and_each_has_a_section_and_its_picture():
    assert [name for name, *_ in FORMULAS] == list(NAMES)
    sections = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    shown = re.findall(r"\]\(\.\./pictures/schedule-(\S+)\.svg\)", PAGE)
    assert shown == list(NAMES)
    assert len(sections) == len(NAMES)


@pytest.mark.parametrize(("name", "v_said", "m_said", "bubble", "held"), FORMULAS, ids=NAMES)
def test_bubble_and_activations_by_formula_are_those_of_the_table(name, v_said, m_said, bubble, held):
    bubble, _, condition = bubble.partition(" if ")
    for p, v, m in SIZES:
        if (v_said.isdecimal() and v != int(v_said)) or v < kind_of(name).least_virtual:
            continue
        for forward, input, weight in [(1, 1, 1), (2, 2, 1.5)] if not condition else [(1, 1, 1)]:
            names = {"p": p, "v": v, "m": m, "F": forward, "I": input, "W": weight, "B": input + weight}
            played = play(make(name, p, v, m), Times.equal(p * v, forward / v, input / v, weight / v))
            idle = [played.idle(rank) for rank in range(p)]
            assert idle == pytest.approx([value(bubble, **names)] * p), names
            if name != "gpipe" or v == 1:
                assert max(played.peaks) / v == pytest.approx(value(held, **names)), names
    assert ("multiple" in m_said) == (name == "interleaved")
    assert ("2p" in m_said) == (name == "dualpipe-v")


class Messages(Recorder):
    """Adds up the bytes of messages between stages, by what they hold."""

    def __init__(self):
        self.sent = Counter()

    def span(self, kind, name="", *, lane=None, bytes=0, group=(), purpose=""):
        return nullcontext()

    def open(self, kind, name="", *, lane, bytes=0, group=(), purpose=""):
        what = name.partition(":")[0]
        if kind == Kind.COLLECTIVE and what in ("activation", "gradient"):
            self.sent[what] += bytes
        return Closed()

    def step(self, index):
        return nullcontext()

    def close(self):
        pass


class Closed(OpenSpan):
    def close(self, at=None, algorithm=""):
        pass


MICROBATCHES, SEQ, HIDDEN = 4, 16, 32


def count_messages(plan):
    recorder = Messages()
    shape = TransformerConfig(vocab_size=64, layers=4, hidden=HIDDEN, heads=4, kv_heads=4, ffn=48, seq=SEQ)
    parallel = parallelize(Transformer(shape), plan, recorder=recorder)
    tokens = torch.randint(64, (MICROBATCHES, SEQ + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = (parallel.local_sequence(each) for each in (tokens[:, :-1], tokens[:, 1:]))
    for _ in range(2):  # shapes are told before the first step
        recorder.sent.clear()
        pairs = zip(inputs.split(1), targets.split(1), strict=True)
        parallel.forward_backward(pairs, MICROBATCHES, next_token_loss)
    return recorder.sent


@pytest.mark.parametrize(
    ("plan", "share", "boundaries"),
    [
        ("pp=2", 1, 1),
        ("pp=2,schedule=interleaved", 1, 3),
        ("pp=2,schedule=zb-v", 1, 2),
        ("pp=2,tp=2", 2, 1),
        ("pp=2,tp=2,tensor=plain", 1, 1),
        ("pp=2,cp=2", 2, 1),
    ],
)
def test_stages_send_the_bytes_that_the_page_says(ranks, plan, share, boundaries):
    found = ranks.run(count_messages, 4 if "," in plan and "schedule" not in plan else 2, plan)
    message = 4 * SEQ * HIDDEN // share  # b B S H in fp32, one sequence each
    pipelines = len(found) // 2
    for what in ("activation", "gradient"):
        # each message is recorded by who sends it and by who receives it
        assert sum(sent[what] for sent in found) == 2 * pipelines * boundaries * MICROBATCHES * message

"""Which exchange is followed or tried, from what is known of each."""

import pytest

from shoal.predict.planner import DENSE, CodecMeasure, Conditions
from shoal.spec.plan import Plan
from shoal.train.exchange_choice import REVIEW, Choices
from shoal.train.measured_exchange import Link

LOCAL = "exchange=local,every=20"
INT8, SPARSE = f"{LOCAL},compress=int8", f"{LOCAL},compress=topk:64:2bit,feedback=0.95"
KEPT = {"int8": 1.0, "topk:64": 0.3, "topk:64:2bit": 0.3}


def choices(whole, steps=10_000, compute=0.02):
    """Choices on links that take so many seconds for whole gradients, a dense step's compute beside."""
    found = Choices(Plan.parse("dp=4,exchange=auto"), steps)
    found.step = 12
    codecs = {text: CodecMeasure(kept, 0.0, 0.0) for text, kept in KEPT.items()}
    elements = 1 << 20
    link = Link(0.0, whole / (4 * elements), price=whole)
    conditions = Conditions(
        workers=4,
        elements=elements,
        compute=compute,
        dense=compute + whole,
        latency=0.0,
        per_byte=link.per_byte,
        hidden=0.0,
        noise=0.1,
        codecs=codecs,
    )
    found.measured(conditions, link)
    return found


@pytest.mark.parametrize(
    ("whole", "best"),
    [
        (0.001, DENSE),  # less than a tenth of a step
        (0.0035, "compress=int8"),  # a quarter of it is left, 4 % of a step
        (0.02, LOCAL),
        (0.08, INT8),  # whole ones take a fifth of a step
        (4.0, SPARSE),
    ],
)
def test_of_those_that_are_nearly_as_quick_the_most_exact_is_tried(whole, best):
    choice, why = choices(whole).choose()
    assert choice == best
    assert why.startswith("the quickest" if best == DENSE else "worth a trial")


def test_what_passed_is_followed_and_tells_what_others_are_worth():
    known = choices(0.08)
    known.note(INT8, 0.022, 0.8, "")
    assert known.choose()[0] == INT8
    assert known.expected(LOCAL).steps == known.expected(SPARSE).steps == pytest.approx(1.25)
    known.note(INT8, 0.022, 0.1, "")  # worth less than dense steps: 0.22 s for what one does in 0.1
    assert known.choose()[0] == "compress=int8"


def test_what_failed_is_left_alone_until_training_has_changed():
    known = choices(0.08)
    known.note(INT8, 0.022, 0.8, "it failed")
    assert known.choose()[0] == LOCAL
    known.step = 12 + REVIEW
    assert known.choose()[0] == INT8


def test_a_trial_has_to_pay():
    assert choices(0.08, steps=12 + 24 + 40).choose()[0] == INT8
    choice, why = choices(0.08, steps=12 + 24 + 4).choose()
    assert choice == DENSE
    assert "takes" in why
    assert "would gain" in why


def test_a_slow_rise_of_the_loss_is_refused_and_a_stall_brings_a_trial():
    known = choices(0.08)
    known.note(INT8, 0.022, 1.0, "")
    known.followed = INT8
    known.since = 50.0  # seconds; a trial takes 2.8
    assert known.judge(2.0, 0.0) == known.judge(1.9, 0.0) == ""
    assert not known.is_due_again()
    assert known.judge(1.89, 0.0) == ""
    known.since = 80.0
    assert known.is_due_again()
    assert known.judge(1.93, 0.01) == ""  # may be chance
    assert "from 1.89 to 1.96" in known.judge(1.96, 0.01)
    known.followed = DENSE
    assert known.judge(2.5, 0.01) == ""


def test_links_are_timed_seldom_unless_steps_change():
    known = choices(1.0)
    known.note(INT8, 0.05, 1.0, "")
    known.followed = INT8
    assert not known.should_time(30.0, 0.05)
    assert known.should_time(30.0, 0.05)
    known.confirm(0.08)
    known.confirm(0.06)
    assert known.expected(INT8).seconds == 0.05
    assert not known.timed(Link(0.0, known.conditions.per_byte, price=1.0))
    assert not known.should_time(5.0, 0.05)
    assert known.should_time(5.0, 0.03)
    assert known.timed(Link(0.0, known.conditions.per_byte / 10, price=0.1))
    assert known.conditions.all_reduce(4 * known.conditions.elements) == pytest.approx(0.1)
    assert known.expected(INT8).is_measured is False

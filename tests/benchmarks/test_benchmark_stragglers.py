"""The benchmark of verdicts: its delays are as it says, and it counts what is named wrongly."""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import stragglers
from stragglers import CAUSES, LAYOUTS, Case, Score

from shoal.analyze.diagnosis import Cause, Pattern
from shoal.testing.delays import Delay, Jitter, Layout


def said(*named):
    each = [SimpleNamespace(ranks=ranks, cause=cause, pattern=pattern) for ranks, cause, pattern in named]
    return SimpleNamespace(stragglers=each)


def test_delays_are_of_all_causes_and_no_link_is_one_that_cannot_be_told():
    chosen = list(stragglers.cases(200))
    assert {case.delay.cause for case in chosen} == set(CAUSES)
    assert {case.layout for case in chosen} == set(LAYOUTS)
    assert not any(case.is_link_of_one_group for case in chosen)
    assert [case.delay.rank for case in stragglers.cases(20)] == [case.delay.rank for case in chosen[:20]]
    for case in chosen:
        late = sum(case.delay.is_late(step) for step in range(1, stragglers.STEPS + 1))
        assert late == {Pattern.PERSISTENT: 62, Pattern.PERIODIC: 15, Pattern.ONCE: 15}[case.pattern]


def test_every_rank_that_is_named_counts_for_precision():
    score = Score()
    case = Case(Layout(4), Delay(2, Cause.FORWARD, 0.1), Pattern.PERSISTENT, 0)
    score.add(
        case, said(((2,), Cause.BACKWARD, Pattern.PERSISTENT), ((1,), Cause.FORWARD, Pattern.PERSISTENT))
    )
    score.add(case, said())
    assert score == Score(cases=2, named=2, rank=1, cause=0, pattern=1)


def test_a_few_cases_are_judged_right():
    scores = stragglers.score(list(stragglers.cases(200))[3:5], Jitter.read(stragglers.JITTER))
    assert all(each.cause == each.named == each.cases for each in scores.values())
    assert stragglers.false_alarms(2, Jitter.read(stragglers.JITTER)) == (0, 2)

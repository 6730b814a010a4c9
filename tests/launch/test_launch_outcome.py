"""Which rank's end was the cause of the others'."""

from __future__ import annotations

import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.analyze.hang import Cause, HangVerdict
from shoal.checkpoint import ProcessGroupCoordinator
from shoal.errors import CommunicationError, CorruptCheckpointError, PlanError, TrainingError
from shoal.launch.local import Outcome, root_cause

KILL, TERM, SEGV, ABRT = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV, -signal.SIGABRT


def own(rank, when):
    return Outcome(rank=rank, exit_code=1, error=f"ValueError: of {rank}", when=when)


def collective(rank, when):
    return Outcome(
        rank=rank, exit_code=1, error=f"CommunicationError: of {rank}", in_collective=True, when=when
    )


@pytest.mark.parametrize(
    ("outcomes", "codes", "rank", "reason"),
    [
        # one rank raised, the others lost it in a collective, some of them sooner
        ([collective(0, 1.0), own(1, 2.0), collective(2, 3.0)], {0: 1, 1: 1, 2: 1}, 1, "ValueError"),
        # two raised: the first
        ([own(0, 2.0), own(1, 1.0)], {0: 1, 1: 1}, 1, "ValueError"),
        # a rank was killed, the others lost it, or were ended because of it
        ([collective(0, 1.0)], {0: 1, 1: KILL}, 1, "SIGKILL"),
        ([collective(0, 1.0)], {0: 1, 1: TERM, 2: KILL}, 2, "SIGKILL"),
        ([], {0: TERM, 1: SEGV}, 1, "SIGSEGV"),
        ([], {0: TERM}, 0, "SIGTERM"),
        # a rank ended without a word
        ([collective(1, 1.0)], {0: 3, 1: 1}, 0, "exit code 3"),
        # nobody knows better: the first collective that failed
        ([collective(0, 2.0), collective(1, 1.0)], {0: 1, 1: 1}, 1, "CommunicationError"),
        # one ended well
        ([Outcome(rank=0, exit_code=0), own(1, 1.0)], {1: 1}, 1, "ValueError"),
        # one ended badly after its work was done
        ([Outcome(rank=0, exit_code=0)], {0: 1}, 0, "exit code 1"),
        ([Outcome(rank=0, exit_code=0), Outcome(rank=1, exit_code=0)], {0: TERM, 1: SEGV}, 1, "SIGSEGV"),
        # NCCL's watchdog aborted those that waited for another
        ([], {0: ABRT, 1: KILL, 2: ABRT}, 1, "SIGKILL"),
        ([], {0: ABRT, 1: 3}, 1, "exit code 3"),
        ([own(1, 2.0)], {0: ABRT, 1: 1}, 1, "ValueError"),
        ([], {0: ABRT, 1: ABRT}, 0, "SIGABRT (by native code"),
        ([collective(0, 1.0)], {0: 1, 1: ABRT}, 1, "SIGABRT"),
    ],
)
def test_the_cause_is_the_failure_that_no_other_explains(outcomes, codes, rank, reason):
    error = root_cause(outcomes, codes)
    assert error.rank == rank
    assert reason in error.reason
    assert str(error).startswith(f"rank {rank} failed: ")


def test_the_rank_that_others_waited_for_is_the_cause_unless_a_rank_failed_by_itself():
    hang = HangVerdict(cause=Cause.SLEEP, ranks=(2,), text="rank 2 did not come to barrier")
    waited = [collective(0, 1.0), collective(1, 2.0)]
    error = root_cause(waited, {0: 1, 1: 1}, hang=hang)
    assert str(error) == "rank 2 failed: rank 2 did not come to barrier"
    assert "rank 0: CommunicationError: of 0" in error.detail
    assert root_cause([*waited, own(3, 3.0)], {0: 1, 1: 1, 3: 1}, hang=hang).rank == 3
    assert root_cause(waited, {0: 1, 1: 1, 3: KILL}, hang=hang).rank == 3
    nobody = HangVerdict(cause=Cause.TRANSPORT, ranks=(), text="the network")
    assert root_cause(waited, {0: 1, 1: 1}, hang=nobody).rank == 0


def test_an_error_of_torchs_backends_may_be_because_of_another_rank():
    lost = Outcome.of_error(
        0, torch.distributed.DistBackendError("NCCL error: the remote process has exited")
    )
    assert root_cause([lost], {0: 1, 1: KILL}).rank == 1


def test_a_rank_that_is_stopped_or_hangs_is_the_cause_of_aborts():
    assert root_cause([], {0: ABRT, 2: ABRT}, stopped=[1]).rank == 1
    hang = HangVerdict(cause=Cause.SLEEP, ranks=(2,), text="rank 2 did not come to barrier")
    assert (
        str(root_cause([], {0: ABRT, 1: ABRT}, hang=hang)) == "rank 2 failed: rank 2 did not come to barrier"
    )


RANKS = st.permutations(range(6))


@given(RANKS, st.integers(0, 5), st.lists(st.floats(0, 100), min_size=6, max_size=6))
def test_a_rank_that_raised_is_the_cause_among_any_losses_in_collectives(order, culprit, times):
    outcomes = [
        own(rank, times[rank]) if rank == culprit else collective(rank, times[rank]) for rank in order
    ]
    assert root_cause(outcomes, dict.fromkeys(range(6), 1)).rank == culprit


@given(RANKS, st.integers(0, 5), st.sets(st.integers(0, 5)), st.sampled_from([KILL, SEGV, 7]))
def test_a_rank_that_died_is_the_cause_among_losses_and_those_ended_because_of_it(order, dead, told, code):
    outcomes = [collective(rank, float(rank)) for rank in order if rank != dead and rank in told]
    codes = {rank: 1 if rank in told else TERM for rank in order} | {dead: code}
    if code == 7:  # who was ended by SIGTERM, and who ended by itself, cannot be told apart by order
        codes = {rank: code for rank, code in codes.items() if code != TERM}
    assert root_cause(outcomes, codes).rank == dead


@pytest.mark.parametrize(
    ("outcomes", "codes", "rank", "reason"),
    [
        ([collective(0, 1.0)], {0: 1}, 1, "stopped"),
        ([collective(0, 1.0), collective(2, 2.0)], {0: 1, 2: 1}, 1, "CommunicationError: of 0"),
        # what failed by itself comes before
        ([own(0, 1.0)], {0: 1}, 0, "ValueError"),
        ([collective(0, 1.0)], {0: 1, 2: KILL}, 2, "SIGKILL"),
        ([collective(0, 1.0)], {0: 1, 2: 3}, 2, "exit code 3"),
    ],
)
def test_a_rank_that_is_stopped_is_the_cause_of_losses_in_collectives(outcomes, codes, rank, reason):
    error = root_cause(outcomes, codes, stopped=[1])
    assert error.rank == rank
    assert reason in error.reason


def test_a_users_mistake_keeps_its_words_and_exit_code_and_has_no_traceback():
    error = PlanError("given", possible="possible", change="change")
    outcome = Outcome.of_error(2, error)
    assert outcome.detail == ""
    assert not outcome.in_collective
    cause = root_cause([outcome], {2: 2})
    assert cause.exit_code == 2
    assert str(error) in str(cause)


def test_an_error_of_a_checkpoint_has_no_traceback_since_its_message_names_the_file():
    outcome = Outcome.of_error(0, CorruptCheckpointError("step-4/rank-00000.safetensors was changed"))
    assert outcome.detail == ""
    assert "step-4/rank-00000.safetensors was changed" in str(root_cause([outcome], {0: 1}))


def test_another_error_keeps_its_traceback():
    try:
        raise TrainingError("step 3 has a loss of nan")
    except TrainingError as error:
        outcome = Outcome.of_error(0, error)
    assert "Traceback" in outcome.detail
    assert "test_launch_outcome.py" in outcome.detail
    assert root_cause([outcome], {0: 1}).detail == outcome.detail


def test_a_failed_collective_is_known_as_one(tmp_path):
    outcomes = [
        Outcome.of_error(0, CommunicationError("all_reduce failed")),
        Outcome.of_error(1, RuntimeError("all_reduce failed")),
    ]
    for outcome in outcomes:
        outcome.write(tmp_path)
    assert [outcome.in_collective for outcome in outcomes] == [True, False]
    assert Outcome.read_all(tmp_path) == outcomes


def end_of_a_rank_that_lost_another():
    exchange = ProcessGroupCoordinator()
    if exchange.rank == 1:
        torch.distributed.destroy_process_group()
        return None
    try:
        exchange.all_gather_object("how saving a checkpoint went")
    except Exception as error:
        return Outcome.of_error(0, error)
    finally:
        torch.distributed.destroy_process_group()


def test_a_rank_that_is_lost_while_a_checkpoint_is_saved_is_lost_in_a_collective(ranks):
    assert ranks.run(end_of_a_rank_that_lost_another, 2)[0].in_collective

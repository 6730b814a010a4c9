"""What PyTorch's own tests say of the backend: a representative part here, all of them marked long."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pytorch_suite import lacks

pytest.importorskip("expecttest")  # PyTorch's tests import it

SUITE = Path(__file__).with_name("pytorch_suite.py")

REPRESENTATIVE = (
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_reduce_coalesced_full_group_max",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_get_future",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
)


def run_suite(*arguments):
    return subprocess.run([sys.executable, SUITE, *arguments], capture_output=True, text=True)


def test_the_backend_passes_a_representative_part():
    pattern = f"^({'|'.join(REPRESENTATIVE)})$"
    ended = run_suite("--backend", "shoal", "--against", "shoal", "--only", pattern, "--timeout", "30")
    lines = re.findall(r"^(\w+) +[\d.]+ s +(\w+)$", ended.stdout, re.MULTILINE)
    verdicts = {name: verdict for verdict, name in lines}
    assert verdicts == dict.fromkeys(REPRESENTATIVE, "passed"), ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_backend_passes_all_that_gloo_passes(ranks):
    ended = run_suite("--backend", "shoal", "--against", "gloo", "--ranks", str(ranks))
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.long
def test_the_backend_passes_every_all_to_all_with_three_ranks():
    arguments = ("--ranks", "3", "--gate", "mpi", "--only", "all_to_all")
    ended = run_suite("--backend", "shoal", "--against", "shoal", *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_backend_lacks_what_the_measure_passes_and_it_does_not():
    assert lacks("failed", "passed")
    assert lacks("skipped", "passed")
    assert not lacks("passed", "passed")
    assert not lacks("failed", "skipped")


def test_a_backend_that_is_its_own_measure_lacks_what_it_fails():
    assert lacks("failed")
    assert not lacks("skipped")
    assert not lacks("passed")


@pytest.mark.long
def test_a_pattern_without_tests_is_a_wrong_argument():
    assert run_suite("--backend", "gloo", "--only", "no_such_test").returncode == 2

"""A model larger than the memory it may use: it trains with state in files, and has the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limited_stand_ins import BATCH, SHAPE

from shoal.models import preset
from shoal.predict.cost import memory_of
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import transformer_shape, workload_of

STATE_BYTES = 16  # of a parameter in fp32: value, gradient and Adam's two moments
PLAN = "shard=zero3"
OFFLOADED = f"{PLAN},recompute=full,offload=optimizer:file+gradients:file+parameters:file"


def trained(plan, limit, folder):
    command = [sys.executable, Path(__file__).with_name("limited_stand_ins.py"), plan, str(limit), folder]
    threads = {"OMP_NUM_THREADS": "2"}  # each has a stack, which counts
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **threads})


@pytest.mark.long
def test_state_of_three_times_the_limit_trains_with_the_losses_of_a_run_without_one(tmp_path):
    workload = workload_of(transformer_shape(preset("tiny").model_dump() | SHAPE))
    limit = STATE_BYTES * workload.parameters / 3 / 2**20
    without, within, in_memory = (
        trained(plan, bound, tmp_path)
        for plan, bound in ((PLAN, 0), (OFFLOADED, int(limit)), (PLAN, int(limit)))
    )
    assert in_memory.returncode != 0  # nothing but files makes it fit
    expected, found = json.loads(without.stdout), json.loads(within.stdout)
    assert found["losses"] == expected["losses"]

    # The allocator's own memory, small tensors, and what operators take for a moment are not predicted.
    plan = SettledPlan.of(SettledPlan.parse(found["plan"]), BATCH)
    predicted = memory_of(workload, plan, BATCH)[0].peak
    assert 0.75 * predicted < found["private_bytes"] < 1.25 * predicted

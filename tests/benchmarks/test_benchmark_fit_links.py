"""The fit of links' constants to times of collectives."""

import subprocess
import sys
from pathlib import Path

from shoal.predict.cost.collectives.network import collective_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan.group import Group

ROOT = Path(__file__).resolve().parents[2]
SIZES = [2**power for power in range(16, 35)]


def write_table(path, counts, slower=1.0):
    """Times as the package predicts them on so many nodes of p6, or so many times as long."""
    lines = ["op,platform,nodes,ranks,size_bytes,time_us,launch_us"]
    for nodes in counts:
        cluster = Cluster.preset("aws-p6-b200", 8 * nodes)
        for nbytes in SIZES:
            seconds = slower * collective_seconds("all_reduce", nbytes, Group(8 * nodes), cluster)
            lines.append(f"all_reduce,p6-b200.48xlarge,{nodes},{8 * nodes},{nbytes},{seconds * 1e6},0.001")
    path.write_text("\n".join(lines))


def last_line(*args):
    command = [sys.executable, ROOT / "benchmarks" / "fit_links.py", *args]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return done.stdout.splitlines()[-1]


def test_times_that_the_package_predicts_have_no_error(tmp_path):
    write_table(tmp_path / "table.csv", (1, 4))
    assert last_line(tmp_path / "table.csv") == f"all: {2 * len(SIZES)} rows, mean error 0.0%"


def test_constants_are_fitted_to_times_that_are_longer_and_hold_on_the_other_half_too(tmp_path):
    write_table(tmp_path / "table.csv", (1,), slower=1.25)
    assert last_line(tmp_path / "table.csv") == f"all: {len(SIZES)} rows, mean error {1 - 1 / 1.25:.1%}"
    error = float(last_line(tmp_path / "table.csv", "--fit").rpartition(" ")[2].rstrip("%"))
    assert error < 1  # there are constants without any; the search moves them by steps

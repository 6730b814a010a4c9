"""The program that kills, cuts off, stops and misleads hosts."""

from __future__ import annotations

import lost_hosts
import pytest

from shoal.testing.hosts import why_no_hosts


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize("case", ["kill ranks", "slow link", "own folder", "other Plan", "drain"])
def test_the_first_line_names_the_cause(case):
    line = lost_hosts.become_of(case)
    assert line["right"], line

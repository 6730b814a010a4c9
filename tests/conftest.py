"""Fixtures for the whole suite: ranks are processes that all tests share."""

import pytest

from shoal.testing import RankPool


@pytest.fixture(scope="session")
def ranks():
    with RankPool() as pool:
        yield pool

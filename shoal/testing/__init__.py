"""Tools for the tests of Shoal, and for the tests of packages built on it.

Nouns: RankPool (processes that run functions as the ranks of a group). `zoo` has models of the kinds that
    users bring; `conformance` trains them under every sharding and on one device. Ships with the package.
"""

from shoal.testing.ranks import RankPool, run_ranks

__all__ = ["RankPool", "run_ranks"]

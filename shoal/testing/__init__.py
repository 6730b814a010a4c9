"""What the tests of Shoal, and of what is built on it, stand on.

Nouns: RankPool (processes that run functions as the ranks of a group). `zoo` has models of the kinds that
people bring, `conformance` trains them under every sharding and on one device. Ships with the package.
"""

from shoal.testing.ranks import RankPool, run_ranks

__all__ = ["RankPool", "run_ranks"]

"""Expert parallelism: ranks keep parts of every block's experts."""

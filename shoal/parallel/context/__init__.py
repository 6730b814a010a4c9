"""Context parallelism: ranks hold parts of every sequence, and attention reaches over all of them."""

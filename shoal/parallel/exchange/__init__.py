"""Looser exchange between workers: fewer bytes in place of vectors, and steps by oneself between merges."""

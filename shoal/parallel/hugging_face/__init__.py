"""Hugging Face's causal models under tensor, sequence and context parallelism."""

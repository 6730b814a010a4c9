"""Frozen descriptions, and what stands in a run's directory.

`plan` (how a model is divided), `cluster` (machines), `workload` (a model's operations), `timeline` (what
ranks did, and when), `run` (the files of a run, and who may write them). Nothing here imports torch.
"""

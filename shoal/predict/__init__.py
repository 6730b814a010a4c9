"""From descriptions to seconds, bytes and the best Plan, before anything runs.

`cost` (formulas), `simulate` (steps played in time), `planner` (the choice of a Plan), `validate`
(predictions against published measurements). Nothing here imports torch.
"""

"""From a Timeline to the cause, and to what should change.

`diagnosis` (verdicts), `replay` (what would be, had this been quicker), `compare` (two runs), `advise`
(another Plan), `hang` (which rank did not call), `foreign` (traces of other programs). Nothing here imports
torch.
"""

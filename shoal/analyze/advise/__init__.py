"""Advice on a run: what would make its step faster, each with the gain that is predicted. Imports no torch.

`advices` looks at the measured Timeline of a run, and, where machines are known, plays other Plans on them
(`Advice`, `Known`). Called by `shoal advise`, and by `shoal train --resume RUN --advice`.
"""

from shoal.analyze.advise.advices import LEAST_GAIN, Advice, Known, advices

__all__ = ["LEAST_GAIN", "Advice", "Known", "advices"]

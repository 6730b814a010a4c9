"""What theory says about looser exchange: the largest stable step, and how much compression leaves out.

A codec C contracts by delta if it leaves out at most the share 1 - delta of the squared norm of any vector:

    E |x - C(x)|^2 <= (1 - delta) |x|^2        (Karimireddy et al., arXiv:1901.09847, assumption A)

With delta = 1 nothing is left out; delta = 0 guarantees nothing.
"""

from __future__ import annotations

import math

import torch

from shoal.spec.plan import BLOCK, CHUNK, Compression

_LEVELS = {"int8": 127, "int4": 7}
"""Numbers of the format from 0 to the largest magnitude of a block."""

_SMALLEST_FP8 = 448 * 2**9
"""The largest number of e4m3 over the distance of its smallest ones."""


def most_stable_step(curvature: float, staleness: float) -> float:
    """Return the learning rate below which gradient descent with late gradients is stable.

    x_{t+1} = x_t - rate L x_{t-s} has all its roots within the unit circle exactly while
    rate L < 2 sin(pi / (2 (2 s + 1))): Yang et al., PipeMare, arXiv:1910.05124, lemma 1. Without staleness
    it is the known 2 / L. If the step of such a gradient is divided by 1 + s, multiply the result by 1 + s:
    it is then never less than pi / (2 L).

    Args:
        curvature: L, the largest eigenvalue of the Hessian; above 0.
        staleness: s, the updates between the values of a gradient and its own update; may be infinite.
    """
    assert curvature > 0, "a quadratic without curvature has no largest step"
    assert staleness >= 0, "a gradient cannot be of later values"
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1))) / curvature


def contraction(compression: Compression, elements: int) -> float:
    """Return the delta by which a codec contracts whatever the vector is; 0 if it loses some whole.

    With n the elements that a codec treats together, in the worst of all vectors:

        topk:N        k / n: k = n / N of n equal magnitudes (Stich et al., arXiv:1809.07599)
        topk:N:2bit   1 / (k + (n - k) / k), less the rounding to bf16: with s the sum of the k kept
                      magnitudes, the two means keep s^2 / k or more. The squares of the kept elements sum to
                      at most s^2, and that of each of the n - k others is at most (s / k)^2
        random:N      1 / n: one element of n
        sign          1 / n: one element that is not 0; see `measured_contraction`
        int8, int4    1 - (sqrt(1 + (n - 1) / q^2) - 1) / 2: an element at the largest number q, and n - 1 at
                      f = q / (q + sqrt(q^2 + n - 1)), whose rounding has variance f (1 - f)
        fp8           1 - 1 / 288: mantissas of 3 bits, at 1 + 1/17; less (n - 1) / 4 squares of the smallest
                      distance, 2^-9, beside 448
        threshold     0: equal magnitudes are not above their root mean square
        powersgd      0: a factor may be orthogonal to all rows of a matrix
    """
    kind, number = compression.kind, compression.number
    if kind == "none" or elements == 0:
        return 1.0
    if kind == "topk":
        parts = {length for length in (min(elements, CHUNK), elements % CHUNK) if length}
        kept = {length: compression.kept(length) for length in parts}
        if compression.bits == 2:
            return min((1 - 2.0**-16) / (k + (n - k) / k) for n, k in kept.items())
        return min(k / n for n, k in kept.items())
    block = min(elements, number if kind == "random" else BLOCK)
    if kind in ("random", "sign"):
        return 1 / block
    if kind in _LEVELS:
        return max(0.0, 1 - (math.sqrt(1 + (block - 1) / _LEVELS[kind] ** 2) - 1) / 2)
    return 1 - 1 / 288 - (block - 1) / (4 * _SMALLEST_FP8**2) if kind == "fp8" else 0.0


def measured_contraction(vector: torch.Tensor, left: torch.Tensor) -> float:
    """Return the share of a vector's squared norm that a codec did not leave out; below 0 if it made more.

    For sign it is, in each block of n elements, |x|_1^2 / (n |x|_2^2) (Karimireddy et al.,
    arXiv:1901.09847): 2 / pi if the elements are normally distributed, far from the worst.

    Args:
        vector: `[elements]`, what was encoded.
        left: `[elements]`, what was left out of it.
    """
    norm = torch.linalg.vector_norm(vector, dtype=torch.float64).item()
    return 1 - (torch.linalg.vector_norm(left, dtype=torch.float64).item() / norm) ** 2 if norm > 0 else 1.0


def error_bound(delta: float, feedback: float) -> float:
    """Return a bound on the squared norm of the error memory, over that of the largest gradient.

    With e' = p - C(p) and p = g + feedback e, the root mean squares obey |e'| <= sqrt(1 - delta) (|g| +
    feedback |e|). So |e| stays below r |g| / (1 - feedback r) with r = sqrt(1 - delta) <= 1 - delta / 2, and

        |e|^2 <= 4 (1 - delta) / (2 - feedback (2 - delta))^2 |g|^2

    With feedback 1 this is 4 (1 - delta) / delta^2: Karimireddy et al., arXiv:1901.09847, lemma 3. Where each
    exchange encodes twice, for the workers and for the sum, each memory has a bound of its own.

    Args:
        delta: The contraction, from 0 to 1.
        feedback: Share of what was left out that is added to the next vector, from 0 to 1.

    Returns:
        The bound; infinite if there is none.
    """
    shrinking = 2 - feedback * (2 - delta)
    return 4 * (1 - delta) / shrinking**2 if shrinking > 0 else math.inf

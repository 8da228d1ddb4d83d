"""What measured points say about a model's error nearby: kriging of the logarithm of measured over modelled time.

Far from all points the correction fades to their mean and its error grows to the points' spread, so a few points
correct little and many interpolate. Source: Rasmussen and Williams, Gaussian Processes for Machine Learning (2006),
equations 2.25, 2.26 and, for leaving one out, 5.12; the kernel is exponential in the distance of logarithmic sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_REACH = 4.0
"""Distance in which the correlation falls to 1/e [doublings of a size]."""
_NOISE = 0.025
"""Spread of repeated measurements of the same operation [fraction]."""
_LEAST_SPREAD = 0.04
_OUTLIER, _LEAST_OUTLIER = 2.0, 0.25
"""Errors beyond so many spreads (and this [logarithm]) are taken for so much: alone, some operations hit what they do
not hit in a step."""
_MOST_SCORE = 4.0
"""Standard deviations that a single point's error counts for at most when they are judged."""
_MOST_POINTS = 1200
"""More than these are thinned: solving takes time with their cube."""


@dataclass(frozen=True)
class Residuals:
    """Correction of a model.

    `points` (n, d) are doublings of sizes, `left_out` is the error made of each point by the others [logarithm].
    `inflation` is how much larger these are than the kernel would have them, at least 1.
    """

    points: Floats
    weights: Floats
    precision: Floats
    mean: float
    spread: float
    left_out: Floats
    inflation: float

    @classmethod
    def of(cls, points: Floats, errors: Floats) -> Residuals:
        """From points (n, d) and the logarithms of measured over modelled time there (n,); n is at least 1."""
        if len(points) > _MOST_POINTS:
            kept = np.random.default_rng(0).permutation(len(points))[:_MOST_POINTS]
            points, errors = points[kept], errors[kept]
        mean = float(np.median(errors))
        spread = max(_LEAST_SPREAD, float(1.4826 * np.median(np.abs(errors - mean))))
        reach = max(_OUTLIER * spread, _LEAST_OUTLIER)
        errors = np.clip(errors, mean - reach, mean + reach)
        covariance = _covariance(points, points, spread) + _NOISE**2 * np.eye(len(points))
        precision = np.linalg.inv(covariance).astype(np.float64)
        weights = precision @ (errors - mean)
        left_out = weights / np.diag(precision)
        scores = left_out * np.sqrt(np.diag(precision))
        inflation = max(1.0, float(np.sqrt(np.mean(np.minimum(scores**2, _MOST_SCORE**2)))))
        return cls(points, weights, precision, mean, spread, left_out, inflation)

    def at(self, point: Floats) -> tuple[float, float]:
        """The expected logarithm of true over modelled time at a point (d,), and its standard deviation."""
        near = _covariance(point[None, :], self.points, self.spread)[0]
        variance = self.spread**2 + _NOISE**2 - float(near @ self.precision @ near)
        return self.mean + float(near @ self.weights), self.inflation * max(variance, _NOISE**2) ** 0.5


def _covariance(a: Floats, b: Floats, spread: float) -> Floats:
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    distances: Floats = np.sqrt(np.maximum(squared, 0.0))
    covariance: Floats = spread**2 * np.exp(-distances / _REACH)
    return covariance

"""Interpolation between measured points, with how far to trust it: Gaussian-process regression in a few lines.

What: the logarithm of measured over expected time, as a smooth function of the logarithms of sizes, and of traits such
as a dtype or a layout, between which it jumps. Far from all points it returns to the mean.
Use when: some ten to a few hundred points, up to six sizes.
Source: C. E. Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning" (2006), algorithm 2.1 and, for
leave-one-out residuals without refitting, equations 5.10 to 5.12. Ours differs: length and similarity are taken from a
small grid by the density of left-out points, and deviations are scaled so that left-out points have them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_LENGTHS = (1.0, 2.0, 3.5, 6.0)
"""Over how many e-folds of a size times are alike."""
_SIMILARITIES = (0.4, 0.7, 0.9)
"""How alike times are of which one trait differs."""
_NOISES = (0.03, 0.1)
"""Scatter of a measured point that no size explains, as a fraction of the spread of all."""
_SMALLEST_DEVIATION = 0.02


@dataclass(frozen=True)
class Point:
    """A place: logarithms of sizes, and traits; the same number of each for all points of one surface."""

    sizes: tuple[float, ...]
    traits: tuple[str, ...]


@dataclass(frozen=True)
class Guess:
    """What a surface says of a place: the value, and one standard deviation of it."""

    value: float
    deviation: float


@dataclass(frozen=True)
class Smoothness:
    """How a surface varies: over which length of sizes, how alike points are that differ in a trait, and scatter."""

    length: float
    similarity: float
    noise: float

    def covariance(self, apart: Apart) -> Floats:
        """Between points that are so far apart, of a surface whose variance is 1."""
        # Matérn with 5/2: twice differentiable, where the squared exponential would overshoot.
        distance = math.sqrt(5) / self.length * apart.sizes
        result: Floats = (1 + distance + distance**2 / 3) * np.exp(-distance) * self.similarity**apart.traits
        return result


@dataclass(frozen=True)
class Apart:
    """How far points are apart: in the logarithms of sizes, and in how many traits. Both [points, known points]."""

    sizes: Floats
    traits: Floats


class Known:
    """Points where the function is known, to measure from."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = tuple(points)
        self._sizes = np.array([point.sizes for point in points], dtype=np.float64)
        self._codes: dict[str, int] = {}
        self._traits = self._coded(points)

    def apart_from(self, points: Sequence[Point]) -> Apart:
        """How far `points` are from all that are known."""
        sizes = np.array([point.sizes for point in points], dtype=np.float64)
        squares = ((sizes[:, None, :] - self._sizes[None, :, :]) ** 2).sum(-1)
        differing = (self._coded(points)[:, None, :] != self._traits[None, :, :]).sum(-1)
        return Apart(np.sqrt(squares), differing.astype(np.float64))

    def _coded(self, points: Sequence[Point]) -> npt.NDArray[np.int64]:
        rows = [[self._codes.setdefault(trait, len(self._codes)) for trait in point.traits] for point in points]
        return np.array(rows, dtype=np.int64)


class Surface:
    """A function with `values` at the points `known`.

    Args:
        known: at least one point.
        apart: of these points from each other.
        values: dimensionless, such as logarithms of ratios.
        smoothness: how the function varies; `fitted` finds it.
    """

    def __init__(self, known: Known, apart: Apart, values: Floats, smoothness: Smoothness) -> None:
        self._known, self._smoothness = known, smoothness
        noise = smoothness.noise
        covariance = smoothness.covariance(apart) + noise * np.eye(len(values))
        self._inverse: Floats = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        self._mean = float(self._inverse.sum(0) @ values / self._inverse.sum())
        self._weights: Floats = self._inverse @ (values - self._mean)
        variances = 1 / self._inverse.diagonal()
        self.residuals: Floats = self._weights * variances
        """Each left-out value, less what the others say of it."""
        self._scale = max(float(np.mean(self.residuals**2 / variances)), _SMALLEST_DEVIATION**2)
        self.density = -0.5 * float(np.mean(np.log(variances * self._scale)))
        """Logarithm of the density of left-out values, less a constant: the larger, the better the fit."""

    def at(self, point: Point) -> Guess:
        """The value at `point`, and its deviation."""
        shared = self._smoothness.covariance(self._known.apart_from([point]))[0]
        variance = max(0.0, 1 - float(shared @ self._inverse @ shared)) + self._smoothness.noise
        deviation = math.sqrt(self._scale * variance)
        return Guess(self._mean + float(shared @ self._weights), max(deviation, _SMALLEST_DEVIATION))


def fitted(points: Sequence[Point], values: Sequence[float]) -> Surface:
    """The surface through `points` under whose smoothness left-out points are the likeliest."""
    known, array = Known(points), np.array(values, dtype=np.float64)
    apart = known.apart_from(points)
    choices = itertools.product(_LENGTHS, _SIMILARITIES, _NOISES)
    surfaces = (Surface(known, apart, array, Smoothness(*choice)) for choice in choices)
    return max(surfaces, key=lambda surface: surface.density)

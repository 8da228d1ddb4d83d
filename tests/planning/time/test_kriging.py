from __future__ import annotations

import math

import numpy as np
import pytest

from stoker.planning.model.cpu_times import KrigingPoint, fitted


def plane(num: int, *, seed: int = 0) -> tuple[list[KrigingPoint], list[float]]:
    """Points of two traits in a square of 6 e-folds, on a smooth surface that is 0.5 higher for one of the traits."""
    random = np.random.default_rng(seed)
    points = [
        KrigingPoint((float(x), float(y)), ("ab"[i % 2],)) for i, (x, y) in enumerate(random.uniform(0, 6, (num, 2)))
    ]
    return points, [value_at(point) for point in points]


def value_at(point: KrigingPoint) -> float:
    """The surface itself."""
    x, y = point.sizes
    return math.sin(x / 2) + 0.1 * y + (0.5 if point.traits == ("b",) else 0.0)


def test_a_surface_goes_through_its_points_and_between_them() -> None:
    """At known points it gives back what is known, and on new ones of either trait it is close."""
    points, values = plane(60)
    surface = fitted(points, values)
    assert [surface.at(point).value for point in points] == pytest.approx(values, abs=0.1)
    others, truth = plane(40, seed=1)
    errors = [abs(surface.at(point).value - value) for point, value in zip(others, truth, strict=True)]
    assert max(errors) < 0.25
    assert float(np.mean(errors)) < 0.05


def test_deviations_are_as_large_as_errors() -> None:
    """About two thirds of new points lie within one deviation, and nearly all within three."""
    random = np.random.default_rng(3)
    points, values = plane(80)
    noisy = [value + float(random.normal(0, 0.1)) for value in values]
    surface = fitted(points, noisy)
    others, truth = plane(200, seed=5)
    seen = [value + float(random.normal(0, 0.1)) for value in truth]
    guesses = [surface.at(point) for point in others]
    z = [abs(guess.value - value) / guess.deviation for guess, value in zip(guesses, seen, strict=True)]
    assert 0.5 < float(np.mean([each < 1 for each in z])) < 0.9
    assert float(np.mean([each < 3 for each in z])) > 0.97


def test_far_from_all_points_little_is_claimed() -> None:
    """The value returns to the mean, and the deviation grows."""
    points, values = plane(60)
    surface = fitted(points, values)
    near, far = surface.at(KrigingPoint((3.0, 3.0), ("a",))), surface.at(KrigingPoint((200.0, 200.0), ("a",)))
    assert far.deviation > 3 * near.deviation
    assert min(values) < far.value < max(values)


def test_a_trait_never_seen_is_less_certain() -> None:
    """A new trait borrows from the others, with a wider deviation."""
    points, values = plane(60)
    surface = fitted(points, values)
    known, new = (surface.at(KrigingPoint((3.0, 3.0), (trait,))) for trait in "az")
    assert new.deviation > 1.5 * known.deviation


def test_one_point_is_enough() -> None:
    """A family of which one operation was measured has a mean, and no more."""
    assert fitted([KrigingPoint((1.0,), ("a",))], [0.7]).at(KrigingPoint((2.0,), ("a",))).value == pytest.approx(0.7)

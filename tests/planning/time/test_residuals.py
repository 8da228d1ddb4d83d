import numpy as np
import pytest

from stoker.planning.model.gpu_times import TimeResiduals

GRID = np.array([[x, y] for x in range(10) for y in range(10)], dtype=float)


def test_a_smooth_error_is_found_between_the_points() -> None:
    """Between points of a plane the correction is the plane's, and its own error is small."""
    residuals = TimeResiduals.of(GRID, 0.03 * GRID[:, 0])
    correction, error = residuals.at(np.array([4.5, 4.5]))
    assert correction == pytest.approx(0.135, abs=0.02)
    assert error < residuals.spread


def test_far_from_all_points_nothing_is_known() -> None:
    """Twenty doublings away the correction is the mean, and the error what the points spread."""
    residuals = TimeResiduals.of(GRID, 0.03 * GRID[:, 0])
    correction, error = residuals.at(np.array([60.0, 60.0]))
    assert correction == pytest.approx(residuals.mean, abs=0.01)
    assert error == pytest.approx(residuals.spread, rel=0.1)


def test_errors_left_out_are_those_made_without_the_point() -> None:
    """The closed form for leaving a point out gives what fitting without it gives."""
    errors = np.random.default_rng(0).normal(0, 0.1, len(GRID))
    whole = TimeResiduals.of(GRID, errors)
    centred = np.clip(errors, whole.mean - 0.25, whole.mean + 0.25) - whole.mean
    keep = np.arange(len(GRID)) != 37
    distances = np.sqrt(((GRID[:, None] - GRID[None]) ** 2).sum(-1))
    covariance = whole.spread**2 * np.exp(-distances / 4) + 0.025**2 * np.eye(len(GRID))
    told = covariance[37, keep] @ np.linalg.solve(covariance[np.ix_(keep, keep)], centred[keep])
    assert whole.left_out[37] == pytest.approx(centred[37] - told, abs=1e-6)


def test_errors_rougher_than_the_kernel_expects_widen_the_interval() -> None:
    """Where most points agree and a quarter scatter, the deviation is more than the agreeing ones suggest."""
    errors = np.zeros(len(GRID))
    errors[::4] = 0.2 * (-1.0) ** np.arange(25)
    rough, smooth = (TimeResiduals.of(GRID, one) for one in (errors, np.zeros(len(GRID))))
    assert smooth.inflation == 1.0
    assert rough.inflation > 1.2
    assert rough.at(GRID[33])[1] > 1.2 * smooth.at(GRID[33])[1]


def test_a_broken_measurement_moves_its_neighbours_little() -> None:
    """One point that is e^3 times too slow counts as an ordinary outlier."""
    errors = np.zeros(len(GRID))
    errors[55] = 3.0
    assert abs(TimeResiduals.of(GRID, errors).at(GRID[44])[0]) < 0.05


def test_many_points_are_thinned() -> None:
    """Five thousand points are taken in with a thousand of them, and still tell the error."""
    points = np.random.default_rng(1).uniform(0, 12, (5000, 2))
    residuals = TimeResiduals.of(points, 0.02 * points[:, 1])
    assert len(residuals.points) < 2000
    assert residuals.at(np.array([6.0, 6.0]))[0] == pytest.approx(0.12, abs=0.02)

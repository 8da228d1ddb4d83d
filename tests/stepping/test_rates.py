"""Factors of the learning rate: what a schedule may give."""

from __future__ import annotations

import math

import pytest

from stoker.errors import BadJob
from stoker.stepping.torch_optimizers import factor_at
from tests.training.builders import advance, step_of, tiny_job


@pytest.mark.parametrize("factor", [0, 0.0, 1e-9, 1.0, 30.0])
def test_any_factor_from_zero_on_is_one(factor: float) -> None:
    """A schedule may end at zero, and rise above one."""
    assert factor_at(lambda _progress: factor, 0.5) == factor


@pytest.mark.parametrize("factor", [-1.0, -1e-12, math.nan, math.inf])
def test_what_climbs_the_loss_is_refused_with_its_place(factor: float) -> None:
    """A negative rate trained uphill to the end of the run."""
    with pytest.raises(BadJob, match=rf"the schedule gives {factor} at 62\.5 % of the run, wanted"):
        factor_at(lambda _progress: factor, 0.625)


def test_it_is_found_at_the_update_that_would_use_it() -> None:
    """A schedule that falls below zero is reported where it does: the fifth of 15 updates."""
    step = step_of(tiny_job(schedule=lambda progress: 0.25 - progress))
    with pytest.raises(BadJob, match=r"gives -0\.016.* at 26\.67 % of the run"):
        advance(step, 0, 15)
    assert step.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (0.25 - 3 / 15))

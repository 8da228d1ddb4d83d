from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.planning.plan_history import describe_past_errors, typical_error
from stoker.records import Basis, Calibration
from stoker.records.run import Quantity


def known(
    forecast: float, measured: float, *, quantity: Quantity = "total_s", basis: Basis = "roofline"
) -> Calibration:
    """What a run wrote down."""
    return Calibration(
        device_model="a CPU",
        torch_version="2",
        run="x",
        quantity=quantity,
        forecast=forecast,
        measured=measured,
        at="2026-11-22T12:00:00+00:00",
        basis=basis,
    )


def test_toys_are_left_out() -> None:
    """A run of a tenth of a second that took a minute to start says nothing of forecasts; of memory all count."""
    assert describe_past_errors([known(0.01, 3.0), known(0.02, 0.5)]) == ()
    (line,) = describe_past_errors([known(0.01, 3.0), known(100.0, 110.0), known(2e8, 3e8, quantity="peak_bytes")])
    assert line.endswith("time from traces alone 10.0%, memory from traces alone 50.0%")


def test_before_and_after_trials_are_told_apart() -> None:
    """One error each."""
    (line,) = describe_past_errors([known(100.0, 300.0), known(100.0, 102.0, basis="measured here")])
    assert line == "errors of forecasts here so far (median): time from traces alone 200.0%, time after trials 2.0%"


@given(st.lists(st.tuples(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9)), min_size=1, max_size=9))
def test_no_figure_is_above_a_thousand_per_cent(pairs: list[tuple[float, float]]) -> None:
    """Beyond, words say it; and twice too much counts as half too little does."""
    found = typical_error([known(*pair) for pair in pairs])
    assert found == typical_error([known(measured, forecast) for forecast, measured in pairs])
    assert found in ("", "over ten times off") or 0 <= float(found.rstrip("%")) <= 900.0


@pytest.mark.parametrize("one", [known(0.0, 20.0), known(20.0, 0.0)])
def test_nothing_is_divided_by_nothing(one: Calibration) -> None:
    """What was not measured, or not forecast, is no error."""
    assert describe_past_errors([one]) == ()

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.planning.model.run_forecast import complete_breakdown
from stoker.records import Breakdown, Estimate, Share
from tests.planning.trials import estimate, forecast_of

PARTS = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=8)


def broken_down(parts: list[float]) -> Breakdown:
    """A trace's parts, the same of bytes and of time."""
    shares = tuple(Share(what=str(i), value=value) for i, value in enumerate(sorted(parts, reverse=True)))
    return Breakdown(peak_bytes=shares, peak_at="the end", step_s=shares)


def forecast_with(peak: float, step_s: Estimate):
    """A forecast with this peak and this update."""
    return dataclasses.replace(forecast_of(1.0), peak_bytes=estimate(peak, "bytes"), step_s=step_s)


@given(PARTS, st.floats(1.0, 100.0))
def test_parts_and_what_no_trace_knows_are_the_whole(parts: list[float], factor: float) -> None:
    """Within a hundredth, the largest first; what was traced stays as it is."""
    whole = sum(parts) * factor
    found = complete_breakdown(
        broken_down(parts), forecast_with(whole, estimate(whole, "s", "measured here")), is_cpu=True
    )
    for shares in (found.peak_bytes, found.step_s):
        values = [share.value for share in shares]
        assert sum(values) == pytest.approx(whole, rel=0.0101)
        assert values == sorted(values, reverse=True)
        assert {*parts} <= {*values}


def test_what_is_besides_is_called_by_its_name() -> None:
    """A small model in a process of hundreds of megabytes, whose update waits more than it computes."""
    found = complete_breakdown(
        broken_down([7e4]), forecast_with(4.5e8, estimate(7.1e4, "s", "measured here")), is_cpu=True
    )
    assert found.peak_bytes[0].what == "the process besides"
    assert found.peak_bytes[0].value == pytest.approx(4.5e8 - 7e4)
    assert [share.what for share in found.step_s] == ["0", "between traced operations"]
    elsewhere = complete_breakdown(broken_down([7e4]), forecast_with(8e4, estimate(8e4, "s")), is_cpu=False)
    assert elsewhere.peak_bytes[-1].what == "outside the update"
    assert elsewhere.step_s[-1].where == "fetching samples"


def test_a_trace_of_more_than_was_measured_stays_as_it_is() -> None:
    """Nothing negative is made up."""
    traced = broken_down([3.0, 2.0])
    assert complete_breakdown(traced, forecast_with(4.0, estimate(4.9, "s", "measured here")), is_cpu=True) == traced

"""HTML from values."""

import json

from hypothesis import given
from hypothesis import strategies as st

from stoker.records import Estimate
from stoker.reporting.markup import element, escaped, facts, interval_strip, script_json, table


def test_text_and_attributes_are_escaped() -> None:
    """Neither a tag nor a quote gets through."""
    made = element("p", escaped("<b>&"), css='"><script>', title="a'b")
    assert made == '<p class="&quot;&gt;&lt;script&gt;" title="a&#x27;b">&lt;b&gt;&amp;</p>'


@given(st.text(alphabet='<>&/!-scriptSCRIPT"\u2028'))
def test_json_in_a_script_cannot_end_it(text: str) -> None:
    """Whatever the strings hold, no `<` is left, and the JSON means the same."""
    made = script_json(json.dumps({"text": text}, ensure_ascii=False))
    assert "<" not in made
    assert json.loads(made) == {"text": text}


def test_a_fact_without_content_is_left_out() -> None:
    """No term stands alone."""
    assert "seed" not in facts([("seed", escaped("")), ("batch", escaped(512))])


def test_cells_name_their_column() -> None:
    """A narrow screen stacks cells and shows their labels."""
    assert 'data-label="plan"' in table(("plan",), [(escaped("fp32"),)])


def test_a_strip_draws_inside_and_outside_differently() -> None:
    """The measured dot says by its shape whether it lies in the interval, and all is said in words too."""
    forecast = Estimate(value=10.0, low=9.0, high=12.0, unit="s", basis="roofline")
    assert 'class="dot in"' in interval_strip(forecast, 11.0)
    assert 'class="dot out"' in interval_strip(forecast, 30.0)
    assert "dot" not in interval_strip(forecast, None)
    assert "measured 30.0 s" in interval_strip(forecast, 30.0)


def test_a_strip_of_a_certain_forecast_can_be_drawn() -> None:
    """An interval of no width divides by nothing."""
    assert "nan" not in interval_strip(Estimate(value=0.0, low=0.0, high=0.0, unit="s", basis="unknown"), 0.0)

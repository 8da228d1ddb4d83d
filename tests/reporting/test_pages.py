"""HTML from templates, and the colours of pages."""

import dataclasses
import html
import json
import math
import re

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.records import Estimate, Event
from stoker.reporting.colours import COLOURS, PHASE_COLOURS, repainting
from stoker.reporting.pages import bundled, coded, compact_json, render, script_json
from stoker.reporting.run_page import render_html
from stoker.reporting.run_sections import render_sections, strip_positions
from stoker.reporting.summary import PHASES
from tests.reporting import story
from tests.reporting.test_bottlenecks import FOUND

EVIL = "\"'><script>alert(1)</script>"


def test_text_and_attributes_are_escaped() -> None:
    """Neither a tag nor a quote gets through, in whatever a template is given."""
    made = render(
        "side_by_side",
        title=EVIL,
        policy=EVIL,
        scripts=(),
        data="",
        names=[EVIL],
        outcomes=[(EVIL,) * 5],
        by_samples=[],
        by_time=[],
    )
    assert made.count("&#34;&#39;&gt;&lt;script&gt;alert(1)&lt;/script&gt;") == 8
    assert "<script" not in made


@given(st.text(alphabet="`<>&\"'a "))
def test_code_in_running_text_is_escaped(text: str) -> None:
    """What is between backticks becomes an element, and nothing else does; no character is lost."""
    made = str(coded(text))
    assert not re.search("[<>\"']", re.sub("</?code>", "", made))
    assert html.unescape(re.sub("</?code>", "`", made)) == text


def test_no_text_of_a_report_has_backticks() -> None:
    """What events, the plan and the bottleneck say of commands is shown as code."""
    *events, end = story.whole_run()
    warning = Event(kind="warned", at=end.at, fields={"message": "`nproc` says 4"})
    sections = render_sections(dataclasses.replace(story.report([*events, warning, end]), bottleneck=FOUND))
    assert "<code>nproc</code> says 4" in sections
    assert "`" not in sections


def test_a_value_that_is_missing_is_an_error() -> None:
    """A page never has a gap where a name was misspelt."""
    with pytest.raises(jinja2.UndefinedError, match="lines"):
        render("notebook")


@given(st.text(alphabet='<>&/!-scriptSCRIPT"\u2028'))
def test_json_in_a_script_cannot_end_it(text: str) -> None:
    """Whatever the strings hold, no `<` is left, and the JSON means the same."""
    made = script_json(json.dumps({"text": text}, ensure_ascii=False))
    assert "<" not in made
    assert json.loads(made) == {"text": text}


def test_bundled_modules_find_what_they_import() -> None:
    """Each stands after those that it imports, and no syntax of modules is left: an inline script may not have it."""
    script = bundled("format.js", "dom.js", "vendor/uPlot.js", "chart.js")
    found: set[str] = set()
    for line in script.splitlines():
        if made := re.match(r'modules\["(.+)"\] = ', line):
            found.add(made[1])
        elif asked := re.match(r'const (.+) = modules\["(.+)"\];', line):
            assert asked[2] in found, line
        assert not line.startswith(("import ", "export ")), line
    assert found == {"format.js", "dom.js", "vendor/uPlot.js", "chart.js"}
    assert "return uPlot;" in script
    assert re.search(r"return \{ COLOURS, colour, Axis, LineChart, joined \};", script)


def test_numbers_in_a_page_have_six_figures() -> None:
    """Charts show no more; what is not finite is null, since JSON has no word for it; others are as they are."""
    numbers = [0.123456789, 270_000.0, math.nan, -math.inf, "nan", 10**20, True, 1_767_225_600.25]
    assert compact_json({"a": numbers}, figures=6) == (
        '{"a":[0.123457,270000,null,null,"nan",100000000000000000000,true,1767230000.0]}'
    )
    assert json.loads(compact_json(numbers))[-1] == 1_767_225_600.25


def test_a_fact_without_content_is_left_out() -> None:
    """No term stands alone."""
    made = render_html(story.report(story.whole_run()[:2], has_plan=False))
    assert "<dt>seed</dt>" in made
    assert "<dt>gradient error</dt>" not in made


def test_cells_name_their_column() -> None:
    """A narrow screen stacks cells and shows their labels."""
    assert 'data-label="measured"' in render_html(story.report(story.whole_run()))


def test_a_strip_draws_inside_and_outside_differently() -> None:
    """The measured dot says by its shape whether it is in the interval, and all is said in words too."""
    made = render_html(story.report(story.whole_run()))
    assert 'class="dot in"' in made
    assert 'aria-label="forecast 3 min 53 s (3 min 34 s to 4 min 12 s), measured 3 min 55 s"' in made
    assert made.count('class="dot') == 6 - made.count(">not measured<") > 0


def test_a_strip_spans_the_interval_and_the_measured_value() -> None:
    """All are within the picture, in order; without a measured value there is no dot."""
    forecast = Estimate(value=10.0, low=9.0, high=12.0, unit="s", basis="roofline")
    left, right, tick, dot = strip_positions(forecast, 30.0)
    assert dot is not None
    assert 8 < left < tick < right < dot < 142
    assert strip_positions(forecast, None)[3] is None


def test_a_strip_of_a_certain_forecast_can_be_drawn() -> None:
    """An interval of no width divides by nothing."""
    forecast = Estimate(value=0.0, low=0.0, high=0.0, unit="s", basis="unknown")
    assert all(math.isfinite(x or 0.0) for x in strip_positions(forecast, 0.0))


TEXT = ("ink", "muted", "ember", "amber", "good", "bad")
AREAS = ("ember", "blue", "teal", "violet", "amber", "grey")


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours (WCAG 2.2)."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "surface"])
def test_text_and_areas_stand_out(scheme: int, ground: str) -> None:
    """Text has a contrast of 4.5 to 1 and areas of 3 to 1 against both backgrounds, light and dark."""
    behind = COLOURS[ground][scheme]
    assert min((contrast(COLOURS[name][scheme], behind), name) for name in TEXT)[0] >= 4.5
    assert min((contrast(COLOURS[name][scheme], behind), name) for name in AREAS)[0] >= 3.0


def test_every_light_colour_has_one_dark_one() -> None:
    """Figures are repainted colour by colour, so no two names may share a light one."""
    assert len(repainting()) == len(COLOURS)


def test_every_phase_has_a_colour_of_its_own() -> None:
    """The time bar distinguishes its phases."""
    assert set(PHASE_COLOURS) == set(PHASES)
    assert len(set(PHASE_COLOURS.values())) == len(PHASES)

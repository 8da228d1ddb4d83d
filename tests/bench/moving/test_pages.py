"""docs/migrating.md shows the files in examples/moving, and the figures that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.moving.table import PATH, rows

ROOT = Path(__file__).resolve().parents[3]
PAGE, EXAMPLES = ROOT / "docs" / "migrating.md", ROOT / "examples" / "moving"


@pytest.mark.parametrize("name", ["lightning", "trainer", "own_loop"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_the_page_shows_the_file(name, side):
    """The file stands in the page, word for word."""
    shown = PAGE.read_text(encoding="utf-8")
    assert f"```python\n{(EXAMPLES / f'{name}_{side}.py').read_text(encoding='utf-8')}```\n" in shown


def test_the_table_is_what_was_measured():
    """Each line of the table comes from the file of results."""
    content = json.loads(PATH.read_text(encoding="utf-8"))
    assert "\n".join(rows(content)) in PAGE.read_text(encoding="utf-8")


def test_what_was_measured_holds():
    """At least 50 updates of each of the three, no loss further than 1e-5 from the other's."""
    cases = json.loads(PATH.read_text(encoding="utf-8"))["cases"]
    assert set(cases) == {"lightning", "hugging_face", "own_loop"}
    assert all(case["holds"] and case["updates"] >= 50 for case in cases.values())


def test_a_row_tells_differences_and_ratios():
    """A case in words: no difference is 0, ratios have their intervals."""
    ratio = {"median": 1.234, "low": 1.0, "high": 1.5}
    case = {
        "what": "A loop",
        "versions": {"torch": "2"},
        "updates": 60,
        "largest_loss_difference": 0.0,
        "ratio_same_micro_batch": ratio,
        "ratio_planned": ratio,
        "lines_of_code": {"before": 50, "after": 20},
    }
    told = "| A loop, torch 2 | 60 | 0 | 1.23× (1.00 to 1.50) | 1.23× (1.00 to 1.50) | 50 → 20 |"
    assert rows({"cases": {"loop": case}})[-1] == told

from __future__ import annotations

from stoker.records.data_check import CleanList, ColumnFacts, DataCheck, Fault, Finding, SplitFacts
from stoker.reporting.data_page import FAULTS, pictured, render_data_page
from tests.reporting.test_html import Page

CLEAN = CleanList(source="s", made_at="now", kept=10)
PIXEL = "data:image/png;base64,AA=="


def _check(*findings: Finding, columns: tuple[ColumnFacts, ...] = ()) -> DataCheck:
    splits = (
        SplitFacts(name="train", num_samples=8, classes={"<cat>": 6, "dog": 2}),
        SplitFacts(name="", num_samples=2),
    )
    return DataCheck(
        source="a&b",
        kind="images",
        made_at="now",
        took_s=2.0,
        splits=splits,
        findings=findings,
        columns=columns,
        notes=("looked <closely>",),
    )


def _page(check: DataCheck, pictures: dict[str, str]) -> Page:
    page = Page(render_data_page(check, CLEAN, pictures))
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    return page


def test_every_kind_of_fault_has_words_and_a_section() -> None:
    """A page with all kinds nests, links to a section for each, and escapes what comes from the data."""
    findings = [Finding(fault=fault, gravity="fault", id=f"<{fault}>", detail="x < y") for fault in FAULTS]
    page = _page(_check(*findings), {"<blank>": PIXEL})
    assert set(page.ids) == {f"fault-{fault}" for fault in FAULTS}
    assert {reference.removeprefix("#") for reference in page.references if reference.startswith("#")} == set(page.ids)
    for text in ("<blank>", "x < y", "<cat>", "looked <closely>", "a&b"):
        assert text in page.text


def test_every_fault_has_words() -> None:
    """The table of words has exactly the faults that there are."""
    assert set(FAULTS) == set(Fault.__args__)


def test_pictures_are_few_and_spread_over_the_ranking() -> None:
    """Of a thousand findings the worst, the mildest and some between are shown, and how many there are is said."""
    findings = [
        Finding(fault="near-duplicate", gravity="suspect", id=f"{n:04d}", related=(f"b{n:04d}",), measure=1 - n / 1e4)
        for n in range(1000)
    ]
    check = _check(*findings)
    names = pictured(check)
    assert len(names) == 48
    assert names[:2] == ("0000", "b0000")
    assert names[-2] > "0950"
    page = _page(check, dict.fromkeys(names, PIXEL))
    assert page.tags.count("img") == 48
    assert "24 of 1,000 are shown" in page.text


def test_a_table_is_shown_by_rows_and_columns() -> None:
    """Findings without pictures are rows; columns have a table, which says of which split they are."""
    columns = (ColumnFacts(name="age", kind="number", num_rows=10, missing=1, distinct=5, median=3.5, examples=("3",)),)
    page = _page(_check(Finding(fault="outlier", gravity="suspect", id="t:1", detail="far"), columns=columns), {})
    assert "img" not in page.tags
    for text in ("t:1", "far", "Columns of train", "age", "10.00%", "3.5"):
        assert text in page.text


def test_a_clean_set_says_so() -> None:
    """Nothing found is said in words."""
    page = _page(_check(), {})
    assert "Nothing: no fault" in page.text
    assert "no faults" in page.text


def test_the_page_loads_nothing() -> None:
    """Its policy forbids scripts and everything from elsewhere."""
    html = render_data_page(_check(), CLEAN, {})
    assert "default-src &#39;none&#39;" in html
    assert "<script" not in html

from __future__ import annotations

import pytest

from stoker.records import CleanList, Dropped, dumps, loads
from stoker.records.data_check import DataCheck, Finding, SplitFacts

LIST = CleanList(
    source="photos",
    made_at="2026-11-22T08:00:00+00:00",
    kept=41,
    dropped=(Dropped(id="train/cat/1.jpg", why="corrupt", detail="cut off"), Dropped(id="t.csv:3", why="ragged")),
)


def test_a_clean_list_survives_json() -> None:
    """What is read is what was written, and the names to leave out are a set."""
    assert loads(dumps(LIST), CleanList) == LIST
    assert LIST.dropped_ids() == {"train/cat/1.jpg", "t.csv:3"}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"kept": 41', '"kept": -1', "0 samples or more"),
        ('"corrupt"', '"ugly"', "wanted one of"),
        ('"schema": 1', '"schema": 7', "reads version 1"),
    ],
)
def test_another_content_is_refused(old: str, new: str, words: str) -> None:
    """A list of another version, with an unknown reason or an impossible count, is refused by name."""
    with pytest.raises(ValueError, match=words):
        loads(dumps(LIST).replace(old, new), CleanList)


def test_findings_are_counted_from_the_gravest() -> None:
    """Counts come by gravity, then by how many there are."""
    findings = (
        Finding(fault="near-duplicate", gravity="suspect", id="a"),
        Finding(fault="leak", gravity="fault", id="b"),
        *(Finding(fault="duplicate", gravity="fault", id=name) for name in "cd"),
        Finding(fault="corrupt", gravity="corrupt", id="e"),
    )
    splits = (SplitFacts(name="train", num_samples=7), SplitFacts(name="test", num_samples=2))
    check = DataCheck(source="x", kind="images", made_at="", took_s=1.0, findings=findings, splits=splits)
    assert list(check.counts().items()) == [
        (("corrupt", "corrupt"), 1),
        (("fault", "duplicate"), 2),
        (("fault", "leak"), 1),
        (("suspect", "near-duplicate"), 1),
    ]
    assert check.num_samples == 9
    assert loads(dumps(check), DataCheck) == check

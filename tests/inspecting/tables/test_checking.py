from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import BadJob
from stoker.inspecting import Checked, CheckOptions, check

HEAD = "x,kind,label\n"
ROWS = [f"{n * 1.5},{'ab'[n % 2]},{('no', 'yes')[n % 3 == 0]}" for n in range(60)]


def _checked(tmp_path: Path, files: dict[str, str], options: CheckOptions | None = None) -> Checked:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return check(folder, (), options or CheckOptions(), workers=1, tell=lambda *_: None)


def _told(checked: Checked, fault: str) -> list[str]:
    return [finding.id or finding.where for finding in checked.findings if finding.fault == fault]


def test_a_sound_table_has_no_findings(tmp_path: Path) -> None:
    """A clean table has no findings; columns and classes are still reported."""
    checked = _checked(tmp_path, {"t.csv": HEAD + "\n".join(ROWS)})
    assert checked.findings == ()
    assert [(one.name, one.kind) for one in checked.columns] == [
        ("x", "number"),
        ("kind", "category"),
        ("label", "category"),
    ]
    assert checked.splits[0].classes == {"no": 40, "yes": 20}


def test_a_number_that_is_proportional_to_the_target_tells_it(tmp_path: Path) -> None:
    """A column in other units than the target is found; one that merely goes with it is not."""
    rows = [f"{n * 2.54},{n + (n * 7919 % 13)},{n}" for n in range(80)]
    checked = _checked(tmp_path, {"t.csv": "cm,about,inches\n" + "\n".join(rows)}, CheckOptions(target="inches"))
    assert _told(checked, "target-leak") == ["cm"]


def test_a_column_that_is_usually_the_target_by_chance_does_not_tell_it(tmp_path: Path) -> None:
    """Where nearly all targets are one, agreeing with most of them is no leak."""
    rows = [f"no,{'yes' if n < 2 else 'no'}" for n in range(400)]
    checked = _checked(tmp_path, {"t.csv": "constant,label\n" + "\n".join(rows)})
    assert _told(checked, "target-leak") == []
    assert _told(checked, "constant") == ["constant"]
    assert _told(checked, "imbalance") == [""]


def test_a_contradiction_is_told_beside_what_it_contradicts(tmp_path: Path) -> None:
    """A row with the same target is a duplicate, and no contradiction."""
    rows = [*ROWS, "7,a,no", "7,a,no", "7,a,yes"]
    found = _checked(tmp_path, {"t.csv": HEAD + "\n".join(rows)}).findings
    told = {one.id: (one.related, one.detail.split(",")[0]) for one in found if one.fault == "contradiction"}
    assert told == {
        "t.csv:60": (("t.csv:62",), "another 'label' than t.csv:62"),
        "t.csv:61": (("t.csv:62",), "another 'label' than t.csv:62"),
        "t.csv:62": (("t.csv:60", "t.csv:61"), "another 'label' than t.csv:60"),
    }


def test_rows_that_differ_in_a_long_number_alone_are_two(tmp_path: Path) -> None:
    """Accounts of 17 figures, which a float would round to one."""
    rows = [f"{2**53 + n},a,{('no', 'yes')[n % 3 == 0]}" for n in range(60)]
    assert _told(_checked(tmp_path, {"t.csv": HEAD + "\n".join(rows)}), "duplicate") == []


def test_long_tails_are_not_outliers(tmp_path: Path) -> None:
    """Where many values are far out, none is reported; where one is, it is."""
    tail = [f"{10 ** (n % 9)},a,no" for n in range(300)]
    assert _told(_checked(tmp_path, {"t.csv": HEAD + "\n".join(tail)}), "outlier") == []
    (tmp_path / "set" / "t.csv").write_text(HEAD + "\n".join([*ROWS, "1e7,a,no"]))
    again = check(tmp_path / "set", (), CheckOptions(), workers=1, tell=lambda *_: None)
    assert _told(again, "outlier") == ["t.csv:60"]


def test_numbers_of_rows_are_not_outliers(tmp_path: Path) -> None:
    """A column called `id` may count on from anywhere in another split; other columns may not."""
    files = {
        f"{split}.csv": "id,x,label\n" + "\n".join(f"{start + n},{start + n},{'ab'[n % 2]}" for n in range(60))
        for split, start in (("train", 0), ("valid", 10_000))
    }
    told = [one.detail for one in _checked(tmp_path, files).findings if one.fault == "outlier"]
    assert len(told) == 60
    assert all(detail.startswith("x is ") for detail in told)


def test_an_option_that_names_no_column_is_refused(tmp_path: Path) -> None:
    """A typing error is reported with the nearest name."""
    with pytest.raises(BadJob, match="no column 'labl'") as caught:
        _checked(tmp_path, {"t.csv": HEAD + "\n".join(ROWS)}, CheckOptions(target="labl"))
    assert "label" in (caught.value.remedy or "")


def test_columns_that_are_ignored_do_not_tell_rows_apart(tmp_path: Path) -> None:
    """Two rows that differ in an ignored column are one."""
    text = "when,x\n" + "\n".join(f"{n},{n % 30}" for n in range(60))
    assert len(_told(_checked(tmp_path, {"t.csv": text}, CheckOptions(ignore=("when",))), "duplicate")) == 30


def test_a_split_without_a_column_and_a_mixed_one(tmp_path: Path) -> None:
    """What only training has is missing elsewhere; a column of two types is reported once, not by row."""
    train = HEAD + "\n".join(f"{n if n % 3 else 'w' + str(n)},a,no" for n in range(60))
    checked = _checked(tmp_path, {"train.csv": train, "test.csv": "x,label\n1,no\n2,no\n"})
    assert _told(checked, "missing-column") == ["test/kind"]
    assert _told(checked, "mixed-types") == ["train/x"]


def test_a_table_that_cannot_be_read_at_all_is_an_error(tmp_path: Path) -> None:
    """Without a row there is nothing to check."""
    with pytest.raises(BadJob, match=r"No row can be read: t\.csv is empty"):
        _checked(tmp_path, {"t.csv": ""})

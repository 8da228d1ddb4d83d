from __future__ import annotations

from pathlib import Path

import pytest

from bench.data.planted import plant_csv, plant_images
from stoker import data, flow
from stoker.data.files.cleaning import left_out_of_files
from stoker.errors import BadJob
from stoker.inspecting import CheckOptions
from stoker.records import CleanList, loads
from stoker.records.cleaning import DataCheck

OPTIONS = CheckOptions(workers=1)


def test_a_check_writes_document_list_and_page(tmp_path: Path) -> None:
    """All three are there, hold what was returned, and the page shows the pictures that were found."""
    plant_images(tmp_path / "set", per_class=50, copies=1)
    checked = flow.check_data(tmp_path / "set", OPTIONS, out=tmp_path / "out")
    assert loads((tmp_path / "out" / "check.json").read_bytes(), DataCheck) == checked.check
    assert loads((tmp_path / "out" / "clean.json").read_bytes(), CleanList) == checked.clean
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img") > 20
    assert "train/cross/leak-0.png" in page


def test_what_is_left_of_a_cleaned_set_has_no_faults(tmp_path: Path) -> None:
    """Once the samples on the list are deleted, a second check finds no sample with a fault."""
    plant_images(tmp_path / "set", per_class=50, copies=1)
    first = flow.check_data(tmp_path / "set", OPTIONS)
    for name in first.clean.dropped_ids():
        (tmp_path / "set" / name).unlink()
    second = flow.check_data(tmp_path / "set", OPTIONS)
    assert second.check.num_samples == first.clean.kept
    assert {one.fault for one in second.check.findings if one.id and one.gravity in {"corrupt", "fault"}} == {
        "extension"
    }


def test_progress_is_told_to_the_end(tmp_path: Path) -> None:
    """Every stage is named, and never tells more than there is."""
    plant_csv(tmp_path / "csv")
    told: list[tuple[str, int, int]] = []
    flow.check_data(tmp_path / "csv", OPTIONS, tell=lambda *one: told.append(one))
    assert {what for what, _, _ in told} == {"reading rows", "reading files", "asking values"}
    assert all(done <= total for _, done, total in told if total)


def test_the_report_is_not_written_into_the_data(tmp_path: Path) -> None:
    """A directory within the source is refused before anything is read."""
    plant_csv(tmp_path / "csv")
    with pytest.raises(BadJob, match="is within"):
        flow.check_data(tmp_path / "csv", OPTIONS, out=tmp_path / "csv" / "out")
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == ["test.csv", "train.csv"]


@pytest.mark.parametrize(("out", "problem"), [("file", "is a file"), ("file/below", "cannot be made")])
def test_where_nothing_can_be_written_nothing_is_read(tmp_path: Path, out: str, problem: str) -> None:
    """The directory is made before the check, which may take hours."""
    plant_csv(tmp_path / "csv")
    (tmp_path / "file").touch()
    told: list[str] = []
    with pytest.raises(BadJob, match=problem):
        flow.check_data(tmp_path / "csv", OPTIONS, out=tmp_path / out, tell=lambda *one: told.append(one[0]))
    assert not told


def test_a_clean_list_says_where_the_data_are_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked by a relative path, and used from another folder, in which there is one of that name."""
    plant_csv(tmp_path / "here" / "csv")
    (tmp_path / "there" / "csv").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    checked = flow.check_data("csv", OPTIONS, out="out")
    assert checked.check.source == "csv"  # the document says what was asked
    assert checked.clean.source == str(tmp_path / "here" / "csv")
    monkeypatch.chdir(tmp_path / "there")
    paths = sorted((tmp_path / "here" / "csv").rglob("*.csv"))
    left_out = left_out_of_files(tmp_path / "here" / "out" / "clean.json", paths)
    assert sum(map(len, left_out)) == len(checked.clean.dropped) > 0


def test_data_sources_take_the_clean_list(tmp_path: Path) -> None:
    """A folder of images that is read with the list that a check of the whole set wrote has what is kept of it."""
    plant_images(tmp_path / "set", per_class=50, copies=1)
    (tmp_path / "set" / "train" / "hexagon").rmdir()  # a class without images
    checked = flow.check_data(tmp_path / "set", OPTIONS, out=tmp_path / "out")
    test = next(split.num_samples for split in checked.check.splits if split.name == "test")
    images = data.image_folder(tmp_path / "set" / "train", clean=tmp_path / "out" / "clean.json")
    assert len(images) == checked.clean.kept - test

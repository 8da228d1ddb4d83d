from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from bench.data.planted import plant_csv, plant_images
from stoker import api, data
from stoker.data.files.sample_files import left_out_of_files
from stoker.errors import BadJob
from stoker.inspecting import CheckOptions
from stoker.records import CleanList, Event, loads
from stoker.records.codec import printable
from stoker.records.data_check import DataCheck
from stoker.reporting.display import PlainDisplay
from tests.flow.command import stoker_here
from tests.store.builders import make_run

OPTIONS = CheckOptions(workers=1)


def test_a_check_writes_document_list_and_page(tmp_path: Path) -> None:
    """All three are there, hold what was returned, and the page shows the pictures that were found."""
    plant_images(tmp_path / "set", per_class=50, copies=1)
    checked = api.check_data(tmp_path / "set", OPTIONS, out=tmp_path / "out")
    assert loads((tmp_path / "out" / "check.json").read_bytes(), DataCheck) == checked.check
    assert loads((tmp_path / "out" / "clean.json").read_bytes(), CleanList) == checked.clean
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img") > 20
    assert "train/cross/leak-0.png" in page


def test_what_is_left_of_a_cleaned_set_has_no_faults(tmp_path: Path) -> None:
    """Once the samples on the list are deleted, a second check finds no sample with a fault."""
    plant_images(tmp_path / "set", per_class=50, copies=1)
    first = api.check_data(tmp_path / "set", OPTIONS)
    for name in first.clean.dropped_ids():
        (tmp_path / "set" / name).unlink()
    second = api.check_data(tmp_path / "set", OPTIONS)
    assert second.check.num_samples == first.clean.kept
    assert {one.fault for one in second.check.findings if one.id and one.gravity in {"corrupt", "fault"}} == {
        "extension"
    }


def test_progress_is_told_to_the_end(tmp_path: Path) -> None:
    """Every stage is named, and never counts more samples than there are."""
    plant_csv(tmp_path / "csv")
    told: list[tuple[str, int, int]] = []
    api.check_data(tmp_path / "csv", OPTIONS, tell=lambda *one: told.append(one))
    assert {what for what, _, _ in told} == {"reading rows", "reading files", "asking values"}
    assert all(done <= total for _, done, total in told if total)


def test_the_report_is_not_written_into_the_data(tmp_path: Path) -> None:
    """A directory within the source is refused before anything is read."""
    plant_csv(tmp_path / "csv")
    with pytest.raises(BadJob, match="is within"):
        api.check_data(tmp_path / "csv", OPTIONS, out=tmp_path / "csv" / "out")
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == ["test.csv", "train.csv"]


@pytest.mark.parametrize(("out", "problem"), [("file", "is a file"), ("file/below", "cannot be made")])
def test_where_nothing_can_be_written_nothing_is_read(tmp_path: Path, out: str, problem: str) -> None:
    """The directory is made before the check, which may take hours."""
    plant_csv(tmp_path / "csv")
    (tmp_path / "file").touch()
    told: list[str] = []
    with pytest.raises(BadJob, match=problem):
        api.check_data(tmp_path / "csv", OPTIONS, out=tmp_path / out, tell=lambda *one: told.append(one[0]))
    assert not told


def test_a_clean_list_says_where_the_data_are_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked by a relative path, and used from another folder, in which there is one of that name."""
    plant_csv(tmp_path / "here" / "csv")
    (tmp_path / "there" / "csv").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    checked = api.check_data("csv", OPTIONS, out="out")
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
    checked = api.check_data(tmp_path / "set", OPTIONS, out=tmp_path / "out")
    test = next(split.num_samples for split in checked.check.splits if split.name == "test")
    images = data.image_folder(tmp_path / "set" / "train", clean=tmp_path / "out" / "clean.json")
    assert len(images) == checked.clean.kept - test


def test_names_that_are_not_utf8_lose_no_report_and_end_no_run(tmp_path: Path) -> None:
    """Damaged images of such names are reported, and left out by the list; other files of such names are noted."""
    root = tmp_path / "set"
    plant_images(root, per_class=30, copies=0)
    folder = next(path for path in root.rglob("*") if any(one.suffix == ".png" for one in path.iterdir()))
    bad = os.fsencode(folder) + b"/bad\xff\x1b[31m.png"
    Path(os.fsdecode(bad)).write_bytes(b"no image")
    Path(os.fsdecode(os.fsencode(folder) + b"/odd\xff.txt")).write_text("no image")
    checked = api.check_data(root, OPTIONS, out=tmp_path / "out")
    name = printable(os.path.relpath(os.fsdecode(bad), root))
    clean = loads((tmp_path / "out" / "clean.json").read_bytes(), CleanList)
    assert name in clean.dropped_ids()
    assert "bad\\xff" in (tmp_path / "out" / "report.html").read_text()
    for given in (clean, checked.clean):
        kept = data.image_folder(folder.parent, clean=given)
        assert all("bad" not in kept.sample_id(index) for index in range(len(kept)))
        assert len(kept) < len(data.image_folder(folder.parent))
    noted = Event(kind="noted", at=0.0, fields={"message": data.image_folder(folder.parent).note})
    directory = make_run(tmp_path / "run")
    directory.append_event(noted)
    assert (
        "odd" in directory.read_events()[0].fields["message"] or "bad" in directory.read_events()[0].fields["message"]
    )


def test_no_escape_sequence_of_a_name_reaches_the_terminal(tmp_path: Path) -> None:
    """Neither by a table, nor by an error, nor by plain lines of a run."""
    folder = tmp_path / "evil\x1b]0;title\x07\x1b[31m\x9b"
    folder.mkdir()
    plant_images(folder / "set", per_class=30, copies=0)
    shown = stoker_here("data", "check", folder / "set")
    assert "evil" in shown.out + shown.err
    lines = io.StringIO()
    PlainDisplay(lines)(Event(kind="warned", at=0.0, fields={"message": str(folder)}))
    for text in (shown.out, shown.err, lines.getvalue()):
        assert not {"\x1b", "\x9b"} & set(text)
